// The tiled up kernel: gates of some columns in all streams, for a tile of tokens, and their mix; and q8_1 of
// what it wrote.
//
// Either half of the threads adds up four of the eight sets of chunks (tiled.cuh); the sets' first tree stages are
// additions of one thread. Of what is left of the tree, two sums are kept in shared memory and one is exchanged.
#pragma once

#include "gpu/quantise.cuh"
#include "gpu/tiled_down.cuh"

namespace strata::gpu {

inline constexpr int kTiledUpThreadColumns = 2;

template <int kColumns, int kThreads, int kAhead>
struct TiledUpShared {
    static constexpr int kHalf = kThreads / 2;
    static constexpr int kRows = kStreams * kColumns;
    static constexpr int kColumnGroups = kColumns / kTiledUpThreadColumns;
    static constexpr int kTokenGroups = kHalf / kColumnGroups;
    static constexpr int kThreadRows = kStreams * kTiledUpThreadColumns;  // stream after stream, of each both columns
    static constexpr int kThreadTokens = kTiledTokens / kTokenGroups;
    using Sums = float[kThreadRows][kThreadTokens];

    TiledSteps<2, 1, kRows, kAhead> steps;
    // Of one set and of two, a thread's own; then what the halves exchange.
    float kept[2][kThreadRows][kThreadTokens][kThreads];
};

// Grid (kWidth / kColumns, tiles of tokens), kThreads threads.
template <int kColumns, int kThreads, int kAhead>
__global__ void __launch_bounds__(kThreads, resident_blocks(2)) gr_tiled_up_kernel(GroupArgs args) {
    using Shared = TiledUpShared<kColumns, kThreads, kAhead>;
    constexpr int kHalf = Shared::kHalf;
    using Steps = decltype(Shared::steps);
    static_assert(sizeof(Shared) == tiled_up_bytes(kColumns, kAhead));
    constexpr int kColumnGroups = Shared::kColumnGroups;
    constexpr int kTokenGroups = Shared::kTokenGroups;
    constexpr int kThreadRows = Shared::kThreadRows;
    constexpr int kThreadTokens = Shared::kThreadTokens;
    constexpr int kRowChunks = kRank / kChunk;
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    auto& steps = shared.steps;

    const int thread = static_cast<int>(threadIdx.x);
    const int first_column = static_cast<int>(blockIdx.x) * kColumns;
    const int first_token = static_cast<int>(blockIdx.y) * kTiledTokens;
    const int half = thread / kHalf;
    const TiledThread<kColumnGroups, kTokenGroups> mine(thread % kHalf);

    // A thread asks for one chunk of weights and some float4 of activations a turn.
    constexpr int kActivationCopies = Steps::kStepActivations / kThreads;
    static_assert(2 * Shared::kRows == kThreads && Steps::kStepActivations % kThreads == 0);
    const int asked_group = thread % 2;
    const int asked_row = thread / 2;
    const Chunk* const weights =
        args.w_up + (asked_row / kColumns * kWidth + first_column + asked_row % kColumns) * kRowChunks + asked_group;
    const Float4* const activations =
        reinterpret_cast<const Float4*>(args.tiled_lo) + std::int64_t{first_token} * (kRank / 4) + thread;
    CopyUnderWay weight_copy, activation_copies[kActivationCopies];
    // Turns are counted on into the next sets; steps are turns of all sets.
    constexpr int kSteps = kTiledUpSets * kTiledUpTurns;
    const auto asked_place = [&](int step) { return &steps.asked[step % tiled_asked_places(kAhead)][0][thread]; };
    const auto activation_place = [&](int step) { return &steps.activations[step % (kAhead + 1)].of[0][0][thread]; };
    const auto ask_weights = [&](int set, int turn) {
        const int step = set * kTiledUpTurns + turn;
        if (turn >= kTiledUpTurns) {
            turn -= kTiledUpTurns;
            ++set;
        }
        if (step >= kSteps) return;
        weight_copy.ask(reinterpret_cast<Float4*>(asked_place(step)),
                        reinterpret_cast<const Float4*>(weights + tiled_up_chunk(set, turn)));
    };
    const auto ask_activations = [&](int step) {
        if (step >= kSteps) return;
#pragma unroll
        for (int i = 0; i < kActivationCopies; ++i) {
            activation_copies[i].ask(activation_place(step) + i * kThreads,
                                     activations + step * Steps::kStepActivations + i * kThreads);
        }
    };
    const auto finish_step = [&](int step) {
        if (step == kSteps) return;
        steps.set_weights(step, 0, asked_group, asked_row, weight_copy.take(asked_place(step)));
#pragma unroll
        for (int i = 0; i < kActivationCopies; ++i) {
            activation_copies[i].land(activation_place(step) + i * kThreads);
        }
    };
    // Activations of a turn and weights of the next one are groups of copies, and these are asked for in turn.
    const int ahead = asked_ahead<kAhead>();
    static_assert(kAhead < kTiledUpTurns);
    constexpr int kUnderWay = 2 * kAhead - 1;  // groups behind the one that is waited for
    ask_weights(0, 0);
    copy_async_commit();
    wait_for_launch_before();
#pragma unroll
    for (int turn = 0; turn < ahead; ++turn) {
        ask_activations(turn);
        copy_async_commit();
        if (turn + 1 == ahead) break;
        ask_weights(0, turn + 1);
        copy_async_commit();
    }
    copy_async_wait<kUnderWay>();
    finish_step(0);
    ask_weights(0, ahead);
    copy_async_commit();

    const Float4* const own_weights = &steps.weights[0].of[0][0][half][mine.row];
    const Float4* const own_activations = &steps.activations[0].of[0][half][mine.token * 2];
    auto& one = shared.kept[0];
    auto& two = shared.kept[1];
    const auto for_all_sums = [](auto body) {
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
            for (int k = 0; k < kThreadTokens; ++k) body(r, k);
        }
    };
    typename Shared::Sums sums, others;
#pragma unroll 1
    for (int set = 0; set < kTiledUpSets; ++set) {
#pragma unroll
        for (int turn = 0; turn < kTiledUpTurns; ++turn) {
            const int step = set * kTiledUpTurns + turn;
            copy_async_wait<kUnderWay>();  // this turn's activations
            local_barrier();               // and everyone is done with the turn before
            ask_activations(step + ahead);
            copy_async_commit();
            const bool first = turn < 3;  // of the set's two sums
            add_chunk_dots<Steps, kColumnGroups, kTokenGroups>(
                first ? sums : others, turn == 0 || turn == 3, own_weights + step % 2 * Steps::kStepWeights,
                own_activations + step % (kAhead + 1) * Steps::kStepActivations);
            copy_async_wait<kUnderWay>();  // the next one's weights
            finish_step(step + 1);
            ask_weights(set, turn + 1 + ahead);
            copy_async_commit();
        }
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
    constexpr int kMine = kThreadTokens / 2;
    const int own_token = first_token + mine.token + half * kMine * kTokenGroups;
    float values[kMine][kThreadRows];
#pragma unroll
    for (int i = 0; i < kTiledUpThreadColumns; ++i) {
        const int column = first_column + mine.row + i * kColumnGroups;
        const float* const value = args.normalised + ByTiledLanes::place(own_token, column / 4) * 4 + column % 4;
#pragma unroll
        for (int k = 0; k < kMine; ++k) {
#pragma unroll
            for (int stream = 0; stream < kStreams; ++stream) {
                values[k][stream * kTiledUpThreadColumns + i] =
                    value[stream * ByTiledLanes::kNextStream + k * kTokenGroups * ByTiledLanes::kNextToken];
            }
        }
    }
    for_all_sums([&](int r, int k) {  // into this thread's own place, which nobody else has read
        if (k < kMine) one[r][k][thread] = half == 0 ? sums[r][k + kMine] : sums[r][k];
    });
    local_barrier();
    // All denominators before the first division, whose branch nothing is moved over.
    float gates[kMine][kThreadRows];
    for_all_sums([&](int r, int k) {
        if (k >= kMine) return;
        const float own = half == 0 ? sums[r][k] : sums[r][k + kMine];
        gates[k][r] = sigmoid_denominator(own + one[r][k][thread ^ kHalf]);
    });
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
        const int token = own_token + k * kTokenGroups;
#pragma unroll
        for (int i = 0; i < kTiledUpThreadColumns; ++i) {
            float mix = mix_first(values[k][i], 1.0f / gates[k][i]);
#pragma unroll
            for (int stream = 1; stream < kStreams; ++stream) {
                const int r = stream * kTiledUpThreadColumns + i;
                mix = mix_next(values[k][r], 1.0f / gates[k][r], mix);
            }
            if (token >= args.tokens) continue;
            const int column = first_column + mine.row + i * kColumnGroups;
            args.mixed[std::int64_t{token} * kWidth + column] = canonical(mix_mean(mix, kStreams));
        }
    }
}

// Grid (tokens, kQ8Columns / kNormGroups), kNormThreads threads: a q8_1 block a group of lanes.
__global__ void __launch_bounds__(kNormThreads) gr_tiled_quantise_kernel(GroupArgs args) {
    wait_for_launch_before();
    const int token = static_cast<int>(blockIdx.x);
    const int column = static_cast<int>(blockIdx.y) * kNormGroups + logical_group();
    static_assert(kQ8Columns % kNormGroups == 0);
    store_q8_block(args, token, column, kQ8Columns,
                   args.mixed[std::int64_t{token} * kWidth + column * kQ8Block + logical_lane()]);
}

}  // namespace strata::gpu
