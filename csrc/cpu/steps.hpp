// What a path implements: the three steps of a read that threads share, each over a range of units that are
// independent of each other. A path computes the same bits for a unit wherever the range is cut.
#pragma once

#include <cstdint>

#include "common/backend.hpp"

namespace strata::cpu {

// Tokens that one pass over the weights serves.
inline constexpr int kPassTokens = 8;

// One pass: `args` moved to its first token, `args.tokens` of at most kPassTokens.
//
// The activations of all tokens lie chunk by chunk, the order in which rows of weights meet them: with T tokens,
// element e of chunk k of token t is at (k * T + t) * kChunk + e.
struct Pass {
    ReadArgs args;
    float* xn;  // depth x tokens
    float* lo;  // rank x tokens

    bool fold() const { return args.block_out != nullptr; }
    // Where chunk `chunk` of a token is in `activations`.
    float* chunk_at(float* activations, std::int64_t chunk, std::int64_t token) const {
        return activations + (chunk * args.tokens + token) * kChunk;
    }

    // The streams after the fold, of what args.stream_type says: float, or uint16_t for bf16.
    template <class Element>
    const Element* streams() const {
        return static_cast<const Element*>(fold() ? args.residual_out : args.residual);
    }
};

using Step = void (*)(const Pass& pass, std::int64_t begin, std::int64_t end);

struct Steps {
    const char* name;
    Step norm;  // unit: a stream of a token; fold, rs and xn
    Step down;  // unit: kRowsPerUnit of the rows of w_down and, after them, of w_inject; lo and inject
    Step up;    // unit: kQ8Block columns; gates, mixed and q8_1
};

inline constexpr std::int64_t kRowsPerUnit = 4;
static_assert(kRankMultiple % kRowsPerUnit == 0, "no unit has rows of both matrices");

constexpr std::int64_t norm_units(const ReadArgs& args) { return args.tokens * args.geometry.streams; }
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
