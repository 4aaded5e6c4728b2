// Logical lanes: groups of kLanes threads with the contract's xor tree, whatever the card's wave width. A 64-lane wave
// carries two groups. No other file knows how wide a wave is.
#pragma once

#include "gpu/vendor.hpp"

namespace strata::gpu {

__device__ __forceinline__ int logical_lane() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ __forceinline__ int logical_group() { return same_in_group(static_cast<int>(threadIdx.x) / kLanes); }

// The sum of `value` over `kWidth` neighbouring lanes by the xor tree kWidth / 2, ..., 2, 1: the same bits in each of
// them. All lanes of the group of kLanes must call.
template <int kWidth = kLanes>
__device__ __forceinline__ float tree_sum(float value) {
#pragma unroll
    for (int stage = kWidth / 2; stage > 0; stage /= 2) value = value + shuffle_xor(value, stage);
    return value;
}

// The same for several tokens at once: at each stage a lane keeps half of the tokens and hands over the others, while
// there are several. Lane j ends with the sums of tokens j * kTokens / kWidth and on, max(1, kTokens / kWidth) of them,
// in front. Neighbours are kStride lanes apart, and `lane` counts them.
template <int kWidth, int kStride = 1, int kTokens>
__device__ __forceinline__ void tree_sums(float (&sums)[kTokens], int lane) {
    int left = kTokens;
#pragma unroll
    for (int stage = kWidth / 2; stage > 0; stage /= 2) {
        const bool upper = (lane & stage) != 0;
        const bool shared_out = left > 1;
        if (shared_out) left /= 2;
#pragma unroll
        for (int k = 0; k < left; ++k) {
            const float keep = shared_out && upper ? sums[k + left] : sums[k];
            const float give = shared_out && !upper ? sums[k + left] : sums[k];
            sums[k] = keep + shuffle_xor(give, stage * kStride);
        }
    }
}

__device__ __forceinline__ std::uint32_t group_max(std::uint32_t value) {
#pragma unroll
    for (int stage = kLanes / 2; stage > 0; stage /= 2) {
        const std::uint32_t other = shuffle_xor(value, stage);
        value = other > value ? other : value;
    }
    return value;
}

}  // namespace strata::gpu
