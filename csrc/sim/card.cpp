#include "sim/card.hpp"

#include <charconv>
#include <vector>

namespace strata::sim {
namespace {

constexpr std::size_t kKiB = 1024;

struct Profile {
    const char* arch;
    int lanes;
    std::size_t shared_plain;
    std::size_t shared_most;
    int compute_units;
};

// Shared memory and compute units of: RX 9060 XT, R9700, RX 7900 XTX, MI300X, MI250X (one die), T4, H200, RTX 5090.
constexpr Profile kProfiles[] = {
    {"gfx1200", 32, 64 * kKiB, 64 * kKiB, 32}, {"gfx1201", 32, 64 * kKiB, 64 * kKiB, 64},
    {"gfx1100", 32, 64 * kKiB, 64 * kKiB, 96}, {"gfx942", 64, 64 * kKiB, 64 * kKiB, 304},
    {"gfx90a", 64, 64 * kKiB, 64 * kKiB, 110}, {"sm_75", 32, 48 * kKiB, 64 * kKiB, 40},
    {"sm_90", 32, 48 * kKiB, 227 * kKiB, 132}, {"sm_120", 32, 48 * kKiB, 99 * kKiB, 170},
};

bool is_nvidia(std::string_view arch) { return arch.substr(0, 3) == "sm_"; }

template <class Number>
bool read_number(std::string_view text, Number* out) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
    return error == std::errc() && end == text.data() + text.size();
}

// What follows from the architecture's name.
void complete(Card* card) {
    card->vendor = is_nvidia(card->arch) ? GrBackend::Cuda : GrBackend::Hip;
    int capability = 0;
    if (!is_nvidia(card->arch) || !read_number(std::string_view(card->arch).substr(3), &capability)) capability = 0;
    card->background_copies = capability >= 80;
    card->overlapping_launches = card->clusters = capability >= 90;
}

}  // namespace

const char* card_names() {
    static const std::string names = [] {
        std::string list;
        for (const Profile& profile : kProfiles) list += (list.empty() ? "" : ",") + std::string(profile.arch);
        return list;
    }();
    return names.c_str();
}

bool find_card(std::string_view text, Card* card, std::string* problem) {
    for (const Profile& profile : kProfiles) {
        if (text != profile.arch) continue;
        *card = {profile.arch, {}, profile.lanes, profile.shared_plain, profile.shared_most, profile.compute_units};
        complete(card);
        return true;
    }
    std::vector<std::string_view> parts;
    for (std::size_t from = 0; from <= text.size();) {
        const std::size_t comma = std::min(text.find(',', from), text.size());
        parts.push_back(text.substr(from, comma - from));
        from = comma + 1;
    }
    std::size_t shared = 0;
    if (parts.size() != 4 || parts[0].empty() || !read_number(parts[1], &card->lanes) ||
        !read_number(parts[2], &shared) || !read_number(parts[3], &card->compute_units)) {
        *problem = "there is no simulated card '" + std::string(text) + "': name one of " + card_names() +
                   ", or describe one as name,lanes,shared bytes,compute units";
        return false;
    }
    if ((card->lanes != 32 && card->lanes != 64) || shared < 48 * kKiB || card->compute_units < 1) {
        *problem = "a simulated card has 32 or 64 lanes, at least 49152 bytes of shared memory and a compute unit; '" +
                   std::string(text) + "' does not";
        return false;
    }
    card->arch = parts[0];
    complete(card);
    card->shared_plain = card->vendor == GrBackend::Cuda ? 48 * kKiB : shared;
    card->shared_most = shared;
    return true;
}

}  // namespace strata::sim
