// What a path implements: the three steps of a read that threads share, each over a range of units that are
// independent of each other. A path computes the same bits for a unit wherever the range is cut.
#pragma once

#include <cstdint>

#include "common/backend.hpp"

namespace strata::cpu {

// Tokens that one pass over the weights serves: 64 already do far more arithmetic than reading. (With 128 or 256 in a
// pass, 512 tokens took as long.)
inline constexpr int kPassTokens = 64;

// Activations have room for a multiple of so many values a token: the chunks of a vector of lanes (few_tokens.hpp).
inline constexpr std::int64_t kRoomMultiple = 16 * kChunk;
constexpr std::int64_t room(std::int64_t values) {
    return (values + kRoomMultiple - 1) / kRoomMultiple * kRoomMultiple;
}

// Tokens of a pass that meet a weight together.
inline constexpr int kGroupTokens = 8;

// Up to so many tokens, one group, the vector paths read rows of weights from end to end (few_tokens.hpp), beyond lane
// by lane (many_tokens.hpp).
inline constexpr int kFewTokens = kGroupTokens;
// Up to so many are two passes of few, on every path. (One thread, AVX-512, twice few and many: 9 tokens 0.93 and 1.07
// ms, 12 tokens 1.12 and 1.21, 14 tokens the same, 16 tokens 1.47 and 1.41.)
inline constexpr int kTwiceFewTokens = 12;

struct Group {
    std::int64_t first;  // token of the pass
    int count;
};

// Visit v of many tokens has the lane of v's bits in reverse. Then the xor tree is that of a binary counter: v's sum
// meets as many waiting ones as v ends in ones, the latest first.
constexpr int visited_lane(int visit) {
    int lane = 0;
    for (int bit = 1; bit < kLanes; bit *= 2) lane = 2 * lane + ((visit & bit) != 0);
    return lane;
}

// What the rows of weights meet, of all tokens of a pass, group by group: where there are few tokens in the order of
// the chunks (but few_tokens.hpp has an order of its own), else lane by lane in the order of the visits. The tokens of
// a group lie side by side.
class Activations {
  public:
    Activations(float* data, std::int64_t chunks, std::int64_t tokens)
        : data_(data), chunks_(chunks), stride_(tokens <= kFewTokens ? kLanes : 1) {
        std::int64_t sum = 0;
        for (int visit = 0; visit < kLanes; ++visit) {
            const int lane = visited_lane(visit);
            first_[lane] = tokens <= kFewTokens ? lane : sum;
            sum += steps(lane);
        }
    }

    STRATA_HOST_DEVICE float* data() const { return data_; }
    // Of a token.
    STRATA_HOST_DEVICE std::int64_t chunks() const { return chunks_; }
    // Chunks that are a lane's own.
    STRATA_HOST_DEVICE std::int64_t steps(std::int64_t lane) const { return (chunks_ - lane + kLanes - 1) / kLanes; }
    // Where a chunk stands among those of its token.
    STRATA_HOST_DEVICE std::int64_t place(std::int64_t chunk) const {
        return first_[chunk % kLanes] + chunk / kLanes * stride_;
    }
    // `chunk` of the group's first token; the others' follow.
    STRATA_HOST_DEVICE float* at(const Group& group, std::int64_t chunk) const {
        return data_ + (group.first * chunks_ + place(chunk) * group.count) * kChunk;
    }

  private:
    float* data_;
    std::int64_t chunks_, stride_;
    std::int64_t first_[kLanes];
};

// One pass: `args` moved to its first token, `args.tokens` of at most kPassTokens.
struct Pass {
    ReadArgs args;
    Activations xn;
    Activations lo;

    STRATA_HOST_DEVICE bool fold() const { return args.block_out != nullptr; }

    // As few groups as possible, of sizes that differ by one at most.
    STRATA_HOST_DEVICE std::int64_t groups() const { return (args.tokens + kGroupTokens - 1) / kGroupTokens; }
    STRATA_HOST_DEVICE Group group(std::int64_t index) const {
        const std::int64_t first = index * args.tokens / groups();
        return {first, static_cast<int>((index + 1) * args.tokens / groups() - first)};
    }

    // The streams after the fold, of what args.stream_type says: float, or uint16_t for bf16.
    template <class Element>
    STRATA_HOST_DEVICE const Element* streams() const {
        return static_cast<const Element*>(fold() ? args.residual_out : args.residual);
    }
};

using Step = void (*)(const Pass& pass, std::int64_t begin, std::int64_t end);

struct Steps {
    const char* name;
    Step norm;  // unit: a stream of a group; fold, rs and xn
    Step down;  // unit: kRowsPerUnit of the rows of w_down and, after them, of w_inject; lo and inject
    Step up;    // unit: kQ8Block columns; gates, mixed and q8_1
};

inline constexpr std::int64_t kRowsPerUnit = 4;

STRATA_HOST_DEVICE std::int64_t norm_units(const Pass& pass) { return pass.groups() * pass.args.geometry.streams; }
constexpr std::int64_t down_rows(const ReadArgs& args) {
    return args.geometry.rank + (args.w_inject != nullptr ? args.geometry.streams : 0);
}
constexpr std::int64_t down_units(const ReadArgs& args) { return (down_rows(args) + kRowsPerUnit - 1) / kRowsPerUnit; }
constexpr std::int64_t up_units(const ReadArgs& args) { return args.geometry.width / kQ8Block; }

extern const Steps kPortable;
#if defined(__x86_64__)
extern const Steps kAvx2;    // AVX2 and FMA
extern const Steps kAvx512;  // AVX-512 F, BW, DQ and VL
#endif

}  // namespace strata::cpu
