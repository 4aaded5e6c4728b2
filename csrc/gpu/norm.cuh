// Fold and norm at the model's geometry: R' and 1 / rms of each stream, and the normalised activations that the down
// and up kernels read. Plain takes one block a token, split one block a token and stream, and so does stream, whose
// launches overlap (stream.cuh).
#pragma once

#include "gpu/faults.hpp"
#include "gpu/group_args.hpp"
#include "gpu/lanes.cuh"
#include "gpu/residual.cuh"

namespace strata::gpu {

inline constexpr int kWidth = static_cast<int>(kModelGeometry.width);
inline constexpr int kStreams = static_cast<int>(kModelGeometry.streams);
inline constexpr int kRank = static_cast<int>(kModelGeometry.rank);
inline constexpr int kDepth = static_cast<int>(kModelGeometry.depth());
inline constexpr int kQ8Columns = kWidth / kQ8Block;

// Every count starts a group of launches at zero, so nothing is left over from a launch that did not finish.
__device__ __forceinline__ void clear_counters(const GroupArgs& args, int count) {
    if (planted(Fault::kStaleCounter) || args.q8_1 == nullptr || blockIdx.x != 0 || blockIdx.y != 0) return;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) args.counters[i] = 0;
}

// The sum over a stream's groups: each group's tree has left its sum in `partial`, and they are added in order.
__device__ __forceinline__ float ordered_sum(const float (&partial)[kNormGroups]) {
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kNormGroups; ++group) sum = sum + partial[group];
    return sum;
}

template <int kStreamsPerBlock>
struct NormShared {
    float partial[kStreamsPerBlock][kNormGroups];
};

// Where float4 `f` of a token's normalised activations goes: where it is. An order with kSpareBlocks says besides, in
// spare_block(args, token, first_stream), what a block past the last token does instead.
struct InOrder {
    static constexpr bool kSpareBlocks = false;
    static __device__ int place(int token, int f) { return token * (kDepth / 4) + f; }
};

// Grid (tokens, and those of the order's spare blocks; streams / kStreamsPerBlock), kNormThreads threads.
template <int kStreamsPerBlock, class Four, class Order = InOrder>
__global__ void __launch_bounds__(kNormThreads) gr_norm_kernel(GroupArgs args) {
    constexpr int kFloat4s = kWidth / 4;
    constexpr int kRounds = (kFloat4s + kNormThreads - 1) / kNormThreads;
    auto& shared = block_shared<NormShared<kStreamsPerBlock>>();
    const int thread = static_cast<int>(threadIdx.x);
    const int token = static_cast<int>(blockIdx.x);
    const int first_stream = static_cast<int>(blockIdx.y) * kStreamsPerBlock;
    auto* const normalised = reinterpret_cast<Float4*>(args.normalised);
    if constexpr (Order::kSpareBlocks) {
        if (token >= args.tokens) {
            Order::spare_block(args, token, first_stream);
            return;
        }
    }
    wait_for_launch_before();
    let_next_launch_begin();  // not before: it reads weights, and what ran before may have written them
    clear_counters(args, kQ8Columns);

    const auto* residual = static_cast<const Four*>(args.residual) + std::int64_t{token} * (kDepth / 4);
    const auto* w_norm = reinterpret_cast<const Float4*>(args.w_norm);
    Float4 values[kStreamsPerBlock][kRounds];
    Float4 gains[kStreamsPerBlock][kRounds];  // asked for with the values, so that they are here when the sums are
#pragma unroll
    for (int s = 0; s < kStreamsPerBlock; ++s) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int f = thread + round * kNormThreads;
            if (f >= kFloat4s) continue;
            values[s][round] = load_stream(residual + (first_stream + s) * kFloat4s + f);
            gains[s][round] = load_float4(w_norm + (first_stream + s) * kFloat4s + f);
        }
    }
    if (args.block_out != nullptr) {
        const auto* block_out = static_cast<const Four*>(args.block_out) + std::int64_t{token} * kFloat4s;
        auto* residual_out = static_cast<Four*>(args.residual_out) + std::int64_t{token} * (kDepth / 4);
        Float4 written[kRounds];  // before the first store, which loads are not moved over
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int f = thread + round * kNormThreads;
            if (f < kFloat4s) written[round] = load_stream(block_out + f);
        }
#pragma unroll
        for (int s = 0; s < kStreamsPerBlock; ++s) {
            const float gain = fold_gain(args.inject_prev[token * kStreams + first_stream + s], kStreams);
#pragma unroll
            for (int round = 0; round < kRounds; ++round) {
                const int f = thread + round * kNormThreads;
                if (f >= kFloat4s) continue;
                values[s][round] = fold(written[round], gain, values[s][round]);
                residual_out[(first_stream + s) * kFloat4s + f] = round_stream<Four>(values[s][round]);
            }
        }
    }

#pragma unroll
    for (int s = 0; s < kStreamsPerBlock; ++s) {
        float sum = 0.0f;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (thread + round * kNormThreads < kFloat4s) sum = sum + square(values[s][round]);
        }
        sum = tree_sum(sum);
        if (logical_lane() == 0) shared.partial[s][logical_group()] = sum;
    }
    local_barrier();

#pragma unroll
    for (int s = 0; s < kStreamsPerBlock; ++s) {
        const int stream = first_stream + s;
        const float rs = reciprocal_rms(ordered_sum(shared.partial[s]), kWidth, args.eps);
        if (thread == 0) args.rs[token * kStreams + stream] = canonical(rs);
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int f = thread + round * kNormThreads;
            if (f >= kFloat4s) continue;
            normalised[Order::place(token, stream * kFloat4s + f)] = normalise(values[s][round], gains[s][round], rs);
        }
    }
}

}  // namespace strata::gpu
