// q8_1 on the card: a group of lanes makes one block of one token.
#pragma once

#include "gpu/group_args.hpp"
#include "gpu/lanes.cuh"

namespace strata::gpu {

// Quantises the group's values, one a lane, into block `column` (of `columns` a token) of `token`.
__device__ __forceinline__ void store_q8_block(const GroupArgs& args, int token, int column, int columns, float value) {
    const std::uint32_t amax_bits = group_max(magnitude_bits(value));
    const float sum = tree_sum(value);
    std::uint8_t* block = args.q8_1 + (std::int64_t{token} * columns + column) * kQ8Bytes;
    auto* halves = reinterpret_cast<std::uint16_t*>(block);
    if (logical_lane() == 0) {
        halves[0] = q8_scale_half(amax_bits);
        halves[1] = q8_sum_half(sum, amax_bits);
    }
    constexpr int kHalfBytes = 2 * static_cast<int>(sizeof(std::uint16_t));
    block[kHalfBytes + logical_lane()] = static_cast<std::uint8_t>(q8_value(value, amax_bits));
}

}  // namespace strata::gpu
