// The plain down kernel, also split's: copy a tile of activations to shared memory, wait, dot, wait.
#pragma once

#include "gpu/down.cuh"

namespace strata::gpu {

__global__ void __launch_bounds__(kDownThreads, 1) gr_down_plain_kernel(GroupArgs args) {
    Float4* tile = dynamic_shared();
    const auto* normalised = reinterpret_cast<const Float4*>(args.normalised);
    const DownRow row = down_row(args);
    float sums[kMaxTokens] = {};

#pragma unroll 1
    for (int h = 0; h < kTiles; ++h) {
        for (int i = static_cast<int>(threadIdx.x); i < args.tokens * kTileFloat4s; i += kDownThreads) {
            const int token = i / kTileFloat4s;
            tile[i] = normalised[(token * kTiles + h) * kTileFloat4s + i % kTileFloat4s];
        }
        local_barrier();
        if (row.active) {
            Chunk weights[kTileRounds];
            load_row_tile(weights, row, h);
            add_tile<kMaxTokens, false, RowLayout>(sums, weights, tile, args.tokens, [](int) {});
        }
        local_barrier();
    }
    store_row(args, sums, row);
}

}  // namespace strata::gpu
