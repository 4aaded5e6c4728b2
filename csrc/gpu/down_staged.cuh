// The staged down kernel: two tiles of activations in shared memory, tile h + 2 copied in the background while tile
// h + 1 waits and the next tile's weights are on their way to registers.
#pragma once

#include "gpu/down.cuh"

namespace strata::gpu {

// Starts the copy of tile `h` of every token into `buffer`, in planes.
template <int MAX_T>
__device__ __forceinline__ void stage_htile(Float4* buffer, const GroupArgs& args, int tokens, int h) {
#pragma unroll
    for (int s = 0; s < kSlots<MAX_T>; ++s) {
        if (!slot_filled(s, tokens)) continue;
        const Slot slot = tile_slot(s);
        copy_async(buffer + slot.token * kTileFloat4s + PlaneLayout::place(slot.f), slot_source(args, slot, h));
    }
}

// MAX_T sums are kept; with EXACT_T every launch has exactly that many tokens, else at most.
template <int MAX_T, bool EXACT_T>
__global__ void __launch_bounds__(kDownThreads, 1) gr_down_staged_kernel(GroupArgs args) {
    const int tokens = EXACT_T ? MAX_T : args.tokens;
    Float4* const buffers = dynamic_shared();
    const int buffer_size = tokens * kTileFloat4s;
    const DownRow row = down_row(args);
    float sums[MAX_T] = {};
    Chunk weights[kTileRounds];
    Chunk next_weights[kTileRounds];

    begin_down(weights, row);
    stage_htile<MAX_T>(buffers, args, tokens, 0);
    copy_async_commit();
    stage_htile<MAX_T>(buffers + buffer_size, args, tokens, 1);
    copy_async_commit();
    settle_row_tile(weights);

#pragma unroll 1
    for (int h = 0; h < kTiles; ++h) {
        Float4* const tile = buffers + (h & 1) * buffer_size;
        if (h + 1 < kTiles) load_row_tile(next_weights, row, h + 1);
        copy_async_wait<1>();  // all but the copy of tile h + 1
        local_barrier();
        add_tile<MAX_T, EXACT_T, PlaneLayout>(sums, weights, tile, tokens, [](int) {});
#pragma unroll
        for (float& sum : sums) settle(sum);  // the dots hide the next weights' way here
        local_barrier();
        if (h + 2 < kTiles) stage_htile<MAX_T>(tile, args, tokens, h + 2);
        copy_async_commit();  // an empty group past the last tile keeps the count
#pragma unroll
        for (int round = 0; round < kTileRounds; ++round) weights[round] = next_weights[round];
    }
    store_row(args, sums, row);
}

}  // namespace strata::gpu
