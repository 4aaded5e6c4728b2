// The sizes of a read and every number that follows from them.
//
// A read takes T tokens of `streams` residual streams of `width` floats, squeezes their D = width * streams values
// through `rank` gate rows, and mixes the streams into one of `width` floats.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"

namespace strata {

struct Geometry {
    std::int64_t width;    // N, floats in a residual stream
    std::int64_t streams;  // HC, residual streams
    std::int64_t rank;     // LR, rows of the down projection

    STRATA_HOST_DEVICE constexpr std::int64_t depth() const { return width * streams; }  // D, length of a down row
    constexpr bool operator==(const Geometry& other) const {
        return width == other.width && streams == other.streams && rank == other.rank;
    }
    constexpr bool operator!=(const Geometry& other) const { return !(*this == other); }
};

// Qwen3.8-Flash-Next, which the tuned kernels are compiled for.
inline constexpr Geometry kModelGeometry{2560, 4, 320};

// What every backend accepts.
inline constexpr std::int64_t kWidthMultiple = 32;
inline constexpr std::int64_t kMaxStreams = 8;
inline constexpr std::int64_t kRankMultiple = 8;

// What the residual streams and the block output that is written into them are made of.
enum class StreamType : int { Float32, BFloat16 };

constexpr const char* stream_name(StreamType type) { return type == StreamType::BFloat16 ? "bf16" : "fp32"; }
constexpr std::int64_t element_bytes(StreamType type) { return type == StreamType::BFloat16 ? 2 : 4; }

constexpr bool geometry_supported(const Geometry& g) {
    return g.width > 0 && g.width % kWidthMultiple == 0 && g.streams >= 1 && g.streams <= kMaxStreams && g.rank > 0 &&
           g.rank % kRankMultiple == 0;
}

// The arithmetic contract's groups. A reduction runs over kLanes logical lanes on every card, whatever its hardware
// wave width; a row of weights is dealt to them in chunks of kChunk.
inline constexpr int kLanes = 32;
inline constexpr int kChunk = 8;
inline constexpr int kNormThreads = 256;                   // logical threads that share a stream's float4s
inline constexpr int kNormGroups = kNormThreads / kLanes;  // their partial sums, added in order
inline constexpr int kQ8Block = 32;                        // values in a q8_1 block
inline constexpr int kQ8Bytes = 2 + 2 + kQ8Block;          // half d, half s, int8 q[32]

// Tokens that one group of launches takes.
inline constexpr int kMaxTokens = 8;

// Bytes of alignment that weights, w_norm and output buffers must have.
inline constexpr int kAlignment = 16;

static_assert(geometry_supported(kModelGeometry));
static_assert(kLanes == kQ8Block, "one group of lanes quantises one q8_1 block");

}  // namespace strata
