// The register-half down kernel ("P4"): staged's tiles, order and shared layout, but tile h + 2 travels through
// registers in two halves. Half A is asked for one iteration ahead, half B in the middle of the dots of tile h; both
// are scattered into the buffer of tile h once its readers are done.
#pragma once

#include "gpu/down_staged.cuh"
#include "gpu/faults.hpp"

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

// Fills `chain` from slots SLOT, SLOT + 1, ... of tile `h`; slots past the last token's stay as they are, and nothing
// reads them.
template <int SLOT, int I>
__device__ __forceinline__ void hc_load_all(HcChain<I>& chain, const GroupArgs& args, int tokens, int h) {
    if (slot_filled(SLOT, tokens)) chain.head = load_float4(slot_source(args, tile_slot(SLOT), h));
    if constexpr (I > 0) hc_load_all<SLOT + 1>(chain.tail, args, tokens, h);
}

// Writes the chain's slots to their places, the same that stage_htile gives them.
template <int SLOT, int I>
__device__ __forceinline__ void hc_scatter_all(const HcChain<I>& chain, Float4* buffer, int tokens) {
    const Slot slot = tile_slot(SLOT);
    if (slot_filled(SLOT, planted(Fault::kTokenSkipped) ? tokens - 1 : tokens)) {
        const int place = planted(Fault::kWrongSwizzle) ? RowLayout::place(slot.f) : PlaneLayout::place(slot.f);
        store_float4(buffer + slot.token * kTileFloat4s + place, chain.head);
    }
    if constexpr (I > 0) hc_scatter_all<SLOT + 1>(chain.tail, buffer, tokens);
}

template <int I>
__device__ __forceinline__ void hc_settle_all(HcChain<I>& chain) {
    settle(chain.head.x);
    settle(chain.head.y);
    settle(chain.head.z);
    settle(chain.head.w);
    if constexpr (I > 0) hc_settle_all(chain.tail);
}

// The loop's loads and waits as compiled for gfx12, and what each `settle` is for: docs/AMD_HIP.md.
template <int MAX_T, bool EXACT_T>
__global__ void __launch_bounds__(kDownThreads, 1) gr_down_register_half_kernel(GroupArgs args) {
    constexpr int kHalfA = (kSlots<MAX_T> + 1) / 2;
    constexpr int kHalfB = kSlots<MAX_T> - kHalfA;
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

    begin_down(weights, row);
    stage_htile<MAX_T>(buffers, args, tokens, 0);
    stage_htile<MAX_T>(buffers + buffer_size, args, tokens, 1);
    copy_async_commit();
    if (!planted(Fault::kHalfANotLoaded)) hc_load_all<0>(half_a, args, tokens, 2);
    copy_async_wait<0>();
    settle_row_tile(weights);

#pragma unroll 1
    for (int h = 0; h < kTiles; ++h) {
        Float4* const tile = buffers + (h & 1) * buffer_size;
        HcChain<kHalfB - 1> half_b;
        if (h + 1 < kTiles) load_row_tile(next_weights, row, h + 1);
        local_barrier();
        add_tile<MAX_T, EXACT_T, PlaneLayout>(sums, weights, tile, tokens, [&](int round) {
            if (planted(Fault::kIdleSkipHalfB) && !row.active) return;
            const int next = planted(Fault::kHalfBWrongTile) ? h + 1 : h + 2;
            if (round == kHalfBRound && h + 2 < kTiles) hc_load_all<kHalfA>(half_b, args, tokens, next);
        });
#pragma unroll
        for (float& sum : sums) settle(sum);
        if (!planted(Fault::kMissingBarrier)) local_barrier();
        hc_settle_all(half_b);
        if (h + 2 < kTiles) {
            hc_scatter_all<0>(half_a, tile, tokens);
            hc_scatter_all<kHalfA>(half_b, tile, tokens);
        }
#pragma unroll
        for (int round = 0; round < kTileRounds; ++round) weights[round] = next_weights[round];
        if (h + 3 < kTiles) hc_load_all<0>(half_a, args, tokens, h + 3);
    }
    if (planted(Fault::kOutOfBounds)) args.lo[std::int64_t{1} << 40] = sums[0];
    store_row(args, sums, row);
}

}  // namespace strata::gpu
