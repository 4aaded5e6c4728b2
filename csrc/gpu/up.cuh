// The up kernel at the model's geometry: gates of COLUMNS columns in all streams, their mix, and q8_1.
//
// Eight threads hold the 32 lanes of an up row (lanes j, j + 8, j + 16, j + 24 are thread j's): the first two stages of
// the tree are plain additions there. With 32 columns a block owns whole q8_1 blocks. With 16, two blocks share one:
// the second to finish, which a counter tells, quantises both halves, and the counter is zero again.
#pragma once

#include "common/launch_plan.hpp"
#include "gpu/norm.cuh"
#include "gpu/planes.cuh"
#include "gpu/quantise.cuh"

namespace strata::gpu {

inline constexpr int kUpThreads = 512;
inline constexpr int kRowThreads = 8;              // threads of an up row
inline constexpr int kRowChunks = kRank / kChunk;  // 40
inline constexpr int kRowRounds =
    kRowChunks / kRowThreads;  // chunks of a thread: its four lanes' first, then lane j's second
inline constexpr int kLoFloat4s = kRank / 4;
using LoLayout = Planes<kLoFloat4s>;

static_assert(kRowChunks == kLanes + kRowThreads, "lanes 0 to 7 take two chunks of an up row, the others one");
static_assert(kMaxTokens <= kRowThreads, "thread j of a row finishes token j");

template <int COLUMNS>
struct UpShared {
    Float4 lo[kMaxTokens * kLoFloat4s];  // a token after another, each in planes
    float gate[kMaxTokens][kStreams][COLUMNS];
    bool last;
};

// A thread's share of the sums of one up row, one for each token.
struct UpRowSums {
    float of[kMaxTokens];

    // Adds the dots of the thread's chunk `round`, whose weights are widened once for all tokens.
    __device__ __forceinline__ void add(const Chunk& weights, int round, const Float4* lo, int j, int tokens) {
        const Float4 low = widen_first(weights);
        const Float4 high = widen_second(weights);
        const int chunk = j + round * kRowThreads;
        const Float4* first = lo + LoLayout::place(2 * chunk);
        const Float4* second = lo + LoLayout::place(2 * chunk + 1);
#pragma unroll
        for (int k = 0; k < kMaxTokens; ++k) {
            if (k >= tokens) break;
            of[k] = of[k] + widened_dot(low, high, first[k * kLoFloat4s], second[k * kLoFloat4s]);
        }
    }
};

// Grid width / COLUMNS, kUpThreads threads.
template <int COLUMNS>
__global__ void __launch_bounds__(kUpThreads) gr_up_kernel(GroupArgs args) {
    constexpr int kRows = COLUMNS * kStreams;
    constexpr int kRowsAtOnce = kUpThreads / kRowThreads;
    static_assert(kRows % kRowsAtOnce == 0 && kMaxTokens * COLUMNS <= kUpThreads);
    auto& shared = block_shared<UpShared<COLUMNS>>();
    const int thread = static_cast<int>(threadIdx.x);
    const int first_column = static_cast<int>(blockIdx.x) * COLUMNS;
    const int j = thread % kRowThreads;

    Chunk weights[kRows / kRowsAtOnce][kRowRounds];
    const auto load_all_weights = [&](auto load) {
#pragma unroll
        for (int pass = 0; pass < kRows / kRowsAtOnce; ++pass) {
            const int row = pass * kRowsAtOnce + thread / kRowThreads;
            const Chunk* source = args.w_up + ((row / COLUMNS) * kWidth + first_column + row % COLUMNS) * kRowChunks;
#pragma unroll
            for (int round = 0; round < kRowRounds; ++round) {
                weights[pass][round] = load(source + j + round * kRowThreads);
            }
        }
    };
    if constexpr (kLaunchesOverlap) {
        let_next_launch_begin();
        load_all_weights([](const Chunk* address) { return load_weights_now(address); });
        wait_for_launch_before();
    }

    // Loads arrive in the order in which they are asked for: what the barrier is for comes first, then what the dots
    // need, then what the mix needs.
    constexpr int kLoRounds = (kMaxTokens * kLoFloat4s + kUpThreads - 1) / kUpThreads;
    const auto* lo = reinterpret_cast<const Float4*>(args.lo);
    Float4 my_lo[kLoRounds];
#pragma unroll
    for (int round = 0; round < kLoRounds; ++round) {
        const int i = thread + round * kUpThreads;
        if (i < args.tokens * kLoFloat4s) my_lo[round] = load_float4(lo + i);
    }
    if constexpr (!kLaunchesOverlap) {
        load_all_weights([](const Chunk* address) { return load_weights(address); });
    }

    // What this thread mixes: one column of one token, all streams.
    const int mix_token = thread / COLUMNS;
    const int mix_column = first_column + thread % COLUMNS;
    float normalised[kStreams] = {};
    if (mix_token < args.tokens) {
#pragma unroll
        for (int stream = 0; stream < kStreams; ++stream) {
            normalised[stream] = args.normalised[(mix_token * kStreams + stream) * kWidth + mix_column];
        }
    }

#pragma unroll
    for (int round = 0; round < kLoRounds; ++round) {
        const int i = thread + round * kUpThreads;
        const int f = i % kLoFloat4s;
        if (i < args.tokens * kLoFloat4s) {
            store_float4(shared.lo + i - f + LoLayout::place(f), my_lo[round]);
        }
    }
    local_barrier();

#pragma unroll
    for (int pass = 0; pass < kRows / kRowsAtOnce; ++pass) {
        // Lane j's two chunks and lane j + 16's, which is the tree's first stage (its +0 + x is x: the sum on the left
        // began with +0 and is never -0); then lane j + 8's and lane j + 24's.
        UpRowSums upper{}, lower{};
        upper.add(weights[pass][0], 0, shared.lo, j, args.tokens);
        upper.add(weights[pass][4], 4, shared.lo, j, args.tokens);
        upper.add(weights[pass][2], 2, shared.lo, j, args.tokens);
        lower.add(weights[pass][1], 1, shared.lo, j, args.tokens);
        lower.add(weights[pass][3], 3, shared.lo, j, args.tokens);
        float mine = 0.0f;
#pragma unroll
        for (int k = 0; k < kMaxTokens; ++k) {
            if (k >= args.tokens) break;
            const float sum = tree_sum<kRowThreads>(upper.of[k] + lower.of[k]);
            if (j == k) mine = sum;
        }
        const int row = pass * kRowsAtOnce + thread / kRowThreads;
        if (j < args.tokens) shared.gate[j][row / COLUMNS][row % COLUMNS] = sigmoid(mine);
    }
    local_barrier();

    if (mix_token < args.tokens) {
        const auto& gate = shared.gate[mix_token];
        float sum = mix_first(normalised[0], gate[0][thread % COLUMNS]);
#pragma unroll
        for (int stream = 1; stream < kStreams; ++stream) {
            sum = mix_next(normalised[stream], gate[stream][thread % COLUMNS], sum);
        }
        const float mixed = canonical(mix_mean(sum, kStreams));
        args.mixed[mix_token * kWidth + mix_column] = mixed;
        if constexpr (COLUMNS == kQ8Block) {
            if (args.q8_1 != nullptr) {
                store_q8_block(args, mix_token, static_cast<int>(blockIdx.x), kQ8Columns, mixed);
            }
        }
    }

    if constexpr (COLUMNS < kQ8Block) {
        constexpr unsigned kSharers = kQ8Block / COLUMNS;
        if (args.q8_1 == nullptr) return;
        const int column = static_cast<int>(blockIdx.x) / static_cast<int>(kSharers);
        fence();    // this thread's part of `mixed` before the count
        barrier();  // every thread's
        if (thread == 0) shared.last = atomic_count(args.counters + column, kSharers - 1) == kSharers - 1;
        barrier();
        if (!shared.last) return;
        fence();  // the count before the other block's part of `mixed`
        const int token = logical_group();
        if (token >= args.tokens) return;
        store_q8_block(args, token, column, kQ8Columns,
                       load_from_other_block(args.mixed + token * kWidth + column * kQ8Block + logical_lane()));
    }
}

}  // namespace strata::gpu
