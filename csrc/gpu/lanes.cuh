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

__device__ __forceinline__ std::uint32_t group_max(std::uint32_t value) {
#pragma unroll
    for (int stage = kLanes / 2; stage > 0; stage /= 2) {
        const std::uint32_t other = shuffle_xor(value, stage);
        value = other > value ? other : value;
    }
    return value;
}

}  // namespace strata::gpu
