// The staged down kernel: two tiles of activations in shared memory, tile h + 2 copied in the background while tile
// h + 1 waits and the next tile's weights are on their way to registers.
#pragma once

#include "gpu/down.cuh"

namespace strata::gpu {

// Starts the copy of tile `h` of every token into `buffer`, in planes.
__device__ __forceinline__ void stage_htile(Float4* buffer, const GroupArgs& args, int tokens, int h) {
    const auto* normalised = reinterpret_cast<const Float4*>(args.normalised);
    for (int i = static_cast<int>(threadIdx.x); i < tokens * kTileFloat4s; i += kDownThreads) {
        const int token = i / kTileFloat4s;
        const int f = i % kTileFloat4s;
        copy_async(buffer + token * kTileFloat4s + PlaneLayout::place(f),
                   normalised + (token * kTiles + h) * kTileFloat4s + f);
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

    if (row.active) load_row_tile(weights, row, 0);
    stage_htile(buffers, args, tokens, 0);
    copy_async_commit();
    stage_htile(buffers + buffer_size, args, tokens, 1);
    copy_async_commit();

#pragma unroll 1
    for (int h = 0; h < kTiles; ++h) {
        Float4* const tile = buffers + (h & 1) * buffer_size;
        if (row.active && h + 1 < kTiles) load_row_tile(next_weights, row, h + 1);
        copy_async_wait<1>();  // all but the copy of tile h + 1
        barrier();
        if (row.active) add_tile<MAX_T, EXACT_T, PlaneLayout>(sums, weights, tile, tokens, [](int) {});
        barrier();
        if (h + 2 < kTiles) stage_htile(tile, args, tokens, h + 2);
        copy_async_commit();  // an empty group past the last tile keeps the count
        if (h + 1 < kTiles) {
#pragma unroll
            for (int round = 0; round < kTileRounds; ++round) weights[round] = next_weights[round];
        }
    }
    store_row(args, sums, row);
}

}  // namespace strata::gpu
