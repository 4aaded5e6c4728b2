// The cards that can be simulated: what a runtime would say of them, and what a launch must know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/fused_gr_policy.hpp"

namespace strata::sim {

struct Card {
    std::string arch;
    GrBackend vendor = GrBackend::Cuda;  // whose error codes and names
    int lanes = 32;                      // of a wave
    std::size_t shared_plain = 0;        // bytes of shared memory that a block gets without asking
    std::size_t shared_most = 0;         // and that it may ask for
    int compute_units = 0;
    bool background_copies = false;     // copies from global to shared memory do not wait
    bool overlapping_launches = false;  // a launch may begin before the one ahead of it has ended
    bool clusters = false;              // blocks of a launch can share their shared memory
};

// The names of the built-in profiles, comma separated.
const char* card_names();

// The profile called `text`, or the card that "name,lanes,shared,units" describes. False, with a sentence, where the
// text is neither.
bool find_card(std::string_view text, Card* card, std::string* problem);

}  // namespace strata::sim
