// The tiled up kernel: gates of kTiledColumns columns in all streams, for a tile of tokens, and their mix; and q8_1 of
// what it wrote.
//
// An up row's 40 chunks are taken in eight sets of five. Set m has the lanes m, m + 16, m + 8 and m + 24, whose first
// tree stages are then additions of one thread; lane m's two chunks and lane m + 16's one are one chain, since a sum
// that began with +0 is never -0 and +0 + x on its right is x. One half of the threads has the even sets, in the order
// 0, 4, 2, 6, the other half the odd ones: of what is left of the tree, two sums are kept and one is exchanged.
#pragma once

#include "gpu/quantise.cuh"
#include "gpu/tiled_down.cuh"

namespace strata::gpu {

inline constexpr int kTiledUpHalf = kTiledUpThreads / 2;
inline constexpr int kTiledUpTokenGroups = kTiledUpHalf / kTiledColumns;
inline constexpr int kTiledUpThreadTokens = kTiledTokens / kTiledUpTokenGroups;
inline constexpr int kTiledUpSets = 4;   // of either half
inline constexpr int kTiledUpApart = 8;  // chunks of a set in their row
inline constexpr int kTiledUpAhead = 3;  // chunks that are under way
static_assert(kRank / kChunk == kTiledUpApart * kTiledUpChunks && kTiledUpAhead < kTiledUpChunks);
static_assert(kRank / kChunk == kLanes + kTiledUpApart && kTiledUpSets * 2 == kTiledUpApart);

using TiledUpStep = TiledStep<2, 1, kTiledColumns * kStreams>;
using TiledUpSums = float[kStreams][kTiledUpThreadTokens];

struct TiledUpShared {
    TiledUpStep steps[kTiledUpChunks];
    // Of one set and of two, a thread's own; then what the halves exchange.
    float kept[2][kStreams][kTiledUpThreadTokens][kTiledUpThreads];
};
static_assert(sizeof(TiledUpShared) == kTiledUpBytes);

template <class Body>
__device__ __forceinline__ void for_all_sums(Body body) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
        for (int k = 0; k < kTiledUpThreadTokens; ++k) body(stream, k);
    }
}

// Grid (kWidth / kTiledColumns, tiles of tokens), kTiledUpThreads threads.
__global__ void __launch_bounds__(kTiledUpThreads, resident_blocks(3)) gr_tiled_up_kernel(GroupArgs args) {
    constexpr int kRowChunks = kRank / kChunk;
    auto& shared = *reinterpret_cast<TiledUpShared*>(dynamic_shared());

    const int thread = static_cast<int>(threadIdx.x);
    const int first_column = static_cast<int>(blockIdx.x) * kTiledColumns;
    const int first_token = static_cast<int>(blockIdx.y) * kTiledTokens;
    const int half = thread / kTiledUpHalf;
    // Eight neighbours have neighbouring columns, which is as much as shared memory gives at once.
    const int column = thread % 8 + thread % kTiledUpHalf / (8 * kTiledUpTokenGroups) * 8;
    const int token_group = thread / 8 % kTiledUpTokenGroups;

    static_assert(kCopiedRows<kTiledUpThreads, 2, kTiledColumns * kStreams> == 1);
    const int row = copied_row<kTiledUpThreads, 2>(0);
    const Chunk* const weights =
        args.w_up + (row / kTiledColumns * kWidth + first_column + row % kTiledColumns) * kRowChunks + thread % 2;
    const Float4* const activations =
        reinterpret_cast<const Float4*>(args.tiled_lo) + std::int64_t{first_token} * (kRank / 4);
    // Asks for turn `turn` of a set, counted on into the next set.
    const auto ask = [&](int set, int turn) {
        if (turn >= kTiledUpChunks) {
            turn -= kTiledUpChunks;
            ++set;
        }
        if (set == kTiledUpSets) return copy_async_commit();
        // Lane m's two chunks and lane m + 16's, then lane m + 8's and lane m + 24's: 0, 4, 2, 1, 3 times eight.
        const int of_set = 0x31240 >> 4 * turn & 7;
        const int chunk = (set & 1) * 4 + (set & 2) + of_set * kTiledUpApart;
        ask_for_step<kTiledUpThreads>(
            shared.steps[turn], [&](int, int) { return weights + chunk; }, activations + chunk * kTiledTokens * 2);
    };
#pragma unroll
    for (int turn = 0; turn < kTiledUpAhead; ++turn) ask(0, turn);

    TiledUpSums sums, chain;
    const auto sum_turns = [&](int set, int begin, int end) {
        for_all_sums([&](int s, int k) { sums[s][k] = 0.0f; });
#pragma unroll 1
        for (int turn = begin; turn < end; ++turn) {
            copy_async_wait<kTiledUpAhead - 1>();
            local_barrier();
            ask(set, turn + kTiledUpAhead);
            const TiledUpStep& here = shared.steps[turn];
            add_chunk_dots<kTiledColumns>(sums, here.weights[0][half] + column,
                                          TiledTokens<kTiledUpTokenGroups>(here.activations[0][half], token_group));
        }
    };
    auto& one = shared.kept[0];
    auto& two = shared.kept[1];
#pragma unroll 1
    for (int set = 0; set < kTiledUpSets; ++set) {
        sum_turns(set, 0, 3);
        for_all_sums([&](int s, int k) { chain[s][k] = sums[s][k]; });
        sum_turns(set, 3, kTiledUpChunks);
        for_all_sums([&](int s, int k) { sums[s][k] = chain[s][k] + sums[s][k]; });
        if (set % 2 == 0) {
            for_all_sums([&](int s, int k) { one[s][k][thread] = sums[s][k]; });
            continue;
        }
        for_all_sums([&](int s, int k) { sums[s][k] = one[s][k][thread] + sums[s][k]; });
        if (set == 1) for_all_sums([&](int s, int k) { two[s][k][thread] = sums[s][k]; });
    }
    for_all_sums([&](int s, int k) { sums[s][k] = two[s][k][thread] + sums[s][k]; });

    // The tree's last stage: either half finishes half of the tokens.
    constexpr int kMine = kTiledUpThreadTokens / 2;
    float values[kMine][kStreams];
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
        const int token = first_token + token_group + (half * kMine + k) * kTiledUpTokenGroups;
#pragma unroll
        for (int stream = 0; stream < kStreams; ++stream) {
            const int d = stream * kWidth + first_column + column;
            values[k][stream] = args.normalised[ByTiledLanes::place(token, d / 4) * 4 + d % 4];
        }
    }
    for_all_sums([&](int s, int k) {  // into this thread's own place, which nobody else has read
        if (k < kMine) one[s][k][thread] = half == 0 ? sums[s][k + kMine] : sums[s][k];
    });
    local_barrier();
    // All denominators before the first division, whose branch nothing is moved over.
    float gates[kMine][kStreams];
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
#pragma unroll
        for (int stream = 0; stream < kStreams; ++stream) {
            const float mine = half == 0 ? sums[stream][k] : sums[stream][k + kMine];
            gates[k][stream] = sigmoid_denominator(mine + one[stream][k][thread ^ kTiledUpHalf]);
        }
    }
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
        const int token = first_token + token_group + (half * kMine + k) * kTiledUpTokenGroups;
        float mix = mix_first(values[k][0], 1.0f / gates[k][0]);
#pragma unroll
        for (int stream = 1; stream < kStreams; ++stream)
            mix = mix_next(values[k][stream], 1.0f / gates[k][stream], mix);
        if (token >= args.tokens) continue;
        args.mixed[std::int64_t{token} * kWidth + first_column + column] = canonical(mix_mean(mix, kStreams));
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
