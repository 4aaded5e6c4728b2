// The self-test's cases, their inputs and the hash of an answer: the same on the host and on every device, so that no
// random numbers travel and the CPU's answers can be kept as hashes (selftest_hashes.inc).
#pragma once

#include <cstdint>
#include <iterator>

#include "common/arithmetic.hpp"
#include "common/backend.hpp"
#include "common/geometry.hpp"
#include "common/launch_plan.hpp"

namespace strata {

// ---------------------------------------------------------------------------------------------------------------
// Cases: T = 1..8 with a pending write, inject rows and q8_1 each off and on. Then streams of bf16: the T of the stream
// variant's instances, all of which look at them in clusters, with a pending write and q8_1 each off and on.

struct SelftestCase {
    int tokens;
    StreamType stream_type;
    bool fold;
    bool inject;
    bool q8_1;
};

inline constexpr int kSelftestFloat32Cases = kMaxTokens * 8;
inline constexpr int kSelftestCases = kSelftestFloat32Cases + 4 * static_cast<int>(std::size(kStreamInstances));

constexpr SelftestCase selftest_case(int index) {
    if (index < kSelftestFloat32Cases) {
        return {1 + index / 8, StreamType::Float32, (index & 4) != 0, (index & 2) != 0, (index & 1) != 0};
    }
    const int bf16 = index - kSelftestFloat32Cases;
    return {kStreamInstances[bf16 / 4], StreamType::BFloat16, (bf16 & 2) != 0, true, (bf16 & 1) != 0};
}

// The outputs in the order in which hashes are kept.
inline constexpr int kSelftestOutputs = 6;
inline constexpr const char* kSelftestOutputNames[kSelftestOutputs] = {"mixed", "inject", "residual_out",
                                                                       "lo",    "rs",     "q8_1"};

// Bytes of output `output` of a case; 0: not asked for.
constexpr std::int64_t selftest_output_bytes(const SelftestCase& c, int output) {
    const Geometry& g = kModelGeometry;
    const std::int64_t value = sizeof(float);
    const std::int64_t bytes[kSelftestOutputs] = {
        g.width * value,
        c.inject ? g.streams * value : 0,
        c.fold ? g.depth() * element_bytes(c.stream_type) : 0,
        g.rank * value,
        g.streams * value,
        c.q8_1 ? g.width / kQ8Block * kQ8Bytes : 0,
    };
    return c.tokens * bytes[output];
}

// ---------------------------------------------------------------------------------------------------------------
// Inputs. Element i of an input is a function of the input's kind and i alone: any thread can make any element.

// InjectPrevTies is inject_prev for bf16 streams: gains of exactly 1 for two streams, whose R' then often lies half-way
// between two bf16.
enum class SelftestInput : std::uint32_t { Residual, BlockOut, InjectPrev, WNorm, WDown, WUp, WInject, InjectPrevTies };

inline constexpr float kSelftestEps = 1e-6f;

// 32 well mixed bits (two rounds of multiply and shift over a counter; the constants are odd numbers of our choice).
STRATA_HOST_DEVICE std::uint32_t selftest_bits(SelftestInput input, std::uint64_t index) {
    std::uint64_t x =
        (index + 1) * 0x9d3c5a8f1b2e6d47ull + (static_cast<std::uint64_t>(input) + 1) * 0xc2b7e1518d94f3a5ull;
    x ^= x >> 31;
    x *= 0xd6a1f3957be20c8bull;
    x ^= x >> 29;
    x *= 0xa3f74d9162c8be15ull;
    return static_cast<std::uint32_t>(x >> 32);
}

// Uniform in [-1, 1), exact in fp32.
STRATA_HOST_DEVICE float selftest_uniform(std::uint32_t bits) {
    return static_cast<float>(static_cast<std::int32_t>(bits) >> 8) * 0x1p-23f;
}

// The last token of the T = 8 cases has one NaN, with a payload, in stream 1, and an infinity in stream 2.
inline constexpr std::uint64_t kSelftestNan =
    static_cast<std::uint64_t>((kMaxTokens - 1) * kModelGeometry.depth() + kModelGeometry.width + 1234);
inline constexpr std::uint64_t kSelftestInfinity = kSelftestNan + static_cast<std::uint64_t>(kModelGeometry.width);

// Of a checkpoint's magnitudes. Two residuals in 128 are values that hide badly: a zero of either sign, a subnormal, a
// large one.
STRATA_HOST_DEVICE float selftest_value(SelftestInput input, std::uint64_t index) {
    const std::uint32_t bits = selftest_bits(input, index);
    const float u = selftest_uniform(bits);
    switch (input) {
        case SelftestInput::Residual:
            if (index == kSelftestNan) return bits_float(0xffa12345u);
            if (index == kSelftestInfinity) return bits_float(kInfinityBits);
            switch (bits & 255u) {
                case 0:
                    return 0.0f;
                case 1:
                    return -0.0f;
                case 2:
                    return bits_float(bits >> 10);  // subnormal
                case 3:
                    return u * 64.0f;
                default:
                    return u * 2.0f;
            }
        case SelftestInput::BlockOut:
            return u;
        case SelftestInput::InjectPrev:
            return u * 6.0f;
        case SelftestInput::InjectPrevTies:
            return index % 2 == 0 ? 0.0f : u * 6.0f;
        case SelftestInput::WNorm:
            return 1.0f + u * 0.25f;
        case SelftestInput::WDown:
            return u * 0.04f;
        case SelftestInput::WUp:
            return u * 0.25f;
        default:
            return u * 0.04f;
    }
}

// A 64-bit hash over words: what is kept of the CPU's answer.
inline constexpr std::uint64_t kSelftestHashStart = 0x8f2d6c41b7e953a1ull;
constexpr std::uint64_t selftest_hash(std::uint64_t hash, std::uint32_t word) {
    hash = (hash ^ word) * 0xe7c5a9d3f18b6247ull;
    return hash ^ (hash >> 32);
}

// bf16 inputs are the upper half of the value's bits.
STRATA_HOST_DEVICE std::uint16_t selftest_bf16(SelftestInput input, std::uint64_t index) {
    return static_cast<std::uint16_t>(float_bits(selftest_value(input, index)) >> 16);
}

// Where the inputs lie, each of kMaxTokens tokens.
struct SelftestInputs {
    float* residual;
    float* block_out;
    std::uint16_t* residual_bf16;
    std::uint16_t* block_out_bf16;
    float* inject_prev;
    float* inject_prev_ties;
    float* w_norm;
    std::uint16_t* w_down;
    std::uint16_t* w_up;
    std::uint16_t* w_inject;
};

// The read of a case. `outputs` in their order, null where not asked for.
inline ReadArgs selftest_read_args(const SelftestCase& c, const SelftestInputs& in,
                                   void* const (&outputs)[kSelftestOutputs], void* scratch) {
    const bool bf16 = c.stream_type == StreamType::BFloat16;
    ReadArgs args{};
    args.geometry = kModelGeometry;
    args.tokens = c.tokens;
    args.eps = kSelftestEps;
    args.stream_type = c.stream_type;
    args.residual = bf16 ? static_cast<const void*>(in.residual_bf16) : in.residual;
    args.w_norm = in.w_norm;
    args.w_down = in.w_down;
    args.w_up = in.w_up;
    args.w_inject = c.inject ? in.w_inject : nullptr;
    args.block_out = !c.fold ? nullptr : bf16 ? static_cast<const void*>(in.block_out_bf16) : in.block_out;
    args.inject_prev = !c.fold ? nullptr : bf16 ? in.inject_prev_ties : in.inject_prev;
    args.mixed = static_cast<float*>(outputs[0]);
    args.inject = static_cast<float*>(outputs[1]);
    args.residual_out = outputs[2];
    args.lo = static_cast<float*>(outputs[3]);
    args.rs = static_cast<float*>(outputs[4]);
    args.q8_1 = static_cast<std::uint8_t*>(outputs[5]);
    args.scratch = scratch;
    return args;
}

}  // namespace strata
