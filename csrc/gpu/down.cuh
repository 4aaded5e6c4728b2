// What the down kernels share: which row a group of lanes has, the dot of one activation tile, and what becomes of a
// row's sums. A group of kLanes threads has one row of D weights and up to kMaxTokens sums for it.
#pragma once

#include "common/launch_plan.hpp"
#include "gpu/faults.hpp"
#include "gpu/group_args.hpp"
#include "gpu/lanes.cuh"
#include "gpu/planes.cuh"

namespace strata::gpu {

// The row of one group: blocks 0 to kDownBlocks - 1 have kDownRows rows of w_down each, the block after them the
// inject rows, of which there are fewer than groups.
struct DownRow {
    const Chunk* weights;
    int index;
    bool inject;
    bool active;  // a group without a row copies activations, meets the barriers, and may dot the first inject row
};

__device__ __forceinline__ DownRow down_row(const GroupArgs& args) {
    constexpr int kRowChunks = static_cast<int>(kModelGeometry.depth()) / kChunk;
    const int group = logical_group();
    const bool inject = blockIdx.x == kDownBlocks;
    const bool active = !inject || group < static_cast<int>(kModelGeometry.streams);
    const int index = inject ? group : static_cast<int>(blockIdx.x) * kDownRows + group;
    const Chunk* rows = inject ? args.w_inject : args.w_down;
    return {rows + (active ? index : 0) * kRowChunks, index, inject, active};
}

// The first chunk of tile `tile` that this lane takes of its row; its others follow kLanes apart.
__device__ __forceinline__ const Chunk* row_tile(const DownRow& row, int tile) {
    return row.weights + tile * kTileChunks + logical_lane();
}

// kNow: asked for before whatever waits behind it in the source.
template <bool kNow = false>
__device__ __forceinline__ void load_row_tile(Chunk (&weights)[kTileRounds], const DownRow& row, int tile) {
#pragma unroll
    for (int round = 0; round < kTileRounds; ++round) {
        const Chunk* chunk = row_tile(row, tile) + round * kLanes;
        weights[round] = kNow ? load_weights_now(chunk) : load_weights(chunk);
    }
}

// How staged and P4 begin: the next launch may start, the first tile's weights are asked for, and then whatever ran
// before is waited for.
__device__ __forceinline__ void begin_down(Chunk (&weights)[kTileRounds], const DownRow& row) {
    let_next_launch_begin();
    load_row_tile<true>(weights, row, 0);
    wait_for_launch_before();
}

__device__ __forceinline__ void settle_row_tile(Chunk (&weights)[kTileRounds]) {
#pragma unroll
    for (int round = 0; round < kTileRounds; ++round) {
#pragma unroll
        for (std::uint32_t& word : weights[round].word) settle(word);
    }
}

// Where float4 `f` of a token's tile lies in shared memory: as in global memory, or in planes.
struct RowLayout {
    static constexpr __device__ int place(int f) { return f; }
};
using PlaneLayout = Planes<kTileFloat4s>;

// The tiles of all tokens are dealt to the block's threads in slots: slot s of thread t is float4 t + s * kDownThreads,
// token after token. The last token's end is the end of a group, so a slot is filled or empty for a whole group.
template <int kTokens>
inline constexpr int kSlots = (kTokens * kTileFloat4s + kDownThreads - 1) / kDownThreads;
static_assert(kTileFloat4s % kLanes == 0 && kDownThreads % kLanes == 0);

struct Slot {
    int token;
    int f;  // float4 of the token's tile
};

__device__ __forceinline__ Slot tile_slot(int s) {
    const int i = static_cast<int>(threadIdx.x) + s * kDownThreads;
    return {i / kTileFloat4s, i % kTileFloat4s};
}

__device__ __forceinline__ bool slot_filled(int s, int tokens) {
    const int group = logical_group();
    if (group >= kDownRows) __builtin_unreachable();  // the launch bounds, which decide most slots at compile time
    return group * kLanes + s * kDownThreads < tokens * kTileFloat4s;
}

__device__ __forceinline__ const Float4* slot_source(const GroupArgs& args, Slot slot, int tile) {
    return reinterpret_cast<const Float4*>(args.normalised) + (slot.token * kTiles + tile) * kTileFloat4s + slot.f;
}

// Adds the tile's dots to the lane's sums, in ascending order of its chunks. `kTokens` sums are kept; where the
// instance is not exact, the first `tokens` of them. `before_round(r)` runs before round r: P4 asks for its second
// half tile there.
template <int kTokens, bool kExact, class Layout, class BeforeRound>
__device__ __forceinline__ void add_tile(float (&sums)[kTokens], const Chunk (&weights)[kTileRounds],
                                         const Float4* tile, int tokens, BeforeRound before_round) {
#pragma unroll
    for (int round = 0; round < kTileRounds; ++round) {
        before_round(round);
        const int chunk = round * kLanes + logical_lane();
        const Float4* first = tile + Layout::place(2 * chunk);
        const Float4* second = tile + Layout::place(2 * chunk + 1);
        const Float4 low = widen_first(weights[round]);
        const Float4 high = widen_second(weights[round]);
        const auto dot = [&](int k) {
            return widened_dot(low, high, first[k * kTileFloat4s], second[k * kTileFloat4s]);
        };
        const int there = kExact ? kTokens : tokens;
#pragma unroll
        for (int k = 0; k < kTokens; k += 2) {  // two at once, so that neither waits for its own last operation
            if (k + 1 < there) {
                const float one = dot(k);
                const float other = dot(k + 1);
                sums[k] = sums[k] + one;
                sums[k + 1] = sums[k + 1] + other;
            } else if (k < there) {
                sums[k] = sums[k] + dot(k);
            }
        }
    }
}

// The row's tree for each token; lane k then finishes and stores token k. `streams` and `rank` are the geometry's.
template <int kTokens>
__device__ __forceinline__ void store_row(const GroupArgs& args, const float (&sums)[kTokens], int row, bool inject,
                                          int streams, int rank) {
    float mine = 0.0f;
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
        const float sum = tree_sum(sums[k]);
        if (logical_lane() == k) mine = sum;
    }
    if (planted(Fault::kWrongArithmetic)) mine = bits_float(float_bits(mine) ^ 1u);
    const int token = logical_lane();
    if (token >= args.tokens || token >= kTokens) return;
    if (inject) {
        args.inject[token * streams + row] = canonical(mine);
    } else {
        args.lo[static_cast<std::int64_t>(token) * rank + row] = canonical(down_activation(mine, streams));
    }
}

template <int kTokens>
__device__ __forceinline__ void store_row(const GroupArgs& args, const float (&sums)[kTokens], const DownRow& row) {
    if (!row.active) return;
    store_row(args, sums, row.index, row.inject, static_cast<int>(kModelGeometry.streams),
              static_cast<int>(kModelGeometry.rank));
}

}  // namespace strata::gpu
