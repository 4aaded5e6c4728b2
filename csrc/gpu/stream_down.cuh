// The stream variant's down kernel: a quarter of the lanes of ten rows, up to the sums that the quarters put together.
#pragma once

#include "gpu/stream.cuh"

namespace strata::gpu {

// Grid kQuarters * (kStreamRowGroups, one more where there are inject rows), kStreamThreads threads.
template <int kTokens>
__global__ void __launch_bounds__(kStreamThreads, 2) gr_stream_down_kernel(GroupArgs args) {
    using Instance = StreamInstance<kTokens>;
    using Dots = typename Instance::Dots;
    constexpr int kPass = Instance::kPass;
    constexpr int kStride = Instance::kDownStride;
    constexpr int kRowChunks = kDepth / kChunk;

    const int thread = static_cast<int>(threadIdx.x);
    const int quarter = static_cast<int>(blockIdx.x) % kQuarters;
    const int first_row = static_cast<int>(blockIdx.x) / kQuarters * kStreamRows;
    const bool inject = first_row == kRank;
    const int rows = inject ? kStreams : kStreamRows;
    const int tokens = kTokens <= 2 ? kTokens : args.tokens;
    auto* const dots = reinterpret_cast<Dots*>(dynamic_shared());  // (pass, row, kStride)
    auto* const last_pass = reinterpret_cast<Chunk*>(dots + (Instance::kPasses - 1) * kStreamRows * kStride);

    const Chunk* const first_chunk =
        (inject ? args.w_inject : args.w_down + first_row * kRowChunks) + quarter_chunk(thread, quarter);
    StreamWeights<Instance::kInRegisters> weights(rows, last_pass + thread,
                                                  [&](int row) { return first_chunk + row * kRowChunks; });
    let_next_launch_begin();
    wait_for_launch_before();

#pragma unroll
    for (int pass = 0; pass < Instance::kPasses; ++pass) {
        Float4 first[kPass], second[kPass];
#pragma unroll
        for (int k = 0; k < kPass; ++k) {
            const int token = pass * kPass + k;
            first[k] = second[k] = Float4{};
            if (token >= tokens) continue;
            const auto* activations = reinterpret_cast<const Float4*>(args.normalised) + token * (kDepth / 4) +
                                      quarter * 2 * kQuarterChunks + thread;
            first[k] = load_float4(activations);
            second[k] = load_float4(activations + kQuarterChunks);
        }
        weights.arrive();
#pragma unroll
        for (int row = 0; row < kStreamRows; ++row) {
            if (row >= rows) continue;
            dots[(pass * kStreamRows + row) * kStride + thread] = Instance::chunk_dots(weights[row], first, second);
        }
    }
    local_barrier();

    // A lane's chain: the dots of its chunks in ascending order. Eight neighbouring threads have a row's lanes here.
    constexpr int kChains = Instance::kPasses * kStreamRows * kQuarterLanes;
    if (logical_group() * kLanes >= kChains) return;
    const bool filled = thread < kChains && thread / kQuarterLanes % kStreamRows < rows;
    const int pass_and_row = filled ? thread / kQuarterLanes : 0;
    const int row = pass_and_row % kStreamRows;
    const Dots* const chain = dots + pass_and_row * kStride + thread % kQuarterLanes;
    Dots sum{};
#pragma unroll 10
    for (int round = 0; round < kQuarterChunks / kQuarterLanes; ++round) {
        const Dots dot = chain[round * kQuarterLanes];
#pragma unroll
        for (int k = 0; k < kPass; ++k) sum.of[k] = sum.of[k] + dot.of[k];
    }
#pragma unroll
    for (int k = 0; k < kPass; ++k) {
        float both = sum.of[k] + shuffle_xor(sum.of[k], 4);  // lane l with l ^ 16
        both = both + shuffle_xor(both, 2);                  // and with l ^ 8
        if (planted(Fault::kWrongArithmetic)) both = bits_float(float_bits(both) ^ 1u);
        const int token = pass_and_row / kStreamRows * kPass + k;
        if (!filled || thread % kQuarterLanes >= 2 || token >= tokens) continue;
        const int lane = quarter * 2 + thread % 2;  // modulo kRowSums
        args.row_sums[((token * 2 + lane / 4) * kRowsAndInject + first_row + row) * 4 + lane % 4] = both;
    }
}

}  // namespace strata::gpu
