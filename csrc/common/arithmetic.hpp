// The arithmetic contract: every operation that decides a bit of a result, for the CPU and every GPU.
//
// All values are fp32 and every multiply-add that is one is written fmaf. The including file must be compiled without
// contraction, reassociation or fast maths (-ffp-contract=off, -fmad=false), with correctly rounded division and
// square root, and with subnormals kept. Sums start at +0 unless a comment says otherwise.
//
// Who computes a value is free; its operations and their order are not.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/geometry.hpp"
#include "common/host_device.hpp"

namespace strata {

// A change of any operation or order below changes results: count this up with it.
inline constexpr int kArithmeticVersion = 1;

struct alignas(16) Float4 {
    float x, y, z, w;
};

// Eight bf16 weights: word i holds element 2i in its low half and element 2i + 1 in its high half.
struct alignas(16) Chunk {
    std::uint32_t word[4];
};
// Four neighbours of a bf16 stream, in the same order.
struct alignas(8) Bf16x4 {
    std::uint32_t word[2];
};
static_assert(sizeof(Chunk) == kChunk * sizeof(std::uint16_t));

STRATA_HOST_DEVICE std::uint32_t float_bits(float value) {
    std::uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

STRATA_HOST_DEVICE float bits_float(std::uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The same sixteen bytes.
STRATA_HOST_DEVICE Chunk as_chunk(Float4 v) {
    return {{float_bits(v.x), float_bits(v.y), float_bits(v.z), float_bits(v.w)}};
}

inline constexpr std::uint32_t kSignBit = 0x80000000u;
inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;
inline constexpr std::uint32_t kNanBits = 0x7fc00000u;
inline constexpr std::uint16_t kBf16Nan = 0x7fc0u;
inline constexpr std::uint16_t kHalfNan = 0x7e00u;
inline constexpr std::uint16_t kHalfMax = 0x7bffu;  // 65504

// Vendors make different NaNs, so each one that is stored is this one. Intermediate NaNs may have any bits.
STRATA_HOST_DEVICE float canonical(float value) { return value != value ? bits_float(kNanBits) : value; }

// bf16 is the upper half of an fp32, so widening is exact.
STRATA_HOST_DEVICE float widen_low(std::uint32_t word) { return bits_float(word << 16); }
STRATA_HOST_DEVICE float widen_high(std::uint32_t word) { return bits_float(word & 0xffff0000u); }

STRATA_HOST_DEVICE float widen(std::uint16_t bf16) { return widen_low(bf16); }
STRATA_HOST_DEVICE Float4 widen(Bf16x4 v) {
    return {widen_low(v.word[0]), widen_high(v.word[0]), widen_low(v.word[1]), widen_high(v.word[1])};
}

// Nearest even with subnormals kept; what rounds beyond the largest is infinite, as the carry makes it; a NaN is
// kBf16Nan.
STRATA_HOST_DEVICE std::uint16_t bf16_bits(float value) {
    const std::uint32_t bits = float_bits(value);
    const std::uint32_t even = (bits >> 16) & 1u;
    const auto rounded = static_cast<std::uint16_t>((bits + 0x7fffu + even) >> 16);
    return value != value ? kBf16Nan : rounded;
}

STRATA_HOST_DEVICE Bf16x4 round_bf16(Float4 v) {
    const auto word = [](float low, float high) {
        return static_cast<std::uint32_t>(bf16_bits(high)) << 16 | bf16_bits(low);
    };
    return {{word(v.x, v.y), word(v.z, v.w)}};
}

// ---------------------------------------------------------------------------------------------------------------
// exp, sigmoid, silu

STRATA_HOST_DEVICE float exp_f32(float x);

STRATA_HOST_DEVICE float sigmoid_denominator(float x) { return 1.0f + exp_f32(-x); }
STRATA_HOST_DEVICE float sigmoid(float x) { return 1.0f / sigmoid_denominator(x); }

// NaN at -inf (-inf / inf), -0 below about -88.8.
STRATA_HOST_DEVICE float silu(float x) { return x / sigmoid_denominator(x); }

// ---------------------------------------------------------------------------------------------------------------
// Step 1, the fold: R'[c, d] = fmaf(block_out[d], fold_gain(inject_prev[c]), R[c, d])
//
// Streams of fp32 store canonical(R'). Streams of bf16 are widened, and R' is rounded by bf16_bits() once; that is what
// is stored, and what every later step reads. Without a pending write R' is R.

STRATA_HOST_DEVICE float fold_gain(float inject_prev, std::int64_t streams) {
    return 2.0f * sigmoid(inject_prev / static_cast<float>(streams));
}

STRATA_HOST_DEVICE Float4 fold(Float4 block_out, float gain, Float4 residual) {
    return {fmaf(block_out.x, gain, residual.x), fmaf(block_out.y, gain, residual.y),
            fmaf(block_out.z, gain, residual.z), fmaf(block_out.w, gain, residual.w)};
}

STRATA_HOST_DEVICE Float4 canonical(Float4 v) {
    return {canonical(v.x), canonical(v.y), canonical(v.z), canonical(v.w)};
}

// ---------------------------------------------------------------------------------------------------------------
// Step 2, the norm of one stream. Its width / 4 float4s are dealt to kNormThreads logical threads (t takes t,
// t + kNormThreads, ...); each adds square() of its own in that order; the kLanes sums of a group meet in the xor tree;
// the groups' sums are added in order, the first to +0.

STRATA_HOST_DEVICE float square(Float4 v) { return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x))); }

// `square_sum` that overflowed to +inf gives 0, and the stream then reads as 0.
STRATA_HOST_DEVICE float reciprocal_rms(float square_sum, std::int64_t width, float eps) {
    return 1.0f / sqrtf(square_sum / static_cast<float>(width) + eps);
}

STRATA_HOST_DEVICE Float4 normalise(Float4 residual, Float4 gain, float rs) {
    return {(residual.x * gain.x) * rs, (residual.y * gain.y) * rs, (residual.z * gain.z) * rs,
            (residual.w * gain.w) * rs};
}

// ---------------------------------------------------------------------------------------------------------------
// Steps 3 and 4, a row of weights: lane l of kLanes takes chunks l, l + kLanes, ... in ascending order and adds
// chunk_dot() of each to its sum, which starts at +0; the kLanes sums meet in the xor tree. The rule is the same for a
// down row (D weights) and an up row (rank weights); a lane without a chunk brings +0. An up row's sums may as well
// begin with their first dot: what could differ is +0 from -0, and the sigmoid of both is the same.

// Elements 0 to 3 of a chunk, and 4 to 7.
STRATA_HOST_DEVICE Float4 widen_first(const Chunk& w) {
    return {widen_low(w.word[0]), widen_high(w.word[0]), widen_low(w.word[1]), widen_high(w.word[1])};
}
STRATA_HOST_DEVICE Float4 widen_second(const Chunk& w) {
    return {widen_low(w.word[2]), widen_high(w.word[2]), widen_low(w.word[3]), widen_high(w.word[3])};
}

// `first` and `second` are the activations of elements 0 to 3 and 4 to 7; `low` and `high` their weights.
STRATA_HOST_DEVICE float widened_dot(Float4 low, Float4 high, Float4 first, Float4 second) {
    float dot = low.x * first.x;
    dot = fmaf(low.y, first.y, dot);
    dot = fmaf(low.z, first.z, dot);
    dot = fmaf(low.w, first.w, dot);
    dot = fmaf(high.x, second.x, dot);
    dot = fmaf(high.y, second.y, dot);
    dot = fmaf(high.z, second.z, dot);
    dot = fmaf(high.w, second.w, dot);
    return dot;
}

STRATA_HOST_DEVICE float chunk_dot(const Chunk& weights, Float4 first, Float4 second) {
    return widened_dot(widen_first(weights), widen_second(weights), first, second);
}

// The xor tree over a whole group on one thread: at each stage 16, 8, 4, 2, 1 lane l adds lane l ^ stage. Addition
// commutes, so every lane ends with the same bits and half of them need not be computed. `lanes` is overwritten.
STRATA_HOST_DEVICE float tree_sum(float (&lanes)[kLanes]) {
    for (int stage = kLanes / 2; stage > 0; stage /= 2) {
        for (int lane = 0; lane < stage; ++lane) lanes[lane] = lanes[lane] + lanes[lane + stage];
    }
    return lanes[0];
}

STRATA_HOST_DEVICE float down_sum_mean(float sum, std::int64_t streams) { return sum / static_cast<float>(streams); }
STRATA_HOST_DEVICE float down_activation(float sum, std::int64_t streams) { return silu(down_sum_mean(sum, streams)); }

// ---------------------------------------------------------------------------------------------------------------
// Step 5, the mix: mix_first of stream 0, mix_next of streams 1, 2, ... in order, then mix_mean.

STRATA_HOST_DEVICE float mix_first(float normalised, float gate) { return normalised * gate; }
STRATA_HOST_DEVICE float mix_next(float normalised, float gate, float sum) { return fmaf(normalised, gate, sum); }
STRATA_HOST_DEVICE float mix_mean(float sum, std::int64_t streams) { return sum / static_cast<float>(streams); }

// ---------------------------------------------------------------------------------------------------------------
// Step 6, q8_1: blocks of kQ8Block values of `mixed` as {half d, half s, int8 q[32]}, ggml's layout.
//
// `amax_bits` is the integer maximum of the bits of |x| over the block, so that a NaN outranks an infinity and that any
// number. s is the xor tree over the values themselves, which does not start at +0: thirty-two -0 give -0.
// A block with a NaN has d = s = NaN and q = 0. One with an infinity and no NaN has d = 65504, q = 0 and the clamped
// sum, which is NaN where it is inf - inf.

STRATA_HOST_DEVICE std::uint32_t magnitude_bits(float x) { return float_bits(x) & ~kSignBit; }

// Nearest even with subnormals kept; beyond half's range +-65504, never infinite; a NaN is kHalfNan.
STRATA_HOST_DEVICE std::uint16_t half_bits(float value) {
    const std::uint32_t magnitude = magnitude_bits(value);
    const std::uint32_t sign = (float_bits(value) & kSignBit) >> 16;
    constexpr std::uint32_t kLargest = 0x477fe000u;         // 65504
    constexpr std::uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    if (magnitude > kInfinityBits) return kHalfNan;
    if (magnitude >= kLargest) return static_cast<std::uint16_t>(sign | kHalfMax);
    if (magnitude >= kSmallestNormal) {
        const std::uint32_t even = (magnitude >> 13) & 1u;
        const std::uint32_t rebiased = magnitude - (112u << 23);
        return static_cast<std::uint16_t>(sign | ((rebiased + 0xfffu + even) >> 13));
    }
    // A subnormal half counts units of 2^-24. Anything below 2^-25 rounds to zero (fp32 subnormals among it).
    const std::uint32_t exponent = magnitude >> 23;
    if (exponent < 102u) return static_cast<std::uint16_t>(sign);
    const std::uint32_t shift = 126u - exponent;
    const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t units = significand >> shift;
    const std::uint32_t rest = significand & ((1u << shift) - 1u);
    const std::uint32_t halfway = 1u << (shift - 1u);
    const std::uint32_t up = (rest > halfway || (rest == halfway && (units & 1u))) ? 1u : 0u;
    return static_cast<std::uint16_t>(sign | (units + up));
}

// d before it is rounded to half.
STRATA_HOST_DEVICE float q8_scale(std::uint32_t amax_bits) { return bits_float(amax_bits) / 127.0f; }

STRATA_HOST_DEVICE std::uint16_t q8_scale_half(std::uint32_t amax_bits) {
    return amax_bits > kInfinityBits ? kHalfNan : half_bits(q8_scale(amax_bits));
}

STRATA_HOST_DEVICE std::uint16_t q8_sum_half(float sum, std::uint32_t amax_bits) {
    return amax_bits > kInfinityBits ? kHalfNan : half_bits(sum);
}

// The limit matters where d is so small (amax below 2.3e-41) that its own rounding lets x / d exceed 127.
STRATA_HOST_DEVICE std::int8_t q8_value(float x, std::uint32_t amax_bits) {
    const float scale = q8_scale(amax_bits);
    if (amax_bits >= kInfinityBits || scale == 0.0f) return 0;
    const float rounded = roundf(x / scale);
    const float limited = rounded > 127.0f ? 127.0f : rounded < -127.0f ? -127.0f : rounded;
    return static_cast<std::int8_t>(static_cast<int>(limited));
}

}  // namespace strata

#include "common/exp.hpp"
