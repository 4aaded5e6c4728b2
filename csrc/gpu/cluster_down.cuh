// The stream variant where blocks can share their shared memory (clusters): fold, norm, down and inject rows in one
// launch, and the up kernel (cluster_up.cuh) in a second one that has begun while this one runs.
//
// The blocks of a cluster share out the lanes of its rows, so a lane's chain of chunks is all in one block, and only
// sums go between blocks: those of squares to the block that makes the token's norms, these to all, and a row's sums of
// lanes to the block that makes its tree.
#pragma once

#include "gpu/stream.cuh"

namespace strata::gpu {

// The weights are described to the hardware that copies them: a row's piece of each round.
struct ClusterArgs {
    GroupArgs group;
    RowPieces w_down, w_inject;
};

template <int kTokens>
struct ClusterDownShared {
    static constexpr int kBlockLanes = cluster_lanes(kTokens);
    static constexpr int kBlocks = cluster_blocks(kTokens);
    static constexpr int kPositions = cluster_positions(kTokens);  // chunks of a row that this block has
    static constexpr int kTokenGroups = kStreamThreads / kPositions;
    static constexpr int kOwn = kTokens / kTokenGroups;  // tokens of a thread
    using Dots = PerToken<kOwn>;

    static constexpr int kRows = cluster_rows(kTokens);
    static constexpr int kRowsOverWeights = cluster_rows_over_weights(kTokens);
    using RowDots = Dots[kTokenGroups][kPositions + cluster_dots_padding(kTokens)];

    struct Norm {
        alignas(Float4) float squares[kTokens][kStreams][kPositions / kStreams * 2];
        alignas(Float4) float sums[kStreams][kNormThreads];
    };
    struct BeforeLast {
        RowDots dots[kRows - kRowsOverWeights];
        alignas(kRowAlignment) Chunk weights[kRows][kPositions];
    };

    // Dots take the place of what the norms are made of, and those of the last rows that of the first rows' weights.
    union {
        Norm norm;
        RowDots dots[kRows];
        BeforeLast before_last;
    };
    Dots lane_sums[cluster_finished(kTokens)][kTokenGroups][kLanes];
    float group_sums[kStreams][kNormGroups];
    float rs[kTokens][kStreams];
    Arrivals weights_arrive, more_weights_arrive, norm_sums_arrive, rs_arrive, lane_sums_arrive;

    static_assert(sizeof norm <= sizeof before_last.dots);
    static_assert(sizeof dots <= sizeof before_last);
    static_assert(sizeof(Chunk[kPositions]) % kRowAlignment == 0);
};
static_assert(sizeof(ClusterDownShared<1>) == cluster_down_bytes(1) &&
              sizeof(ClusterDownShared<2>) == cluster_down_bytes(2) &&
              sizeof(ClusterDownShared<4>) == cluster_down_bytes(4) &&
              sizeof(ClusterDownShared<8>) == cluster_down_bytes(8));

// Grid kClusterDownBlocks in clusters of cluster_blocks(kTokens), kStreamThreads threads.
template <int kTokens, class Four>
__global__ void __launch_bounds__(kStreamThreads, 2)
    gr_cluster_down_kernel(const __grid_constant__ ClusterArgs cluster_args) {
    if constexpr (kClusters) {
        using Shared = ClusterDownShared<kTokens>;
        using Dots = typename Shared::Dots;
        constexpr int kBlocks = Shared::kBlocks;
        constexpr int kBlockLanes = Shared::kBlockLanes;
        constexpr int kPositions = Shared::kPositions;
        constexpr int kOwn = Shared::kOwn;
        constexpr int kClusterCount = cluster_count(kTokens);
        constexpr int kRows = Shared::kRows;
        constexpr int kRowsFirst = cluster_rows_first(kTokens);
        constexpr int kFinished = cluster_finished(kTokens);
        constexpr int kRowChunks = kDepth / kChunk;
        constexpr int kRounds = kClusterRounds;
        constexpr int kStreamRounds = kRounds / kStreams;
        constexpr int kStreamFloat4s = kWidth / 4;
        constexpr int kBlockFloat4s = 2 * kBlockLanes;  // of a round
        static_assert(kTokens * kStreams <= kLanes, "a lane makes the gain of each token and stream");
        static_assert(kTokens <= kBlocks, "a block for each token's norms");
        static_assert(kTokens <= kClusterCount, "a cluster stores what it has normalised of one token");
        static_assert(kRows <= kLanes, "a thread of the last group asks for each row's weights");
        static_assert(kRowsFirst <= cluster_rows_at_least(kTokens));

        const GroupArgs& args = cluster_args.group;
        auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
        auto& row_weights = shared.before_last.weights;
        const int thread = static_cast<int>(threadIdx.x);
        const int lane = logical_lane();
        const int rank = static_cast<int>(blockIdx.x) % kBlocks;
        const int cluster = static_cast<int>(blockIdx.x) / kBlocks;
        const int tokens = kTokens <= 2 ? kTokens : args.tokens;
        const int all_rows = kRank + (args.w_inject != nullptr ? kStreams : 0);
        const int first_row = cluster_first_row(cluster, all_rows, kClusterCount);
        const int rows = cluster_first_row(cluster + 1, all_rows, kClusterCount) - first_row;
        const int finished = (rows - rank + kBlocks - 1) / kBlocks;  // rows rank, rank + kBlocks, ...

        // A thread has one chunk of each row, in kOwn tokens.
        const int position = thread % kPositions;
        const int token_group = thread / kPositions;
        const int first_token = token_group * kOwn;
        const int round = position / kBlockLanes;
        const int stream = round / kStreamRounds;
        const int stream_round = round % kStreamRounds;
        const int block_lane = position % kBlockLanes;
        const int chunk = stream_round * kLanes + rank * kBlockLanes + block_lane;  // of its stream

        if (thread == 0) {
            expect_arrivals(shared.weights_arrive, kRowsFirst * sizeof row_weights[0]);
            expect_arrivals(shared.more_weights_arrive,
                            static_cast<unsigned>(rows - kRowsFirst) * sizeof row_weights[0]);
            if (rank < kTokens) expect_arrivals(shared.norm_sums_arrive, sizeof shared.norm.sums);
            expect_arrivals(shared.rs_arrive, sizeof shared.rs);
            expect_arrivals(shared.lane_sums_arrive, static_cast<unsigned>(finished) * sizeof shared.lane_sums[0]);
        }
        local_barrier();
        cluster_arrive();
        if (thread == 0) {
            prefetch_rows(cluster_args.w_down);
            if (args.w_inject != nullptr) prefetch_rows(cluster_args.w_inject);
        }
        // Weights may still be written by the launch ahead, so they are asked for into the second-level cache only.
        // (Those of the norms not for one token, which took 0.08 us longer on an H200.)
        constexpr int kGainBlocks = 40;
        constexpr int kGains = kDepth / kGainBlocks;
        static_assert(kGainBlocks * kGains == kDepth && kGainBlocks <= kClusterDownBlocks);
        if (kTokens > 1 && thread == kLanes && blockIdx.x < kGainBlocks) {
            prefetch(args.w_norm + static_cast<int>(blockIdx.x) * kGains, kGains * sizeof(float));
        }
        const int asked_row = thread - (kStreamThreads - kLanes);  // a thread of the last group's
        const bool asks = asked_row >= 0 && asked_row < rows;
        const bool asks_inject = first_row + asked_row >= kRank;
        const int matrix_row = first_row + asked_row - (asks_inject ? kRank : 0);
        if (asks) {
            constexpr int kPart = kRowChunks / kBlocks;
            const Chunk* matrix = asks_inject ? args.w_inject : args.w_down;
            prefetch(matrix + matrix_row * kRowChunks + rank * kPart, kPart * static_cast<unsigned>(sizeof(Chunk)));
        }
        const auto ask_for_weights = [&](Arrivals& arrivals) {
            copy_row_pieces(row_weights[asked_row], asks_inject ? cluster_args.w_inject : cluster_args.w_down,
                            matrix_row, rank, arrivals);
        };
        wait_for_launch_before();

        // Activations before weights, which would keep them waiting.
        const auto* residual = static_cast<const Four*>(args.residual) + stream * kStreamFloat4s + 2 * chunk;
        const auto* block_out = static_cast<const Four*>(args.block_out) + 2 * chunk;
        const bool folds = args.block_out != nullptr;
        const float inject_prev = folds ? args.inject_prev[lane < tokens * kStreams ? lane : 0] : 0.0f;
        Float4 first[kOwn], second[kOwn], first_written[kOwn], second_written[kOwn];
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            first[k] = second[k] = first_written[k] = second_written[k] = Float4{};
            if (first_token + k >= tokens) continue;
            first[k] = load_stream(residual + (first_token + k) * (kDepth / 4));
            second[k] = load_stream(residual + (first_token + k) * (kDepth / 4) + 1);
        }
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            if (!folds || first_token + k >= tokens) continue;
            first_written[k] = load_stream(block_out + (first_token + k) * kStreamFloat4s);
            second_written[k] = load_stream(block_out + (first_token + k) * kStreamFloat4s + 1);
        }
        const auto* w_norm = reinterpret_cast<const Float4*>(args.w_norm) + stream * kStreamFloat4s + 2 * chunk;
        const Float4 first_gain = load_float4(w_norm);
        const Float4 second_gain = load_float4(w_norm + 1);
        if (asks && asked_row < kRowsFirst) ask_for_weights(shared.weights_arrive);
        if (folds) {
            const float gain = fold_gain(inject_prev, kStreams);
#pragma unroll
            for (int k = 0; k < kOwn; ++k) {
                const float token_gain = shuffle_from(gain, (first_token + k) * kStreams + stream);
                if (first_token + k >= tokens) continue;
                first[k] = fold(first_written[k], token_gain, first[k]);
                second[k] = fold(second_written[k], token_gain, second[k]);
                round_stream<Four>(first[k]);  // stored by the up kernel: other blocks still read `residual`
                round_stream<Four>(second[k]);
            }
        }
        let_next_launch_begin();

        // Norm: what a thread of gr_norm_kernel adds up is all in this block, for the threads that have its lanes.
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            float* squares =
                shared.norm.squares[first_token + k][stream] + stream_round * kBlockFloat4s + 2 * block_lane;
            squares[0] = square(first[k]);
            squares[1] = square(second[k]);
        }
        local_barrier();
        cluster_wait();
        constexpr int kNormRounds = kNormThreads / (2 * kLanes);
        constexpr int kFours = kBlockFloat4s / 4;
        static_assert(kTokens * kStreams * kNormRounds * kFours <= kStreamThreads);
        if (const int token = thread / (kFours * kNormRounds * kStreams); token < kTokens) {
            const int four = thread % kFours;
            const int norm_round = thread / kFours % kNormRounds;
            const int norm_stream = thread / (kFours * kNormRounds) % kStreams;
            Float4 sums{};
#pragma unroll
            for (int r = 0; r < kStreamRounds; r += kNormRounds) {
                if (norm_round + r >= kStreamRounds) continue;
                const float* place =
                    shared.norm.squares[token][norm_stream] + (norm_round + r) * kBlockFloat4s + 4 * four;
                const Float4 squares = load_float4(reinterpret_cast<const Float4*>(place));
                sums = {sums.x + squares.x, sums.y + squares.y, sums.z + squares.z, sums.w + squares.w};
            }
            float* place = shared.norm.sums[norm_stream] + norm_round * 2 * kLanes + rank * kBlockFloat4s + 4 * four;
            send(reinterpret_cast<Float4*>(place), token, sums, shared.norm_sums_arrive);
        }
        if (asks && asked_row >= kRowsFirst) ask_for_weights(shared.more_weights_arrive);
        const bool makes_norms = rank < kTokens;  // of token `rank`
        if (const int group = logical_group(); makes_norms && group < kNormGroups) {
            wait_arrivals(shared.norm_sums_arrive);
            float sums[kStreams];
#pragma unroll
            for (int s = 0; s < kStreams; ++s) sums[s] = shared.norm.sums[s][group * kLanes + lane];
            tree_sums<kLanes>(sums, lane);
            if (lane % (kLanes / kStreams) == 0) shared.group_sums[lane * kStreams / kLanes][group] = sums[0];
        }
        local_barrier();  // group_sums are there, and `norm` has been read
        if (makes_norms && thread < kStreams * kBlocks) {
            const int norm_stream = thread % kStreams;
            const int to = thread / kStreams;
            const float rs = reciprocal_rms(ordered_sum(shared.group_sums[norm_stream]), kWidth, args.eps);
            send(&shared.rs[rank][norm_stream], to, rs, shared.rs_arrive);
            if (cluster == 0 && to == 0 && rank < tokens) args.rs[rank * kStreams + norm_stream] = canonical(rs);
        }
        wait_arrivals(shared.rs_arrive);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            const float rs = shared.rs[first_token + k][stream];
            first[k] = normalise(first[k], first_gain, rs);
            second[k] = normalise(second[k], second_gain, rs);
        }
        wait_copies(shared.weights_arrive);
        constexpr int kRowsAtOnce = kTokens <= 4 ? 4 : 2;  // whose dots overlap
        constexpr int kRowsBeforeLast = kRows - Shared::kRowsOverWeights;
        static_assert(kRowsFirst % kRowsAtOnce == 0);
        static_assert(Shared::kRowsOverWeights == 0 ||
                      (kRowsBeforeLast % kRowsAtOnce == 0 && Shared::kRowsOverWeights <= kRowsAtOnce &&
                       sizeof shared.dots - sizeof shared.before_last.dots <= kRowsBeforeLast * sizeof row_weights[0]));
        const auto has_row = [rows](int row) {
            return row < cluster_rows_at_least(kTokens) || (row < kRows && row < rows);
        };
#pragma unroll
        for (int from = 0; from < kRows; from += kRowsAtOnce) {
            if (from == kRowsFirst) wait_copies(shared.more_weights_arrive);
            Chunk weights[kRowsAtOnce] = {};
            Dots dots[kRowsAtOnce];
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                if (has_row(from + i)) weights[i] = row_weights[from + i][position];
            }
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
                for (int k = 0; k < kOwn; ++k) dots[i].of[k] = chunk_dot(weights[i], first[k], second[k]);
            }
            if (from == kRowsBeforeLast) local_barrier();  // every thread has read the weights that these lie over
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                if (has_row(from + i)) shared.dots[from + i][token_group][position] = dots[i];
            }
        }
        local_barrier();

        // The chain of each lane.
        static_assert(kRows * Shared::kTokenGroups * kBlockLanes <= kStreamThreads);
        if (const int row = thread / (kBlockLanes * Shared::kTokenGroups); row < rows) {
            const int chain_lane = thread % kBlockLanes;
            const int group = thread / kBlockLanes % Shared::kTokenGroups;
            const Dots* const chain = shared.dots[row][group] + chain_lane;
            [[maybe_unused]] constexpr int kAhead = kOwn == 1 ? kRounds : kRounds / 2;  // loads that are under way
            Dots sums{};
#pragma unroll kAhead
            for (int r = 0; r < kRounds; ++r) {
                const Dots dot = chain[r * kBlockLanes];
#pragma unroll
                for (int k = 0; k < kOwn; ++k) sums.of[k] = sums.of[k] + dot.of[k];
            }
            send(&shared.lane_sums[row / kBlocks][group][rank * kBlockLanes + chain_lane], row % kBlocks, sums,
                 shared.lane_sums_arrive);
        }

        // What only the up kernel needs, while the sums are on their way: here nothing waits for the integer division.
        clear_counters(args, kQ8Columns);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            if (first_token + k != cluster || cluster >= tokens) continue;
            auto* place = reinterpret_cast<Float4*>(args.normalised) + (cluster * kStreams + stream) * kStreamFloat4s;
            place[2 * chunk] = first[k];
            place[2 * chunk + 1] = second[k];
        }

        // The tree of each row, and silu.
        const int slot = logical_group() % kFinished;
        const int group = logical_group() / kFinished;
        if (group >= Shared::kTokenGroups) return;
        wait_arrivals(shared.lane_sums_arrive);
        if (slot >= finished) return;
        Dots sums = shared.lane_sums[slot][group][lane];
        tree_sums<kLanes>(sums.of, lane);
        float sum = sums.of[0];
        if (planted(Fault::kWrongArithmetic)) sum = bits_float(float_bits(sum) ^ 1u);
        const int row = first_row + slot * kBlocks + rank;
        const int token = group * kOwn + lane * kOwn / kLanes;
        const float value = canonical(row < kRank ? down_activation(sum, kStreams) : sum);
        if (lane % (kLanes / kOwn) != 0 || token >= tokens) return;
        if (row < kRank) {
            args.lo[token * kRank + row] = value;
        } else {
            args.inject[token * kStreams + row - kRank] = value;
        }
    }
}

}  // namespace strata::gpu
