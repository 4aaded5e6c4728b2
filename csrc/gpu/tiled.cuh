// The tiled kernels: reads of many tokens, whose weights are loaded once for a tile of tokens instead of once for every
// kMaxTokens. The work is that of a matrix product and is cut like one: a block has a tile of rows and a tile of
// tokens, a thread several rows times several tokens, and the next operands come to shared memory meanwhile.
//
//     norm      gr_norm_kernel<1, ..., ByTiledLanes>: the activations in the order in which down takes them
//     down      rows of four lanes: their chains and the tree's first stage
//     finish    the tree's other stages, silu, inject
//     up        columns in all streams: gates and mix
//     quantise  q8_1, where it was asked for
//
// Activations are in tiles of kTiledTokens tokens: in a tile chunk after chunk in the order in which they are taken, of
// a chunk all tokens, of a token both halves. So what a block takes at once is one piece of memory. The last tile's
// missing tokens are zeros.
#pragma once

#include "common/launch_plan.hpp"
#include "gpu/norm.cuh"

namespace strata::gpu {

// Where a half of a chunk is among those of its tile's tokens. Four tokens of eight have their halves exchanged, so
// that the first halves of eight neighbours do not meet in a bank, nor the second ones.
__device__ __forceinline__ int tiled_half(int token, int half) { return token * 2 + (half ^ (token / 4 & 1)); }

// The float4 of a half of chunk `chunk` of `chunks`.
__device__ __forceinline__ std::int64_t tiled_place(int token, int chunk, int chunks, int half) {
    const std::int64_t tile = token / kTiledTokens;
    return (tile * chunks + chunk) * kTiledTokens * 2 + tiled_half(token % kTiledTokens, half);
}

// What one step multiplies: for each group of the block's threads kChunks chunks of kRows rows and of the tile's
// tokens.
template <int kGroups, int kChunks, int kRows>
struct TiledStep {
    // Neighbouring threads copy what a row has for all groups: the padding keeps these out of one bank.
    Chunk weights[kChunks][kGroups][kRows + 8 / kGroups];
    Float4 activations[kChunks][kGroups][kTiledTokens * 2];
};

// Asks for a step of kThreads threads. `weights(slot, chunk)` is where the thread's row `slot` has a chunk:
// row copied_row<...>(slot), lane group threadIdx.x % kGroups.
template <int kThreads, int kGroups>
__device__ __forceinline__ int copied_row(int slot) {
    return static_cast<int>(threadIdx.x) / kGroups + slot * (kThreads / kGroups);
}
template <int kThreads, int kGroups, int kRows>
inline constexpr int kCopiedRows = (kRows * kGroups + kThreads - 1) / kThreads;

template <int kThreads, int kGroups, int kChunks, int kRows, class Weights>
__device__ __forceinline__ void ask_for_step(TiledStep<kGroups, kChunks, kRows>& target, Weights weights,
                                             const Float4* activations) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int slot = 0; slot < kCopiedRows<kThreads, kGroups, kRows>; ++slot) {
        const int row = copied_row<kThreads, kGroups>(slot);
        if (row >= kRows) continue;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            copy_async(reinterpret_cast<Float4*>(&target.weights[c][thread % kGroups][row]),
                       reinterpret_cast<const Float4*>(weights(slot, c)));
        }
    }
    constexpr int kFloat4s = sizeof(target.activations) / sizeof(Float4);
    static_assert(kFloat4s % kThreads == 0);
    Float4* const place = &target.activations[0][0][0];
#pragma unroll
    for (int i = 0; i < kFloat4s; i += kThreads) copy_async(place + i + thread, activations + i + thread);
    copy_async_commit();
}

// A thread's tokens of a chunk: token `first` of the tile and others kStep apart.
template <int kStep>
struct TiledTokens {
    static_assert(kStep % 4 == 0);
    const Float4* half[2];

    __device__ __forceinline__ TiledTokens(const Float4* activations, int first)
        : half{activations + tiled_half(first, 0), activations + tiled_half(first, 1)} {}
    __device__ __forceinline__ Float4 load(int k, int which) const {
        return load_float4(half[which ^ (k * kStep / 4 & 1)] + k * kStep * 2);
    }
};

// Adds the dots of one chunk to the sums of kRows rows, kRowStep apart from `weights` on, and kTokens tokens. The fewer
// of the two are held in registers.
template <int kRowStep, int kTokenStep, int kRows, int kTokens>
__device__ __forceinline__ void add_chunk_dots(float (&sums)[kRows][kTokens], const Chunk* weights,
                                               const TiledTokens<kTokenStep>& tokens) {
    if constexpr (kRows < kTokens) {
        Float4 low[kRows], high[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Chunk chunk = weights[r * kRowStep];
            low[r] = widen_first(chunk);
            high[r] = widen_second(chunk);
        }
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            const Float4 first = tokens.load(k, 0);
            const Float4 second = tokens.load(k, 1);
#pragma unroll
            for (int r = 0; r < kRows; ++r) sums[r][k] = sums[r][k] + widened_dot(low[r], high[r], first, second);
        }
    } else {
        Float4 first[kTokens], second[kTokens];
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            first[k] = tokens.load(k, 0);
            second[k] = tokens.load(k, 1);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Chunk chunk = weights[r * kRowStep];
            const Float4 low = widen_first(chunk);
            const Float4 high = widen_second(chunk);
#pragma unroll
            for (int k = 0; k < kTokens; ++k) sums[r][k] = sums[r][k] + widened_dot(low, high, first[k], second[k]);
        }
    }
}

}  // namespace strata::gpu
