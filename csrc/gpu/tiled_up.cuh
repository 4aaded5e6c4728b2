// The tiled up kernel: gates of kTiledColumns columns in all streams, for a tile of tokens, and their mix; and q8_1 of
// what it wrote.
//
// Either half of the threads adds up four of the eight sets of chunks (tiled.cuh); the sets' first tree stages are
// additions of one thread. Of what is left of the tree, two sums are kept in shared memory and one is exchanged.
#pragma once

#include "gpu/quantise.cuh"
#include "gpu/tiled_down.cuh"

namespace strata::gpu {

inline constexpr int kTiledUpHalf = kTiledUpThreads / 2;
inline constexpr int kTiledUpThreadColumns = 2;
inline constexpr int kTiledUpColumnGroups = kTiledColumns / kTiledUpThreadColumns;
inline constexpr int kTiledUpTokenGroups = kTiledUpHalf / kTiledUpColumnGroups;
inline constexpr int kTiledUpThreadTokens = kTiledTokens / kTiledUpTokenGroups;

// Of a thread's rows: stream after stream, of each both columns.
using TiledUpSums = float[kStreams * kTiledUpThreadColumns][kTiledUpThreadTokens];

using TiledUpStep = TiledStep<2, 1, kTiledUpRows>;
struct TiledUpShared {
    TiledUpStep steps[2];
    Chunk asked[2 * kTiledUpRows];  // the next step's weights on their way
    // Of one set and of two, a thread's own; then what the halves exchange.
    float kept[2][kStreams * kTiledUpThreadColumns][kTiledUpThreadTokens][kTiledUpThreads];
};
static_assert(sizeof(TiledUpShared) == kTiledUpBytes);

template <class Body>
__device__ __forceinline__ void for_all_sums(Body body) {
#pragma unroll
    for (int r = 0; r < kStreams * kTiledUpThreadColumns; ++r) {
#pragma unroll
        for (int k = 0; k < kTiledUpThreadTokens; ++k) body(r, k);
    }
}

// Grid (kWidth / kTiledColumns, tiles of tokens), kTiledUpThreads threads.
__global__ void __launch_bounds__(kTiledUpThreads, resident_blocks(2)) gr_tiled_up_kernel(GroupArgs args) {
    constexpr int kRowChunks = kRank / kChunk;
    auto& shared = *reinterpret_cast<TiledUpShared*>(dynamic_shared());

    const int thread = static_cast<int>(threadIdx.x);
    const int first_column = static_cast<int>(blockIdx.x) * kTiledColumns;
    const int first_token = static_cast<int>(blockIdx.y) * kTiledTokens;
    const int half = thread / kTiledUpHalf;
    const TiledThread<kTiledUpColumnGroups, kTiledUpTokenGroups> mine(thread % kTiledUpHalf);

    // A thread asks for one chunk of weights and one float4 of activations a turn.
    static_assert(2 * kTiledUpRows == kTiledUpThreads && TiledUpStep::kChunkActivations == kTiledUpThreads);
    const int asked_group = thread % 2;
    const int asked_row = thread / 2;
    const Chunk* const weights =
        args.w_up + (asked_row / kTiledColumns * kWidth + first_column + asked_row % kTiledColumns) * kRowChunks +
        asked_group;
    const Float4* activations =
        reinterpret_cast<const Float4*>(args.tiled_lo) + std::int64_t{first_token} * (kRank / 4) + thread;
    CopyUnderWay weight_copy, activation_copy;
    // Turns are counted on into the next set.
    const auto ask_weights = [&](int set, int turn) {
        if (turn >= kTiledUpTurns) {
            turn -= kTiledUpTurns;
            ++set;
        }
        if (set == kTiledUpSets) return;
        weight_copy.ask(reinterpret_cast<Float4*>(&shared.asked[thread]),
                        reinterpret_cast<const Float4*>(weights + tiled_up_chunk(set, turn)));
    };
    const auto ask_activations = [&](int turn, int buffer) {
        activation_copy.ask(&shared.steps[buffer].activations[0][0][thread], activations + turn * kTiledUpThreads);
    };
    const auto finish_step = [&](int buffer) {
        shared.steps[buffer].set_weights(0, asked_group, asked_row, weight_copy.take(&shared.asked[thread]));
        activation_copy.land(&shared.steps[buffer].activations[0][0][thread]);
    };
    ask_weights(0, 0);
    copy_async_commit();
    ask_activations(0, 0);
    copy_async_commit();
    copy_async_wait<1>();
    finish_step(0);
    ask_weights(0, 1);
    copy_async_commit();

    const Float4* const own_weights = &shared.steps[0].weights[0][0][half][mine.row];
    const Float4* const own_activations = &shared.steps[0].activations[0][half][mine.token * 2];
    auto& one = shared.kept[0];
    auto& two = shared.kept[1];
    TiledUpSums sums, others;
#pragma unroll 1
    for (int set = 0; set < kTiledUpSets; ++set) {
#pragma unroll
        for (int turn = 0; turn < kTiledUpTurns; ++turn) {
            const int buffer = (set + turn) % 2;
            const bool more = set + 1 < kTiledUpSets || turn + 1 < kTiledUpTurns;
            // Two groups of copies are under way: this turn's activations, then the next one's weights.
            copy_async_wait<1>();
            local_barrier();  // and everyone is done with the other step
            if (more) ask_activations(turn + 1, buffer ^ 1);
            copy_async_commit();
            const bool first = turn < 3;  // of the set's two sums
            add_chunk_dots<TiledUpStep, kTiledUpColumnGroups, kTiledUpTokenGroups>(
                first ? sums : others, turn == 0 || turn == 3, own_weights + buffer * TiledUpStep::kFloat4s,
                own_activations + buffer * TiledUpStep::kFloat4s);
            if (more) {
                copy_async_wait<1>();
                finish_step(buffer ^ 1);
                ask_weights(set, turn + 2);
            }
            copy_async_commit();
        }
        activations += kTiledUpTurns * kTiledUpThreads;
        for_all_sums([&](int r, int k) { sums[r][k] = sums[r][k] + others[r][k]; });
        if (set % 2 == 0) {
            for_all_sums([&](int r, int k) { one[r][k][thread] = sums[r][k]; });
            continue;
        }
        for_all_sums([&](int r, int k) { sums[r][k] = one[r][k][thread] + sums[r][k]; });
        if (set == 1) for_all_sums([&](int r, int k) { two[r][k][thread] = sums[r][k]; });
    }
    for_all_sums([&](int r, int k) { sums[r][k] = two[r][k][thread] + sums[r][k]; });

    // The tree's last stage: either half finishes half of the tokens.
    constexpr int kMine = kTiledUpThreadTokens / 2;
    const int own_token = first_token + mine.token + half * kMine * kTiledUpTokenGroups;
    float values[kMine][kStreams * kTiledUpThreadColumns];
#pragma unroll
    for (int i = 0; i < kTiledUpThreadColumns; ++i) {
        const int column = first_column + mine.row + i * kTiledUpColumnGroups;
        const float* const value = args.normalised + ByTiledLanes::place(own_token, column / 4) * 4 + column % 4;
#pragma unroll
        for (int k = 0; k < kMine; ++k) {
#pragma unroll
            for (int stream = 0; stream < kStreams; ++stream) {
                values[k][stream * kTiledUpThreadColumns + i] =
                    value[stream * ByTiledLanes::kNextStream + k * kTiledUpTokenGroups * ByTiledLanes::kNextToken];
            }
        }
    }
    for_all_sums([&](int r, int k) {  // into this thread's own place, which nobody else has read
        if (k < kMine) one[r][k][thread] = half == 0 ? sums[r][k + kMine] : sums[r][k];
    });
    local_barrier();
    // All denominators before the first division, whose branch nothing is moved over.
    float gates[kMine][kStreams * kTiledUpThreadColumns];
    for_all_sums([&](int r, int k) {
        if (k >= kMine) return;
        const float own = half == 0 ? sums[r][k] : sums[r][k + kMine];
        gates[k][r] = sigmoid_denominator(own + one[r][k][thread ^ kTiledUpHalf]);
    });
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
        const int token = own_token + k * kTiledUpTokenGroups;
#pragma unroll
        for (int i = 0; i < kTiledUpThreadColumns; ++i) {
            float mix = mix_first(values[k][i], 1.0f / gates[k][i]);
#pragma unroll
            for (int stream = 1; stream < kStreams; ++stream) {
                const int r = stream * kTiledUpThreadColumns + i;
                mix = mix_next(values[k][r], 1.0f / gates[k][r], mix);
            }
            if (token >= args.tokens) continue;
            const int column = first_column + mine.row + i * kTiledUpColumnGroups;
            args.mixed[std::int64_t{token} * kWidth + column] = canonical(mix_mean(mix, kStreams));
        }
    }
}

// Grid (tokens, kQ8Columns / kNormGroups), kNormThreads threads: a q8_1 block a group of lanes.
__global__ void __launch_bounds__(kNormThreads) gr_tiled_quantise_kernel(GroupArgs args) {
    const int token = static_cast<int>(blockIdx.x);
    const int column = static_cast<int>(blockIdx.y) * kNormGroups + logical_group();
    static_assert(kQ8Columns % kNormGroups == 0);
    store_q8_block(args, token, column, kQ8Columns,
                   args.mixed[std::int64_t{token} * kWidth + column * kQ8Block + logical_lane()]);
}

}  // namespace strata::gpu
