// The stream variant where blocks can share their shared memory (clusters): fold, norm, down and inject rows in one
// launch, and the up kernel (cluster_up.cuh) in a second one that has begun while this one runs.
//
// A block has one stream of all tokens and ten or eleven rows' weights for it; the four blocks of a cluster have the
// four streams. Each makes its stream's norm by itself and the dots of its chunks. A row's dots are sent to the one
// block that adds them in order: its threads are the row's lanes, and the tree is theirs.
#pragma once

#include "gpu/stream.cuh"

namespace strata::gpu {

template <int kTokens>
struct ClusterDownShared {
    using Dots = typename StreamInstance<kTokens>::Dots;
    Chunk weights[kClusterRows][kStreamThreads];
    Dots dots[StreamInstance<kTokens>::kPasses][kClusterFinished][kDepth / kChunk];
    float squares[kTokens][kWidth / 4];
    float group_sums[kTokens][kNormGroups];
    Arrivals weights_arrive, dots_arrive;
};
static_assert(sizeof(ClusterDownShared<1>) == cluster_down_bytes(1) &&
              sizeof(ClusterDownShared<2>) == cluster_down_bytes(2) &&
              sizeof(ClusterDownShared<4>) == cluster_down_bytes(4) &&
              sizeof(ClusterDownShared<8>) == cluster_down_bytes(8));

// Grid kDownClusters * kClusterBlocks in clusters of kClusterBlocks, kStreamThreads threads.
template <int kTokens, class Four>
__global__ void __launch_bounds__(kStreamThreads, kTokens <= 4 ? 2 : 1) gr_cluster_down_kernel(GroupArgs args) {
    if constexpr (kClusters) {
        using Shared = ClusterDownShared<kTokens>;
        using Dots = typename Shared::Dots;
        constexpr int kPass = StreamInstance<kTokens>::kPass;
        constexpr int kPasses = StreamInstance<kTokens>::kPasses;
        constexpr int kRowChunks = kDepth / kChunk;
        constexpr int kStreamFloat4s = kWidth / 4;
        constexpr unsigned kPieceBytes = kStreamThreads * sizeof(Chunk);
        static_assert(kClusterRows <= kLanes, "a thread of the last group asks for each row's weights");
        static_assert(kTokens <= kDownClusters, "a cluster stores what it has normalised of one token");

        auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
        const int thread = static_cast<int>(threadIdx.x);
        const int lane = logical_lane();
        const int stream = static_cast<int>(blockIdx.x) % kClusterBlocks;  // and the block's rank in its cluster
        const int cluster = static_cast<int>(blockIdx.x) / kClusterBlocks;
        const int tokens = kTokens <= 2 ? kTokens : args.tokens;
        const int all_rows = kRank + (args.w_inject != nullptr ? kStreams : 0);
        const int first_row = cluster_first_row(cluster, all_rows);
        const int rows = cluster_first_row(cluster + 1, all_rows) - first_row;
        const int finished = (rows - stream + kClusterBlocks - 1) / kClusterBlocks;  // rows stream, stream + 4, ...
        const auto piece = [&](int row) {
            const Chunk* whole = first_row + row < kRank ? args.w_down + (first_row + row) * kRowChunks
                                                         : args.w_inject + (first_row + row - kRank) * kRowChunks;
            return whole + stream * kStreamThreads;
        };

        if (thread == 0) {
            expect_arrivals(shared.weights_arrive, static_cast<unsigned>(rows) * kPieceBytes);
            expect_arrivals(shared.dots_arrive, static_cast<unsigned>(finished * kRowChunks * kPasses) *
                                                    static_cast<unsigned>(sizeof(Dots)));
        }
        local_barrier();
        cluster_arrive();
        // The weights may still be written by the launch ahead, so they are asked for into the second-level cache only.
        const int asked_row = thread - (kStreamThreads - kLanes);  // a thread of the last group's
        const bool asks = asked_row >= 0 && asked_row < rows;
        if (asks) prefetch(piece(asked_row), kPieceBytes);
        if (cluster == 0 && thread == 0) {
            prefetch(args.w_norm + stream * kWidth, static_cast<unsigned>(kWidth * sizeof(float)));
        }
        wait_for_launch_before();
        clear_counters(args, kQ8Columns);

        // Activations before weights, which would keep them waiting.
        const auto* residual = static_cast<const Four*>(args.residual) + stream * kStreamFloat4s + 2 * thread;
        const auto* block_out = static_cast<const Four*>(args.block_out) + 2 * thread;
        const bool folds = args.block_out != nullptr;
        const float inject_prev = folds && lane < tokens ? args.inject_prev[lane * kStreams + stream] : 0.0f;
        Float4 first[kTokens], second[kTokens];
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            first[k] = second[k] = Float4{};
            if (k >= tokens) continue;
            first[k] = load_stream(residual + k * (kDepth / 4));
            second[k] = load_stream(residual + k * (kDepth / 4) + 1);
        }
        const auto* w_norm = reinterpret_cast<const Float4*>(args.w_norm) + stream * kStreamFloat4s + 2 * thread;
        const Float4 first_gain = load_float4(w_norm);
        const Float4 second_gain = load_float4(w_norm + 1);
        constexpr int kFolds = kTokens <= 4 ? kTokens : 2;  // tokens whose loads are under way at once
#pragma unroll
        for (int from = 0; from < kTokens; from += kFolds) {
            Float4 first_written[kFolds], second_written[kFolds];
#pragma unroll
            for (int k = 0; k < kFolds; ++k) {
                if (!folds || from + k >= tokens) continue;
                first_written[k] = load_stream(block_out + (from + k) * kStreamFloat4s);
                second_written[k] = load_stream(block_out + (from + k) * kStreamFloat4s + 1);
            }
            if (from == 0 && asks) {
                copy_bulk(shared.weights[asked_row], piece(asked_row), kPieceBytes, shared.weights_arrive);
            }
            if (!folds) continue;
            const float gain = fold_gain(inject_prev, kStreams);
#pragma unroll
            for (int k = 0; k < kFolds; ++k) {
                const float token_gain = shuffle_from(gain, from + k);
                if (from + k >= tokens) continue;
                first[from + k] = fold(first_written[k], token_gain, first[from + k]);
                second[from + k] = fold(second_written[k], token_gain, second[from + k]);
                round_stream<Four>(first[from + k]);  // stored by the up kernel: other blocks still read `residual`
                round_stream<Four>(second[from + k]);
            }
        }
        let_next_launch_begin();

#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            shared.squares[k][2 * thread] = square(first[k]);
            shared.squares[k][2 * thread + 1] = square(second[k]);
        }
        local_barrier();
        if (const int group = logical_group(); group < kNormGroups) {
            float sums[kTokens];
#pragma unroll
            for (int k = 0; k < kTokens; ++k) {
                sums[k] = 0.0f + shared.squares[k][group * kLanes + lane];
                sums[k] = sums[k] + shared.squares[k][kNormThreads + group * kLanes + lane];
            }
            if (2 * kNormThreads + group * kLanes < kStreamFloat4s) {
#pragma unroll
                for (int k = 0; k < kTokens; ++k) {
                    sums[k] = sums[k] + shared.squares[k][2 * kNormThreads + group * kLanes + lane];
                }
            }
            tree_sums<kLanes>(sums, lane);
            if (lane % (kLanes / kTokens) == 0) shared.group_sums[lane * kTokens / kLanes][group] = sums[0];
        }
        local_barrier();
        auto* const normalised = reinterpret_cast<Float4*>(args.normalised);
        const float token_rs = reciprocal_rms(ordered_sum(shared.group_sums[lane % kTokens]), kWidth, args.eps);
        if (cluster == 0 && thread < tokens) args.rs[thread * kStreams + stream] = canonical(token_rs);
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            const float rs = shuffle_from(token_rs, k);
            first[k] = normalise(first[k], first_gain, rs);
            second[k] = normalise(second[k], second_gain, rs);
            if (k != cluster || k >= tokens) continue;
            auto* mine = normalised + (k * kStreams + stream) * kStreamFloat4s + 2 * thread;
            mine[0] = first[k];
            mine[1] = second[k];
        }

        cluster_wait();
        wait_arrivals(shared.weights_arrive);
        constexpr int kRowsAtOnce = kTokens <= 2 ? 4 : 2;  // whose dots overlap
        const auto has_row = [rows](int row) {
            return row < kClusterRowsAtLeast || (row < kClusterRows && row < rows);
        };
#pragma unroll
        for (int from = 0; from < kClusterRows; from += kRowsAtOnce) {
            Chunk weights[kRowsAtOnce] = {};
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                if (has_row(from + i)) weights[i] = shared.weights[from + i][thread];
            }
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                Dots dots[kRowsAtOnce];
#pragma unroll
                for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
                    for (int k = 0; k < kPass; ++k) {
                        dots[i].of[k] = chunk_dot(weights[i], first[pass * kPass + k], second[pass * kPass + k]);
                    }
                }
#pragma unroll
                for (int i = 0; i < kRowsAtOnce; ++i) {
                    const int row = from + i;
                    if (!has_row(row)) continue;
                    send(&shared.dots[pass][row / kClusterBlocks][stream * kStreamThreads + thread],
                         row % kClusterBlocks, dots[i], shared.dots_arrive);
                }
            }
        }

        // A row: its lanes' chains, their tree, silu.
        const int slot = logical_group() % kClusterFinished;
        const int pass = logical_group() / kClusterFinished;
        if (pass >= kPasses) return;
        wait_arrivals(shared.dots_arrive);
        if (slot >= finished) return;
        const Dots* const chain = shared.dots[pass][slot] + lane;
        float sums[kPass] = {};
#pragma unroll 20
        for (int round = 0; round < kRowChunks / kLanes; ++round) {
            const Dots dot = chain[round * kLanes];
#pragma unroll
            for (int k = 0; k < kPass; ++k) sums[k] = sums[k] + dot.of[k];
        }
        tree_sums<kLanes>(sums, lane);
        float sum = sums[0];
        if (planted(Fault::kWrongArithmetic)) sum = bits_float(float_bits(sum) ^ 1u);
        const int row = first_row + slot * kClusterBlocks + stream;
        const int token = pass * kPass + lane * kPass / kLanes;
        const float value = canonical(row < kRank ? down_activation(sum, kStreams) : sum);
        if (lane % (kLanes / kPass) != 0 || token >= tokens) return;
        if (row < kRank) {
            args.lo[token * kRank + row] = value;
        } else {
            args.inject[token * kStreams + row - kRank] = value;
        }
    }
}

}  // namespace strata::gpu
