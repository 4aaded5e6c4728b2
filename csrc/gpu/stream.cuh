// The stream variant: what its kernels share. The read is bound by the latency of short launches, so the work of each
// is spread over the whole card and its weights are on their way before the launch ahead of it has ended. On cards with
// clusters it takes two launches (cluster_down.cuh, cluster_up.cuh), on others three:
//
//     norm   gr_norm_kernel<1, ..., ByQuarters>: waits for all that ran before, writes the activations by quarters; its
//            spare blocks have asked for w_down into the second-level cache meanwhile
//     down   128 + 4 blocks: a quarter of the lanes of ten rows each; the tree's first two stages
//     up     128 blocks of 20 columns: the tree's last three stages, silu, gates, mix, q8_1
//
// A quarter `q` has the lanes 2q and 2q + 1 of every eight. Lanes that differ by 16 or 8 are in one quarter, so a block
// can begin the tree; two neighbours are one sector of memory.
#pragma once

#include "common/launch_plan.hpp"
#include "gpu/norm.cuh"
#include "gpu/quantise.cuh"

namespace strata::gpu {

inline constexpr int kRowsAndInject = kRank + kStreams;

// The chunk of a row that thread `thread` of quarter `quarter` has: its lanes in ascending order, round after round.
__device__ __forceinline__ int quarter_chunk(int thread, int quarter) {
    const int lane = thread % kQuarterLanes / 2 * kRowSums + quarter * 2 + thread % 2;
    return thread / kQuarterLanes * kLanes + lane;
}

// The normalised activations by quarters: the first halves of a quarter's chunks, then the second halves, so that
// neighbouring threads read neighbouring float4s.
struct ByQuarters {
    static constexpr bool kSpareBlocks = true;

    static __device__ int place(int token, int f) {
        const int chunk = f / 2;
        const int lane = chunk % kLanes;
        const int quarter = lane % kRowSums / 2;
        const int thread = chunk / kLanes * kQuarterLanes + lane / kRowSums * 2 + lane % 2;
        return token * (kDepth / 4) + (quarter * 2 + f % 2) * kQuarterChunks + thread;
    }

    // Asks for w_down, in pieces with pauses: all at once keeps the activations of the read ahead waiting (at T = 1 for
    // 0.8 us on an H200).
    static constexpr int kAskingBlocks = kStreamUpBlocks;
    static __device__ void spare_block(const GroupArgs& args, int token, int first_stream) {
        const int block = (token - args.tokens) * kStreams + first_stream;
        constexpr int kBytes = kRank * kDepth / kChunk * static_cast<int>(sizeof(Chunk)) / kAskingBlocks;
        constexpr int kPieces = 5;
        static_assert(kBytes % (kPieces * kAlignment) == 0);
        if (threadIdx.x != 0) return;
        const auto* mine = reinterpret_cast<const char*>(args.w_down) + std::int64_t{block} * kBytes;
        for (int piece = 0; piece < kPieces; ++piece) {
            prefetch(mine + piece * (kBytes / kPieces), kBytes / kPieces);
            pause(150);
        }
    }
};

// The dots of one chunk, or their sums, for the tokens of a pass.
template <int kCount>
struct alignas(kCount * sizeof(float)) PerToken {
    float of[kCount];
};

// An instance for up to kTokens tokens. Its threads keep their weights in registers; for eight tokens there are too
// few, and the weights wait in shared memory, where the last pass's dots then take their place.
template <int kTokens>
struct StreamInstance {
    static constexpr int kPass = stream_pass(kTokens);
    static constexpr int kPasses = kTokens / kPass;
    static constexpr bool kInRegisters = kPasses == 1;
    using Dots = PerToken<kPass>;
    static constexpr int kDownStride = stream_down_stride(kTokens);
    static_assert(sizeof(Dots) * kPasses * kStreamRows * kDownStride == stream_down_bytes(kTokens));
    static_assert(kInRegisters || sizeof(Dots) == sizeof(Chunk));

    static __device__ Dots chunk_dots(const Chunk& weights, const Float4 (&first)[kPass],
                                      const Float4 (&second)[kPass]) {
        Dots dots;
#pragma unroll
        for (int k = 0; k < kPass; ++k) dots.of[k] = chunk_dot(weights, first[k], second[k]);
        return dots;
    }
};

// A thread's weights, a chunk of each of up to kStreamRows rows, asked for by the constructor: `source(row)` is where
// the chunk is, `shared` where this thread's first one may wait, the others kStreamThreads apart behind it.
template <bool kInRegisters>
struct StreamWeights;

template <>
struct StreamWeights<true> {
    Chunk chunks[kStreamRows];

    template <class Source>
    __device__ __forceinline__ StreamWeights(int rows, Chunk*, Source source) {
#pragma unroll
        for (int row = 0; row < kStreamRows; ++row) {
            if (row < rows) chunks[row] = load_weights_now(source(row));
        }
    }
    __device__ __forceinline__ void arrive() const {}
    __device__ __forceinline__ const Chunk& operator[](int row) const { return chunks[row]; }
};

template <>
struct StreamWeights<false> {
    Chunk* place;

    template <class Source>
    __device__ __forceinline__ StreamWeights(int rows, Chunk* shared, Source source) : place(shared) {
#pragma unroll
        for (int row = 0; row < kStreamRows; ++row) {
            if (row >= rows) continue;
            copy_async(reinterpret_cast<Float4*>(place + row * kStreamThreads),
                       reinterpret_cast<const Float4*>(source(row)));
        }
        copy_async_commit();
    }
    // Each thread reads what it has copied itself.
    __device__ __forceinline__ void arrive() const { copy_async_wait<0>(); }
    __device__ __forceinline__ const Chunk& operator[](int row) const { return place[row * kStreamThreads]; }
};

// The q8_1 blocks that this block has columns of, once all of their columns are there.
__device__ __forceinline__ void quantise_shared_columns(const GroupArgs& args, unsigned (&last)[2]) {
    const int group = logical_group();
    const int first = static_cast<int>(blockIdx.x) * kStreamColumns / kQ8Block;
    const int count = ((static_cast<int>(blockIdx.x) + 1) * kStreamColumns - 1) / kQ8Block - first + 1;
    fence();    // this thread's part of `mixed` before the count
    barrier();  // every thread's
    if (group < count && logical_lane() == 0) {
        const int column = first + group;
        const int sharers = ((column + 1) * kQ8Block - 1) / kStreamColumns - column * kQ8Block / kStreamColumns + 1;
        const auto last_count = static_cast<unsigned>(sharers - 1);
        last[group] = atomic_count(args.counters + column, last_count) == last_count ? 1 : 0;
    }
    barrier();
    for (int i = 0; i < count; ++i) {  // group `group` makes the block of token `group`
        if (last[i] == 0 || group >= args.tokens) continue;
        fence();  // the count before the other blocks' part of `mixed`
        store_q8_block(args, group, first + i, kQ8Columns,
                       load_from_other_block(args.mixed + group * kWidth + (first + i) * kQ8Block + logical_lane()));
    }
}

}  // namespace strata::gpu
