// The tiled kernels: reads of many tokens, whose weights are loaded once for a tile of tokens instead of once for every
// kMaxTokens. The work is that of a matrix product and is cut like one: a block has a tile of rows and a tile of
// tokens, a thread several rows times several tokens, and the next operands come to shared memory meanwhile.
//
//     norm      gr_norm_kernel<1, ..., ByTiledLanes>: the activations in the order in which down takes them
//     down      rows of four lanes: their chains and the tree's first stage
//     finish    the tree's other stages, silu, inject
//     up        columns in all streams: gates and mix
//     quantise  q8_1, where it was asked for
//
// Activations are in tiles of kTiledTokens tokens: in a tile chunk after chunk in the order in which they are taken, of
// a chunk all tokens, of a token both halves. So what a block takes at once is one piece of memory. The last tile's
// missing tokens are zeros.
#pragma once

#include "common/launch_plan.hpp"
#include "gpu/norm.cuh"

namespace strata::gpu {

// The float4 of a half of chunk `chunk` of `chunks`.
__device__ __forceinline__ std::int64_t tiled_place(int token, int chunk, int chunks, int half) {
    const std::int64_t tile = token / kTiledTokens;
    return ((tile * chunks + chunk) * kTiledTokens + token % kTiledTokens) * 2 + half;
}

// A copy_async() from when it is asked for until it is there, for which copy_async_commit() and _wait() are the
// thread's to say. Where there are no copies in the background a register holds the bytes meanwhile: land() puts them
// into shared memory, take() gives them to the thread that has asked.
struct CopyUnderWay {
    Float4 held{};

    __device__ __forceinline__ void ask(Float4* shared, const Float4* global) {
        if (copies_in_background()) {
            copy_async(shared, global);
        } else {
            held = load_float4(global);
        }
    }
    __device__ __forceinline__ void land(Float4* shared) const {
        if (!copies_in_background()) store_float4(shared, held);
    }
    __device__ __forceinline__ Chunk take(const Chunk* shared) const {
        return copies_in_background() ? *shared : as_chunk(held);
    }
};

// How many steps ahead a kernel asks. Registers hold what is asked for one step ahead.
template <int kAhead>
__device__ __forceinline__ constexpr int asked_ahead() {
    return copies_in_background() ? kAhead : 1;
}

// What is multiplied: for each group of the block's threads, in each step kChunks chunks of kRows rows and of the
// tile's tokens. The weights are fp32 here, once for all threads that multiply by them: first halves of chunks, then
// second ones.
template <int kGroups, int kChunks, int kRows, int kAhead>
struct TiledSteps {
    // Neighbouring threads write what a row has for all groups: the padding keeps these out of one bank.
    static constexpr int kPlane = kRows + tiled_padding(kGroups);
    struct Weights {
        Float4 of[kChunks][2][kGroups][kPlane];
    } weights[2];
    struct Activations {
        Float4 of[kChunks][kGroups][kTiledTokens * 2];
    } activations[kAhead + 1];
    // Weights on their way: a thread widens what it has asked for itself.
    Chunk asked[tiled_asked_places(kAhead)][kChunks][kRows * kGroups];

    static constexpr int kSecondHalf = kGroups * kPlane;  // float4s from a first half to its second
    static constexpr int kChunkWeights = 2 * kSecondHalf;
    static constexpr int kChunkActivations = kGroups * kTiledTokens * 2;
    static constexpr int kStepWeights = kChunks * kChunkWeights;
    static constexpr int kStepActivations = kChunks * kChunkActivations;

    __device__ __forceinline__ void set_weights(int step, int c, int group, int row, Chunk chunk) {
        weights[step % 2].of[c][0][group][row] = widen_first(chunk);
        weights[step % 2].of[c][1][group][row] = widen_second(chunk);
    }
};

// Neighbouring lanes of a warp have neighbouring rows and tokens in turn: bit 0 and bits from 2 on are a row's, bit 1
// and what is left a token's. A load of 16 bytes is done in half the time where lanes that differ in bit 0 read the
// same ones, or those that differ in bit 1; so both rows' and tokens' are.
template <int kRowGroups, int kTokenGroups>
struct TiledThread {
    int row, token;

    __device__ __forceinline__ explicit TiledThread(int thread)
        : row(thread % 2 + thread / 4 % (kRowGroups / 2) * 2),
          token(thread / 2 % 2 + thread / (2 * kRowGroups) % (kTokenGroups / 2) * 2) {}
};

// Adds the dots of one chunk to the sums of kRows rows and kTokens tokens, kRowStep and kTokenStep apart, or begins the
// sums with them.
template <class Steps, int kRowStep, int kTokenStep, int kRows, int kTokens>
__device__ __forceinline__ void add_chunk_dots(float (&sums)[kRows][kTokens], bool begin, const Float4* weights,
                                               const Float4* activations) {
    Float4 first[kTokens], second[kTokens];
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
        first[k] = load_float4(activations + k * kTokenStep * 2);
        second[k] = load_float4(activations + k * kTokenStep * 2 + 1);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Float4 low = load_float4(weights + r * kRowStep);
        const Float4 high = load_float4(weights + r * kRowStep + Steps::kSecondHalf);
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            const float dot = widened_dot(low, high, first[k], second[k]);
            sums[r][k] = begin ? dot : sums[r][k] + dot;
            settle(sums[r][k]);
        }
    }
}

// The order in which the up kernel takes the chunks of its rows, of either half of its threads one a turn. A row's 40
// chunks are eight sets of kTiledUpTurns: set m has the lanes m, m + 16, m + 8 and m + 24, lane m two chunks. The first
// half takes the even sets, in the order 0, 4, 2, 6, the second half the odd ones.
inline constexpr int kTiledUpApart = 8;  // chunks of a set in their row
inline constexpr int kTiledUpSets = 4;   // of either half
inline constexpr int kTiledUpTurns = kRank / kChunk / kTiledUpApart;
static_assert(kRank / kChunk == kLanes + kTiledUpApart && kTiledUpSets * 2 == kTiledUpApart && kTiledUpTurns == 5);

// The first half's chunk; the second half's is the next one.
STRATA_HOST_DEVICE constexpr int tiled_up_chunk(int set, int turn) {
    const int apart = 0x31240 >> 4 * turn & 7;  // lane m's two chunks and lane m + 16's, then m + 8's and m + 24's
    return (set & 1) * 4 + (set & 2) + apart * kTiledUpApart;
}
// Where a chunk is in that order, the halves' next to each other.
STRATA_HOST_DEVICE constexpr int tiled_up_place(int chunk) {
    const int set = (chunk & 2) + (chunk >> 2 & 1);
    const int turn = 0x14230 >> 4 * (chunk / kTiledUpApart) & 7;
    return (set * kTiledUpTurns + turn) * 2 + chunk % 2;
}
constexpr bool tiled_up_order_is_one() {
    for (int i = 0; i < kTiledUpSets * kTiledUpTurns; ++i) {
        const int chunk = tiled_up_chunk(i / kTiledUpTurns, i % kTiledUpTurns);
        if (tiled_up_place(chunk) != 2 * i || tiled_up_place(chunk + 1) != 2 * i + 1) return false;
    }
    return true;
}
static_assert(tiled_up_order_is_one());

}  // namespace strata::gpu
