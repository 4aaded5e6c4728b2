// The tiled down kernel, and the one that finishes its rows.
#pragma once

#include "gpu/faults.hpp"
#include "gpu/tiled.cuh"

namespace strata::gpu {

inline constexpr int kDepthRounds = kDepth / kChunk / kLanes;  // chunks of a down row's lane

// The lane that group `group` of block `block`'s threads has. Neighbouring lanes are one sector of weights; lanes that
// differ by 16 meet in the tree's first stage.
__device__ __forceinline__ int tiled_lane(int block, int group) {
    static_assert(kTiledDownLanes == 4);
    return block * 2 + group % 2 + group / 2 * kTiledSums;
}

// The normalised activations as the blocks take them: a block's four lanes, round after round.
struct ByTiledLanes {
    static constexpr bool kSpareBlocks = true;

    static __device__ std::int64_t place(int token, int f) {
        const int chunk = f / 2;
        const int lane = chunk % kLanes;
        const int block = lane % kTiledSums / 2;
        const int group = lane % 2 + lane / kTiledSums * 2;
        const int turn = (block * kDepthRounds + chunk / kLanes) * kTiledDownLanes + group;
        return tiled_place(token, turn, kDepth / kChunk, f % 2);
    }

    // Zeros for the last tile's missing tokens.
    static __device__ void spare_block(const GroupArgs& args, int token, int first_stream) {
        constexpr int kFloat4s = kWidth / 4;
        auto* const normalised = reinterpret_cast<Float4*>(args.normalised);
        for (int f = static_cast<int>(threadIdx.x); f < kFloat4s; f += kNormThreads) {
            normalised[place(token, first_stream * kFloat4s + f)] = Float4{};
        }
    }
};

using TiledDownStep = TiledStep<kTiledDownLanes, kTiledDownChunks, kTiledDownRows>;
static_assert(2 * sizeof(TiledDownStep) == kTiledDownBytes);

// Grid (kLanes / kTiledDownLanes, kTiledRows / kTiledDownRows, tiles of tokens), kTiledDownThreads threads.
__global__ void __launch_bounds__(kTiledDownThreads) gr_tiled_down_kernel(GroupArgs args) {
    constexpr int kLaneThreads = kTiledDownThreads / kTiledDownLanes;
    constexpr int kRowGroups = 4;
    constexpr int kTokenGroups = kLaneThreads / kRowGroups;
    constexpr int kThreadRows = kTiledDownRows / kRowGroups;
    constexpr int kThreadTokens = kTiledTokens / kTokenGroups;
    constexpr int kRowChunks = kDepth / kChunk;
    constexpr int kSteps = kDepthRounds / kTiledDownChunks;
    static_assert(kDepthRounds % kTiledDownChunks == 0);
    auto* const steps = reinterpret_cast<TiledDownStep*>(dynamic_shared());

    const int thread = static_cast<int>(threadIdx.x);
    const int block = static_cast<int>(blockIdx.x);
    const int first_row = static_cast<int>(blockIdx.y) * kTiledDownRows;
    const int first_token = static_cast<int>(blockIdx.z) * kTiledTokens;
    const int group = thread / kLaneThreads;
    const int row_group = thread % kRowGroups;
    const int token_group = thread / kRowGroups % kTokenGroups;

    // Inject rows follow those of w_down; where there are none, others are taken for them.
    constexpr int kCopied = kCopiedRows<kTiledDownThreads, kTiledDownLanes, kTiledDownRows>;
    const Chunk* weights[kCopied];
#pragma unroll
    for (int slot = 0; slot < kCopied; ++slot) {
        const int row = first_row + copied_row<kTiledDownThreads, kTiledDownLanes>(slot);
        const bool inject = row >= kRank && row < kTiledRows && args.w_inject != nullptr;
        weights[slot] = (inject ? args.w_inject + (row - kRank) * kRowChunks
                                : args.w_down + (row < kRank ? row : kRank - 1) * kRowChunks) +
                        tiled_lane(block, thread % kTiledDownLanes);
    }
    constexpr int kChunkFloat4s = kTiledDownLanes * kTiledTokens * 2;
    const Float4* const activations = reinterpret_cast<const Float4*>(args.normalised) +
                                      std::int64_t{first_token} * (kDepth / 4) + block * kDepthRounds * kChunkFloat4s;
    const auto ask = [&](int step) {
        const int round = step * kTiledDownChunks;
        ask_for_step<kTiledDownThreads>(
            steps[step % 2], [&](int slot, int c) { return weights[slot] + (round + c) * kLanes; },
            activations + round * kChunkFloat4s);
    };

    float sums[kThreadRows][kThreadTokens] = {};
    ask(0);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        const TiledDownStep& here = steps[step % 2];
        copy_async_wait<0>();
        local_barrier();  // and everyone is done with the other step
#pragma unroll
        for (int c = 0; c < kTiledDownChunks; ++c) {
            // Behind the first chunk: the loads that this one waits for are not kept waiting themselves.
            if (c == 1 && step + 1 < kSteps) ask(step + 1);
            add_chunk_dots<kRowGroups>(sums, here.weights[c][group] + row_group,
                                       TiledTokens<kTokenGroups>(here.activations[c][group], token_group));
        }
    }

    // The tree's first stage: groups 2 and 3 hand their sums to groups 0 and 1, through the first step's place: the
    // last one may still be read in the second.
    constexpr int kTakers = kTiledDownThreads / 2;
    auto* const exchange = reinterpret_cast<float*>(steps);
    static_assert(kSteps % 2 == 0 && kThreadRows * kThreadTokens * kTakers * sizeof(float) <= sizeof(TiledDownStep));
    if (thread >= kTakers) {
#pragma unroll
        for (int i = 0; i < kThreadRows * kThreadTokens; ++i) {
            exchange[i * kTakers + thread - kTakers] = sums[i / kThreadTokens][i % kThreadTokens];
        }
    }
    local_barrier();
    if (thread >= kTakers) return;
#pragma unroll
    for (int k = 0; k < kThreadTokens; ++k) {
        const int token = first_token + token_group + k * kTokenGroups;
        if (token >= args.tokens) continue;
        float* const target =
            args.row_sums + (std::int64_t{token} * kTiledSums + tiled_lane(block, group)) * kTiledRows + first_row;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            float both = sums[r][k] + exchange[(r * kThreadTokens + k) * kTakers + thread];
            if (planted(Fault::kWrongArithmetic)) both = bits_float(float_bits(both) ^ 1u);
            target[row_group + r * kRowGroups] = both;
        }
    }
}

// Grid tokens of whole tiles, kTiledFinishThreads threads: the tree's stages 8, 4, 2 and 1 of each row.
__global__ void __launch_bounds__(kTiledFinishThreads) gr_tiled_finish_kernel(GroupArgs args) {
    const int row = static_cast<int>(threadIdx.x);
    const int token = static_cast<int>(blockIdx.x);
    if (row >= kRank + (args.w_inject != nullptr ? kStreams : 0)) return;
    float sum = 0.0f;
    if (token < args.tokens) {
        const float* const source = args.row_sums + std::int64_t{token} * kTiledSums * kTiledRows + row;
        float sums[kTiledSums];
#pragma unroll
        for (int i = 0; i < kTiledSums; ++i) sums[i] = source[i * kTiledRows];
#pragma unroll
        for (int stage = kTiledSums / 2; stage > 0; stage /= 2) {
#pragma unroll
            for (int i = 0; i < stage; ++i) sums[i] = sums[i] + sums[i + stage];
        }
        sum = sums[0];
    }
    if (row >= kRank) {
        if (token < args.tokens) args.inject[std::int64_t{token} * kStreams + row - kRank] = canonical(sum);
        return;
    }
    const float lo = canonical(down_activation(sum, kStreams));
    if (token < args.tokens) args.lo[std::int64_t{token} * kRank + row] = lo;
    args.tiled_lo[tiled_place(token, row / kChunk, kRank / kChunk, row % kChunk / 4) * 4 + row % 4] = lo;
}

}  // namespace strata::gpu
