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
    // Floats from a value to the same token's in the next stream, and to the next token's of the tile.
    static constexpr int kNextStream = kDepthRounds / kStreams * kTiledDownLanes * kTiledTokens * kChunk;
    static constexpr int kNextToken = kChunk;

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
        wait_for_launch_before();
        constexpr int kFloat4s = kWidth / 4;
        auto* const normalised = reinterpret_cast<Float4*>(args.normalised);
        for (int f = static_cast<int>(threadIdx.x); f < kFloat4s; f += kNormThreads) {
            normalised[place(token, first_stream * kFloat4s + f)] = Float4{};
        }
    }
};

// Grid (kLanes / kTiledDownLanes, kTiledRows / kRows, tiles of tokens), kThreads threads.
template <int kRows, int kThreads, int kAhead>
__global__ void __launch_bounds__(kThreads) gr_tiled_down_kernel(GroupArgs args) {
    using Steps = TiledSteps<kTiledDownLanes, kTiledDownChunks, kRows, kAhead>;
    static_assert(sizeof(Steps) == tiled_down_bytes(kRows, kAhead));
    constexpr int kLaneThreads = kThreads / kTiledDownLanes;
    constexpr int kRowGroups = 4;
    constexpr int kTokenGroups = kLaneThreads / kRowGroups;
    constexpr int kThreadRows = kRows / kRowGroups;
    constexpr int kThreadTokens = kTiledTokens / kTokenGroups;
    constexpr int kRowChunks = kDepth / kChunk;
    constexpr int kSteps = kDepthRounds / kTiledDownChunks;
    static_assert(kDepthRounds % kTiledDownChunks == 0 && kRows % kRowGroups == 0);
    auto& shared = *reinterpret_cast<Steps*>(dynamic_shared());

    const int thread = static_cast<int>(threadIdx.x);
    const int block = static_cast<int>(blockIdx.x);
    const int first_row = static_cast<int>(blockIdx.y) * kRows;
    const int first_token = static_cast<int>(blockIdx.z) * kTiledTokens;
    const int group = thread / kLaneThreads;
    const TiledThread<kRowGroups, kTokenGroups> mine(thread % kLaneThreads);

    // What this thread asks for: one lane's chunks of some rows. Inject rows follow those of w_down; where there are
    // none, others are taken for them.
    constexpr int kRowsAtOnce = kThreads / kTiledDownLanes;
    constexpr int kSlots = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
    const int asked_group = thread % kTiledDownLanes;
    const int asked_row = thread / kTiledDownLanes;  // and those kRowsAtOnce apart
    const Chunk* weights[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        const int row = first_row + asked_row + slot * kRowsAtOnce;
        const bool inject = row >= kRank && row < kTiledRows && args.w_inject != nullptr;
        weights[slot] = (inject ? args.w_inject + (row - kRank) * kRowChunks
                                : args.w_down + (row < kRank ? row : kRank - 1) * kRowChunks) +
                        tiled_lane(block, asked_group);
    }
    const auto for_asked = [&](int step, auto body) {
        auto& asked = shared.asked[step % tiled_asked_places(kAhead)];
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            if (asked_row + slot * kRowsAtOnce >= kRows) continue;
#pragma unroll
            for (int c = 0; c < kTiledDownChunks; ++c) {
                body(slot, c, asked[c][slot * kThreads + thread]);
            }
        }
    };
    CopyUnderWay weight_copies[kSlots][kTiledDownChunks];
    const auto ask_weights = [&](int step) {
        for_asked(step, [&](int slot, int c, Chunk& asked) {
            weight_copies[slot][c].ask(
                reinterpret_cast<Float4*>(&asked),
                reinterpret_cast<const Float4*>(weights[slot] + (step * kTiledDownChunks + c) * kLanes));
        });
    };
    constexpr int kStepActivations = Steps::kStepActivations;
    static_assert(kStepActivations % kThreads == 0);
    const Float4* const activations = reinterpret_cast<const Float4*>(args.normalised) +
                                      std::int64_t{first_token} * (kDepth / 4) + block * kSteps * kStepActivations +
                                      thread;
    constexpr int kActivationCopies = kStepActivations / kThreads;
    CopyUnderWay activation_copies[kActivationCopies];
    const auto for_activations = [&](int step, auto body) {
        Float4* const target = &shared.activations[step % (kAhead + 1)].of[0][0][thread];
#pragma unroll
        for (int i = 0; i < kActivationCopies; ++i) body(activation_copies[i], i, target + i * kThreads);
    };
    const auto ask_activations = [&](int step) {
        for_activations(step, [&](CopyUnderWay& copy, int i, Float4* target) {
            copy.ask(target, activations + step * kStepActivations + i * kThreads);
        });
    };
    const auto finish_step = [&](int step) {
        for_asked(step, [&](int slot, int c, const Chunk& asked) {
            const Chunk chunk = weight_copies[slot][c].take(&asked);
            shared.set_weights(step, c, asked_group, asked_row + slot * kRowsAtOnce, chunk);
        });
        for_activations(step, [](const CopyUnderWay& copy, int, Float4* target) { copy.land(target); });
    };

    // Activations of a step and weights of the next one are groups of copies, and these are asked for in turn.
    const int ahead = asked_ahead<kAhead>();
    constexpr int kUnderWay = 2 * kAhead - 1;  // groups behind the one that is waited for
    ask_weights(0);
    copy_async_commit();
    wait_for_launch_before();
#pragma unroll
    for (int step = 0; step < ahead; ++step) {
        ask_activations(step);
        copy_async_commit();
        if (step + 1 == ahead) break;
        ask_weights(step + 1);
        copy_async_commit();
    }
    copy_async_wait<kUnderWay>();
    finish_step(0);
    ask_weights(ahead);
    copy_async_commit();

    const Float4* const own_weights = &shared.weights[0].of[0][0][group][mine.row];
    const Float4* const own_activations = &shared.activations[0].of[0][group][mine.token * 2];
    float sums[kThreadRows][kThreadTokens] = {};
    constexpr int kStepsAtOnce = kAhead + 1;  // so that a step's places are known
    static_assert(kSteps % kStepsAtOnce == 0 && kStepsAtOnce % 2 == 0);
#pragma unroll 1
    for (int from = 0; from < kSteps; from += kStepsAtOnce) {
#pragma unroll
        for (int place = 0; place < kStepsAtOnce; ++place) {
            const int step = from + place;
            copy_async_wait<kUnderWay>();  // this step's activations
            local_barrier();               // and everyone is done with the step before
            if (step + ahead < kSteps) ask_activations(step + ahead);
            copy_async_commit();
#pragma unroll
            for (int c = 0; c < kTiledDownChunks; ++c) {
                add_chunk_dots<Steps, kRowGroups, kTokenGroups>(
                    sums, false, own_weights + place % 2 * Steps::kStepWeights + c * Steps::kChunkWeights,
                    own_activations + place * kStepActivations + c * Steps::kChunkActivations);
            }
            if (step + 1 < kSteps) {
                copy_async_wait<kUnderWay>();  // the next one's weights
                finish_step(step + 1);
                if (step + 1 + ahead < kSteps) ask_weights(step + 1 + ahead);
            }
            copy_async_commit();
        }
    }

    let_next_launch_begin();

    // The tree's first stage: groups 2 and 3 hand their sums to groups 0 and 1, through the place of the first step's
    // weights: the last step's may still be read in the other one.
    constexpr int kTakers = kThreads / 2;
    auto* const exchange = reinterpret_cast<float*>(&shared.weights[0]);
    static_assert(kSteps % 2 == 0 && kThreadRows * kThreadTokens * kTakers * sizeof(float) <= sizeof shared.weights[0]);
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
        const int token = first_token + mine.token + k * kTokenGroups;
        if (token >= args.tokens) continue;
        float* const target =
            args.row_sums + (std::int64_t{token} * kTiledSums + tiled_lane(block, group)) * kTiledRows + first_row;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            float both = sums[r][k] + exchange[(r * kThreadTokens + k) * kTakers + thread];
            if (planted(Fault::kWrongArithmetic)) both = bits_float(float_bits(both) ^ 1u);
            target[mine.row + r * kRowGroups] = both;
        }
    }
}

// Grid tokens of whole tiles, kTiledFinishThreads threads: the tree's stages 8, 4, 2 and 1 of each row.
__global__ void __launch_bounds__(kTiledFinishThreads) gr_tiled_finish_kernel(GroupArgs args) {
    wait_for_launch_before();
    let_next_launch_begin();
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
    const int place = tiled_up_place(row / kChunk);
    args.tiled_lo[tiled_place(token, place, kRank / kChunk, row % kChunk / 4) * 4 + row % 4] = lo;
}

}  // namespace strata::gpu
