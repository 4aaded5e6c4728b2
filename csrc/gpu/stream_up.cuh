// The stream variant's up kernel: lo out of the down kernel's sums, the gates of twenty columns in all streams, their
// mix, and q8_1.
//
// Four threads hold the 32 lanes of an up row (lanes j, j + 4, ... are thread j's): the first three stages of the tree
// are plain additions there. A q8_1 block has columns of two or three blocks: the last of them to finish quantises it.
#pragma once

#include "gpu/stream.cuh"

namespace strata::gpu {

template <int kTokens>
struct StreamUpShared {
    using Dots = typename StreamInstance<kTokens>::Dots;
    static constexpr int kStride = stream_up_stride(kTokens);
    Dots dots[StreamInstance<kTokens>::kPasses][kStreamUpRows * kStride];
    Float4 lo[kTokens][kRank / 4];  // first halves of chunks, then second halves
    float gate[kTokens][kStreamUpRows];
    float value[kTokens][kStreamUpRows];

    // Where the dot of `chunk` of an up row is. Rows without padding exchange fours with their neighbours, so that the
    // threads of two rows do not meet in a bank.
    static constexpr __device__ int place(int row, int chunk) {
        return row * kStride + (sizeof(Dots) == sizeof(Chunk) ? chunk ^ row % 2 * 4 : chunk);
    }
};

static_assert(sizeof(StreamUpShared<1>) == stream_up_bytes(1) && sizeof(StreamUpShared<2>) == stream_up_bytes(2) &&
              sizeof(StreamUpShared<4>) == stream_up_bytes(4) && sizeof(StreamUpShared<8>) == stream_up_bytes(8));

// The eight sums of a down row that the down kernel has left, and the rest of their tree: stages 4, 2 and 1.
struct RowSums {
    Float4 low, high;

    __device__ __forceinline__ void load(const GroupArgs& args, int token, int row) {
        const auto* sums = reinterpret_cast<const Float4*>(args.row_sums) + token * 2 * kRowsAndInject + row;
        low = load_float4(sums);
        high = load_float4(sums + kRowsAndInject);
    }
    __device__ __forceinline__ float tree() const {
        return ((low.x + high.x) + (low.z + high.z)) + ((low.y + high.y) + (low.w + high.w));
    }
};

// Grid kStreamUpBlocks, kStreamThreads threads.
template <int kTokens>
__global__ void __launch_bounds__(kStreamThreads, 2) gr_stream_up_kernel(GroupArgs args) {
    using Instance = StreamInstance<kTokens>;
    using Shared = StreamUpShared<kTokens>;
    using Dots = typename Instance::Dots;
    constexpr int kPass = Instance::kPass;
    constexpr int kSlots = kStreamThreads / kStreamUpRowChunks;  // rows that the block's threads have at once
    static_assert(kStreamUpRows == kSlots * kStreamRows);

    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const int thread = static_cast<int>(threadIdx.x);
    const int first_column = static_cast<int>(blockIdx.x) * kStreamColumns;
    const int tokens = kTokens <= 2 ? kTokens : args.tokens;
    const int chunk = thread % kStreamUpRowChunks;
    const int slot = thread / kStreamUpRowChunks;
    const auto column_of = [&](int row) { return row / kStreamColumns * kWidth + first_column + row % kStreamColumns; };

    auto* const last_pass = reinterpret_cast<Chunk*>(shared.dots[Instance::kPasses - 1]);
    StreamWeights<Instance::kInRegisters> weights(kStreamRows, last_pass + Shared::place(slot, chunk), [&](int round) {
        return args.w_up + column_of(slot + round * kSlots) * kStreamUpRowChunks + chunk;
    });
    let_next_launch_begin();
    wait_for_launch_before();

    // All loads are asked for before anything waits for one: compilers do not move them over the branch of a division.
    RowSums sums_of[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        if (token < tokens) sums_of[token].load(args, token, thread);
    }
    constexpr int kValues = (kTokens * kStreamUpRows + kStreamThreads - 1) / kStreamThreads;
    float values[kValues] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int token = (thread + i * kStreamThreads) / kStreamUpRows;
        const int d = column_of((thread + i * kStreamThreads) % kStreamUpRows);
        if (token < tokens) values[i] = args.normalised[ByQuarters::place(token, d / 4) * 4 + d % 4];
    }
    float lo[kTokens], denominator[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {  // the dots of missing tokens are thrown away
        lo[token] = token < tokens ? down_sum_mean(sums_of[token].tree(), kStreams) : 0.0f;
        denominator[token] = sigmoid_denominator(lo[token]);
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        lo[token] = canonical(lo[token] / denominator[token]);
        const int half = thread % kChunk / 4;
        auto* place = reinterpret_cast<float*>(shared.lo[token] + half * kStreamUpRowChunks + thread / kChunk);
        place[thread % 4] = lo[token];
        if (token < tokens && blockIdx.x == 0) args.lo[token * kRank + thread] = lo[token];
    }
    if (blockIdx.x == 1 && args.w_inject != nullptr && thread < tokens * kStreams) {
        RowSums inject;
        inject.load(args, thread / kStreams, kRank + thread % kStreams);
        args.inject[thread] = canonical(inject.tree());
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int place = thread + i * kStreamThreads;
        if (place < tokens * kStreamUpRows) (&shared.value[0][0])[place] = values[i];
    }
    weights.arrive();
    local_barrier();

#pragma unroll
    for (int pass = 0; pass < Instance::kPasses; ++pass) {
        Float4 first[kPass], second[kPass];
#pragma unroll
        for (int k = 0; k < kPass; ++k) {
            first[k] = load_float4(shared.lo[pass * kPass + k] + chunk);
            second[k] = load_float4(shared.lo[pass * kPass + k] + kStreamUpRowChunks + chunk);
        }
#pragma unroll
        for (int round = 0; round < kStreamRows; ++round) {
            shared.dots[pass][Shared::place(slot + round * kSlots, chunk)] =
                Instance::chunk_dots(weights[round], first, second);
        }
    }
    local_barrier();

    constexpr int kRowThreads = 4;
    const int j = thread % kRowThreads;
    const int row = thread / kRowThreads;
    float sums[kTokens];
#pragma unroll
    for (int pass = 0; pass < Instance::kPasses; ++pass) {
        constexpr int kRounds = kStreamUpRowChunks / kRowThreads;
        Dots dots[kRounds];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            dots[round] = shared.dots[pass][Shared::place(row, round * kRowThreads) + j];
        }
#pragma unroll
        for (int k = 0; k < kPass; ++k) {
            float lane[kLanes / kRowThreads];  // lane[i] is lane j + 4 i; lanes 0 to 7 have a second chunk
#pragma unroll
            for (int i = 0; i < kLanes / kRowThreads; ++i) lane[i] = 0.0f + dots[i].of[k];
            lane[0] = lane[0] + dots[kRounds - 2].of[k];
            lane[1] = lane[1] + dots[kRounds - 1].of[k];
            sums[pass * kPass + k] =
                ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
        }
    }
    tree_sums<kRowThreads>(sums, j);
    const int token = j * kTokens / kRowThreads;
    const bool keeps = kTokens >= kRowThreads || j % (kRowThreads / kTokens) == 0;  // else a neighbour has the same
    constexpr int kLeft = kTokens > kRowThreads ? kTokens / kRowThreads : 1;
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
        const float gate = sigmoid(sums[k]);
        if (keeps && token + k < tokens) shared.gate[token + k][row] = gate;
    }
    local_barrier();

    if (thread < tokens * kStreamColumns) {
        const int mix_token = thread / kStreamColumns;
        const int column = thread % kStreamColumns;
        float sum = mix_first(shared.value[mix_token][column], shared.gate[mix_token][column]);
#pragma unroll
        for (int stream = 1; stream < kStreams; ++stream) {
            const int i = stream * kStreamColumns + column;
            sum = mix_next(shared.value[mix_token][i], shared.gate[mix_token][i], sum);
        }
        args.mixed[mix_token * kWidth + first_column + column] = canonical(mix_mean(sum, kStreams));
    }
    if (args.q8_1 != nullptr) quantise_shared_columns(args, block_shared<unsigned[2]>());
}

}  // namespace strata::gpu
