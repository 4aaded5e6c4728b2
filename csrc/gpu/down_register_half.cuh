// The register-half down kernel ("P4"): staged's tiles, order and shared layout, but tile h + 2 travels through
// registers in two halves. Half A is asked for one iteration ahead, half B in the middle of the dots of tile h; both
// are scattered into the buffer of tile h once its readers are done.
#pragma once

#include "gpu/down_staged.cuh"

namespace strata::gpu {

// I + 1 float4s that are only ever indexed at compile time, so that they stay in registers: an array indexed by a
// variable would go to private memory.
template <int I>
struct HcChain {
    Float4 head;
    HcChain<I - 1> tail;
};
template <>
struct HcChain<0> {
    Float4 head;
};

// Slot SLOT of this thread is float4 `threadIdx.x + SLOT * kDownThreads` of the tile of all tokens. Fills `chain` from
// tile `h`, slots SLOT, SLOT + 1, ...; slots past the last token's stay as they are, and nothing reads them.
template <int SLOT, int I>
__device__ __forceinline__ void hc_load_all(HcChain<I>& chain, const GroupArgs& args, int tokens, int h) {
    const int i = static_cast<int>(threadIdx.x) + SLOT * kDownThreads;
    if (i < tokens * kTileFloat4s) {
        const auto* normalised = reinterpret_cast<const Float4*>(args.normalised);
        const int token = i / kTileFloat4s;
        chain.head = load_float4(normalised + (token * kTiles + h) * kTileFloat4s + i % kTileFloat4s);
    }
    if constexpr (I > 0) hc_load_all<SLOT + 1>(chain.tail, args, tokens, h);
}

// Writes the chain's slots to their places, the same that stage_htile gives them.
template <int SLOT, int I>
__device__ __forceinline__ void hc_scatter_all(const HcChain<I>& chain, Float4* buffer, int tokens) {
    const int i = static_cast<int>(threadIdx.x) + SLOT * kDownThreads;
    if (i < tokens * kTileFloat4s) {
        const int token = i / kTileFloat4s;
        store_float4(buffer + token * kTileFloat4s + PlaneLayout::place(i % kTileFloat4s), chain.head);
    }
    if constexpr (I > 0) hc_scatter_all<SLOT + 1>(chain.tail, buffer, tokens);
}

template <int MAX_T, bool EXACT_T>
__global__ void __launch_bounds__(kDownThreads, 1) gr_down_register_half_kernel(GroupArgs args) {
    constexpr int kSlots = (MAX_T * kTileFloat4s + kDownThreads - 1) / kDownThreads;
    constexpr int kHalfA = (kSlots + 1) / 2;
    constexpr int kHalfB = kSlots - kHalfA;
    constexpr int kHalfBRound = 2;  // the round of the dots before which half B is asked for
    static_assert(kHalfA > 0 && kHalfB > 0);

    const int tokens = EXACT_T ? MAX_T : args.tokens;
    Float4* const buffers = dynamic_shared();
    const int buffer_size = tokens * kTileFloat4s;
    const DownRow row = down_row(args);
    float sums[MAX_T] = {};
    Chunk weights[kTileRounds];
    Chunk next_weights[kTileRounds];
    HcChain<kHalfA - 1> half_a;
    HcChain<kHalfB - 1> half_b;

    if (row.active) load_row_tile(weights, row, 0);
    stage_htile(buffers, args, tokens, 0);
    stage_htile(buffers + buffer_size, args, tokens, 1);
    copy_async_commit();
    hc_load_all<0>(half_a, args, tokens, 2);
    copy_async_wait<0>();

#pragma unroll 1
    for (int h = 0; h < kTiles; ++h) {
        Float4* const tile = buffers + (h & 1) * buffer_size;
        if (row.active && h + 1 < kTiles) load_row_tile(next_weights, row, h + 1);
        barrier();
        const auto load_half_b = [&](int round) {
            if (round == kHalfBRound && h + 2 < kTiles) hc_load_all<kHalfA>(half_b, args, tokens, h + 2);
        };
        if (row.active) {
            add_tile<MAX_T, EXACT_T, PlaneLayout>(sums, weights, tile, tokens, load_half_b);
        } else {
            load_half_b(kHalfBRound);
        }
        barrier();
        if (h + 2 < kTiles) {
            hc_scatter_all<0>(half_a, tile, tokens);
            hc_scatter_all<kHalfA>(half_b, tile, tokens);
        }
        if (h + 3 < kTiles) hc_load_all<0>(half_a, args, tokens, h + 3);
        if (h + 1 < kTiles) {
#pragma unroll
            for (int round = 0; round < kTileRounds; ++round) weights[round] = next_weights[round];
        }
    }
    store_row(args, sums, row);
}

}  // namespace strata::gpu
