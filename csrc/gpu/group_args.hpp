// What a kernel is given: one group of up to kMaxTokens tokens of a read, by value.
#pragma once

#include "common/arithmetic.hpp"
#include "common/geometry.hpp"

namespace strata::gpu {

struct GroupArgs {
    Geometry geometry;  // only the run-time-geometry kernels look at it
    int tokens;         // T of this launch
    float eps;

    // Streams of fp32 or bf16: the kernels that touch them are templates on it, see residual.cuh.
    const void* residual;      // (T, HC, N)
    const void* block_out;     // (T, N), null: no pending write
    const float* inject_prev;  // (T, HC)
    const float* w_norm;       // (HC, N)
    const Chunk* w_down;       // (LR, D / 8)
    const Chunk* w_up;         // (D, LR / 8)
    const Chunk* w_inject;     // (HC, D / 8), null: no inject rows

    void* residual_out;  // (T, HC, N), null exactly where block_out is
    float* normalised;   // (T, HC, N), scratch: norm (in clusters down) writes, down and up read in the same order
    float* row_sums;     // scratch, of a row's lanes: stream's (T, 2, LR + HC, 4), lanes 0 to 3 modulo 8, then 4 to 7;
                         // the tiled kernels' (T, 16, LR + HC), lane l and l + 16
    float* tiled_lo;     // scratch of the tiled kernels: lo in the order in which up takes it
    float* rs;           // (T, HC)
    float* lo;           // (T, LR)
    float* inject;       // (T, HC)
    float* mixed;        // (T, N)
    std::uint8_t* q8_1;  // (T, N / 32, 36), null: not asked for
    unsigned* counters;  // N / 32, scratch: blocks that finished their half of a q8_1 block column
};

using Kernel = void (*)(GroupArgs);

}  // namespace strata::gpu
