// The second launch of the stream variant where blocks can share their shared memory (cluster_down.cuh): stores R', and
// from lo makes the gates of twenty columns in all streams, their mix, and q8_1.
//
// Eight threads hold the 32 lanes of an up row (lanes j, j + 8, ... are thread j's): the first two stages of the tree
// are plain additions there. The four streams of two columns are one group of threads, neighbours of one column.
#pragma once

#include "gpu/stream.cuh"

namespace strata::gpu {

template <int kTokens>
struct ClusterUpShared {
    struct Stream {
        Chunk of[kStreamColumns][kStreamUpRowChunks];
        Chunk unused[kClusterUpPadding];
    } weights[kStreams];
    Float4 lo[kTokens][2][kStreamUpRowChunks];  // first halves of chunks, then second halves
    Float4 values[kTokens][kStreams][kStreamColumns / 4];
    Arrivals weights_arrive;
};
static_assert(sizeof(ClusterUpShared<1>) == cluster_up_bytes(1) && sizeof(ClusterUpShared<2>) == cluster_up_bytes(2) &&
              sizeof(ClusterUpShared<4>) == cluster_up_bytes(4) && sizeof(ClusterUpShared<8>) == cluster_up_bytes(8));

// For eight tokens more registers than two blocks of a multiprocessor can have, and no more than fit beside a block of
// the down kernel: it has 65,536, that block takes 96 for each of ten warps, so there is room for ten warps of up to
// 104, and not for twenty of more than 96. (Shared memory sees to that for fewer tokens: cluster_up_asked().)
inline constexpr int kClusterUpHeldRegisters = 94;  // and a few more
inline constexpr int kClusterUpMostRegisters = 104;

// Has the compiler give the kernel that calls it more than kCount registers a thread: values that all live at once, on
// a way that is never taken.
template <int kCount>
__device__ void hold_registers(volatile float* place) {
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = place[i];
#pragma unroll
    for (int i = 0; i < kCount; ++i) place[kCount - i] = values[i];
}

// Grid kStreamUpBlocks, kStreamThreads threads. (An instance that could quantise takes up to 0.5 us more where it does
// not: bench/NOTES.md.)
template <int kTokens, class Four, bool kQuantise>
__global__ void STRATA_MOST_REGISTERS(kClusterUpMostRegisters) gr_cluster_up_kernel(GroupArgs args) {
    if constexpr (kClusters) {
        using Shared = ClusterUpShared<kTokens>;
        constexpr int kRowThreads = 8;
        constexpr int kColumnFours = kStreamColumns / 4;
        constexpr int kGroupColumns = 2;
        static_assert(kStreamThreads / kLanes * kGroupColumns == kStreamColumns && kStreams * kRowThreads == kLanes);
        static_assert(kTokens * kStreams * kColumnFours <= kStreamThreads && kStreamThreads == kRank);

        auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
        const int thread = static_cast<int>(threadIdx.x);
        const int tokens = kTokens <= 2 ? kTokens : args.tokens;
        const int first_column = static_cast<int>(blockIdx.x) * kStreamColumns;
        if (kTokens > 4 && args.tokens > kTokens) {  // never
            return hold_registers<kClusterUpHeldRegisters>(reinterpret_cast<volatile float*>(dynamic_shared()));
        }

        const int lane = logical_lane();
        const int j = lane / kStreams;
        const int row_stream = lane % kStreams;
        const int column = logical_group() * kGroupColumns;  // and the next one
        // Lanes j and j + 16, then j + 8 and j + 24; lane j's second chunk is the fifth of the thread's.
        constexpr int kOrder[] = {0, 4, 2, 1, 3};
        constexpr int kSteps = 5;
        constexpr bool kWeightsAhead = kTokens == 1;  // read before lo is here; more tokens gain nothing

        // R' once more: the launch ahead has waited for whatever wrote what it is made of. Asked for before the
        // weights, which would keep it waiting.
        const int token = thread / (kStreams * kColumnFours);
        const int stream = thread / kColumnFours % kStreams;
        const int four = thread % kColumnFours;
        const bool has_value = token < tokens;
        const bool folds = args.block_out != nullptr;
        const int place = (token * kStreams + stream) * (kWidth / 4) + first_column / 4 + four;
        Float4 value{}, written{};
        float inject_prev = 0.0f;
        if (has_value && folds) {
            const auto* block_out = static_cast<const Four*>(args.block_out);
            value = load_stream_early(static_cast<const Four*>(args.residual) + place);
            written = load_stream_early(block_out + token * (kWidth / 4) + first_column / 4 + four);
            inject_prev = load_from_other_block(args.inject_prev + token * kStreams + stream);
        }
        if (thread == kStreamThreads - 1) {
            expect_arrivals(shared.weights_arrive, kStreams * sizeof shared.weights[0].of);
            for (int s = 0; s < kStreams; ++s) {
                copy_bulk(shared.weights[s].of, args.w_up + (s * kWidth + first_column) * kStreamUpRowChunks,
                          sizeof shared.weights[s].of, shared.weights_arrive);
            }
        }
        if constexpr (kWeightsAhead) local_barrier();  // every thread may wait for them
        let_next_launch_begin();  // whose prefetches then come early: on an H200 0.2 (T = 1) to 0.4 us (T = 8)
        Four folded{};
        if (has_value && folds) {
            value = fold(written, fold_gain(inject_prev, kStreams), value);
            folded = round_stream<Four>(value);
        }

        wait_for_launch_before();
        float lo[kTokens];
#pragma unroll
        for (int k = 0; k < kTokens; ++k) lo[k] = k < tokens ? args.lo[k * kRank + thread] : 0.0f;
        if (has_value) {
            shared.values[token][stream][four] = load_float4(reinterpret_cast<const Float4*>(args.normalised) + place);
        }
        Chunk weights[kSteps][kGroupColumns];
        const auto read_weights = [&](int step) {
#pragma unroll
            for (int c = 0; c < kGroupColumns; ++c) {
                weights[step][c] = shared.weights[row_stream].of[column + c][kOrder[step] * kRowThreads + j];
            }
        };
        if constexpr (kWeightsAhead) {
            wait_copies(shared.weights_arrive);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) read_weights(step);
        }
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            auto* half = reinterpret_cast<float*>(&shared.lo[k][thread % kChunk / 4][thread / kChunk]);
            half[thread % 4] = lo[k];
        }
        local_barrier();
        if constexpr (!kWeightsAhead) wait_copies(shared.weights_arrive);

        float sums[kGroupColumns][kTokens], others[kGroupColumns][kTokens];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int chunk = kOrder[step] * kRowThreads + j;
            if constexpr (!kWeightsAhead) read_weights(step);
#pragma unroll
            for (int k = 0; k < kTokens; ++k) {
                const Float4 first = load_float4(&shared.lo[k][0][chunk]);
                const Float4 second = load_float4(&shared.lo[k][1][chunk]);
#pragma unroll
                for (int c = 0; c < kGroupColumns; ++c) {
                    const float dot = chunk_dot(weights[step][c], first, second);
                    float& sum = sums[c][k];
                    if (step == 0) sum = dot;
                    if (step == 1 || step == 2) sum = sum + dot;
                    if (step == 3) others[c][k] = dot;
                    if (step == 4) sum = sum + (others[c][k] + dot);
                }
            }
        }
        // A token's sums are in kShare threads of a stream. Where there are several, one makes one column's gate.
        constexpr int kShare = kRowThreads / kTokens;
        constexpr int kMine = kShare > 1 ? 1 : kGroupColumns;
        const int my_token = j / kShare;
        const int my_column = kShare > 1 ? j % kGroupColumns : 0;
#pragma unroll
        for (int c = 0; c < kGroupColumns; ++c) tree_sums<kRowThreads, kStreams>(sums[c], j);
        float gates[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) gates[i] = my_column == 0 ? sums[i][0] : sums[1][0];
        // Denominators first: compilers do not move work over the branch of a division.
        float denominators[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) denominators[i] = sigmoid_denominator(gates[i]);
#pragma unroll
        for (int i = 0; i < kMine; ++i) gates[i] = 1.0f / denominators[i];

        // The mix goes from stream to stream through the lanes that have them.
        float mine[kMine] = {}, mix[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            if (my_token < tokens) {
                mine[i] = reinterpret_cast<const float*>(shared.values[my_token][row_stream])[column + my_column + i];
            }
            mix[i] = mix_first(mine[i], gates[i]);
        }
#pragma unroll
        for (int s = 1; s < kStreams; ++s) {
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                const float before = shuffle_xor(mix[i], s ^ (s - 1));  // of stream s - 1
                if (row_stream == s) mix[i] = mix_next(mine[i], gates[i], before);
            }
        }
        // Late, so that nothing waits behind it.
        if (has_value && folds) static_cast<Four*>(args.residual_out)[place] = folded;
        if (row_stream == kStreams - 1 && j % kShare < kGroupColumns / kMine && my_token < tokens) {
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                args.mixed[my_token * kWidth + first_column + column + my_column + i] =
                    canonical(mix_mean(mix[i], kStreams));
            }
        }
        if constexpr (kQuantise) quantise_shared_columns(args, block_shared<unsigned[2]>());
    }
}

}  // namespace strata::gpu
