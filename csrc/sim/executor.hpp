// Runs one launch of a kernel on a simulated card: a fiber for each thread of the resident blocks, and a scheduler that
// a seed drives. The order of the blocks, how many are resident, the order of threads between two meetings and how the
// blocks interleave all come from the seed, so that a launch can be repeated exactly.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "sim/card.hpp"
#include "sim/memory.hpp"

namespace strata::sim {

struct Launch {
    const void* kernel;
    void (*enter)(const void* kernel, const void* arguments);  // calls the kernel with a copy of its arguments
    const void* arguments;
    std::array<unsigned, 3> grid;
    unsigned block;  // threads
    std::size_t shared_bytes;
    const void* stream = nullptr;
    bool overlapping = false;  // on a card it may begin before the launch ahead of it in its stream has ended
    unsigned cluster = 1;  // neighbouring blocks that are resident together and send into each other's shared memory
};

inline constexpr unsigned kMostInCluster = 8;  // that a card takes without being asked for more

// What stopped a launch: a code of the card's vendor, and a sentence that names kernel, block, thread and source line.
struct Fault {
    int code = 0;
    std::string text;
};

// False, with the fault, where the kernel did what a card does not allow. Threads that had not finished are abandoned
// where they stand. The caller sees to it that one launch runs at a time in a process.
bool execute(const Card& card, Memory& memory, const Launch& launch, std::uint64_t seed, Fault* fault);

}  // namespace strata::sim
