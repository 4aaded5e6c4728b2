// The read at any supported geometry, taken at run time: the contract's order with nothing tuned. It serves the shapes
// that the model's kernels were not compiled for, and is a second witness at the model's own.
#pragma once

#include "gpu/down.cuh"
#include "gpu/norm.cuh"
#include "gpu/quantise.cuh"

namespace strata::gpu {

inline constexpr int kRuntimeThreads = 256;
inline constexpr int kRuntimeGroups = kRuntimeThreads / kLanes;
static_assert(kRuntimeThreads == kNormThreads && kRuntimeGroups == kNormGroups);
static_assert(kRuntimeGroups == kMaxTokens, "group k of a block mixes and quantises token k");

// Grid (tokens, streams).
template <class Four>
__global__ void __launch_bounds__(kRuntimeThreads) gr_norm_runtime_kernel(GroupArgs args) {
    auto& shared = block_shared<NormShared<1>>();
    const std::int64_t width = args.geometry.width;
    const std::int64_t streams = args.geometry.streams;
    const std::int64_t token = blockIdx.x;
    const std::int64_t stream = blockIdx.y;
    clear_counters(args, static_cast<int>(width / kQ8Block));

    const bool pending = args.block_out != nullptr;
    const float gain = pending ? fold_gain(args.inject_prev[token * streams + stream], streams) : 0.0f;
    const std::int64_t offset = (token * streams + stream) * (width / 4);
    const auto* residual = static_cast<const Four*>(args.residual) + offset;
    const auto* block_out = static_cast<const Four*>(args.block_out) + (pending ? token * (width / 4) : 0);
    const auto folded = [&](std::int64_t f) {
        Float4 value = load_stream(residual + f);
        if (pending) {
            value = fold(load_stream(block_out + f), gain, value);
            round_stream<Four>(value);
        }
        return value;
    };

    float sum = 0.0f;
    for (std::int64_t f = threadIdx.x; f < width / 4; f += kNormThreads) sum = sum + square(folded(f));
    sum = tree_sum(sum);
    if (logical_lane() == 0) shared.partial[0][logical_group()] = sum;
    local_barrier();

    const float rs = reciprocal_rms(ordered_sum(shared.partial[0]), width, args.eps);
    if (threadIdx.x == 0) args.rs[token * streams + stream] = canonical(rs);
    const auto* w_norm = reinterpret_cast<const Float4*>(args.w_norm) + stream * (width / 4);
    auto* normalised = reinterpret_cast<Float4*>(args.normalised) + offset;
    auto* residual_out = static_cast<Four*>(args.residual_out) + (pending ? offset : 0);
    for (std::int64_t f = threadIdx.x; f < width / 4; f += kNormThreads) {
        Float4 value = folded(f);
        if (pending)
            residual_out[f] = round_stream<Four>(value);  // may be `residual` itself: this thread alone reads f
        normalised[f] = normalise(value, w_norm[f], rs);
    }
}

// Adds this lane's chunks of a row, in ascending order, to its sum for each token. The activations of a token lie
// behind those of the one before.
__device__ __forceinline__ void add_row(float (&sums)[kMaxTokens], const Chunk* weights, const Float4* activations,
                                        std::int64_t row_chunks, int tokens) {
    for (std::int64_t chunk = logical_lane(); chunk < row_chunks; chunk += kLanes) {
        const Chunk weight = load_weights(weights + chunk);
#pragma unroll
        for (int k = 0; k < kMaxTokens; ++k) {
            if (k >= tokens) continue;
            const Float4* at = activations + (k * row_chunks + chunk) * 2;
            sums[k] = sums[k] + chunk_dot(weight, at[0], at[1]);
        }
    }
}

// Grid ceil(rows / kRuntimeGroups) over the rank rows and then, where asked for, the inject rows.
__global__ void __launch_bounds__(kRuntimeThreads) gr_down_runtime_kernel(GroupArgs args) {
    const std::int64_t row_chunks = args.geometry.depth() / kChunk;
    const std::int64_t rank = args.geometry.rank;
    const std::int64_t rows = rank + (args.w_inject != nullptr ? args.geometry.streams : 0);
    const std::int64_t row = std::int64_t{blockIdx.x} * kRuntimeGroups + logical_group();
    if (row >= rows) return;  // a whole group, and no barrier follows
    const bool inject = row >= rank;
    const Chunk* weights = inject ? args.w_inject + (row - rank) * row_chunks : args.w_down + row * row_chunks;
    float sums[kMaxTokens] = {};
    add_row(sums, weights, reinterpret_cast<const Float4*>(args.normalised), row_chunks, args.tokens);
    store_row(args, sums, static_cast<int>(inject ? row - rank : row), inject, static_cast<int>(args.geometry.streams),
              static_cast<int>(rank));
}

struct UpRuntimeShared {
    float gate[kMaxStreams][kMaxTokens][kQ8Block];
};

// Grid width / 32: a block has 32 columns of all streams.
__global__ void __launch_bounds__(kRuntimeThreads) gr_up_runtime_kernel(GroupArgs args) {
    auto& shared = block_shared<UpRuntimeShared>();
    const std::int64_t width = args.geometry.width;
    const int streams = static_cast<int>(args.geometry.streams);
    const std::int64_t row_chunks = args.geometry.rank / kChunk;
    const std::int64_t first_column = std::int64_t{blockIdx.x} * kQ8Block;
    const auto* lo = reinterpret_cast<const Float4*>(args.lo);

    for (int row = logical_group(); row < streams * kQ8Block; row += kRuntimeGroups) {
        const int stream = row / kQ8Block;
        const int column = row % kQ8Block;
        const Chunk* weights = args.w_up + (stream * width + first_column + column) * row_chunks;
        float sums[kMaxTokens] = {};
        add_row(sums, weights, lo, row_chunks, args.tokens);
        float mine = 0.0f;
#pragma unroll
        for (int k = 0; k < kMaxTokens; ++k) {
            const float sum = tree_sum(sums[k]);
            if (logical_lane() == k) mine = sum;
        }
        if (logical_lane() < args.tokens) shared.gate[stream][logical_lane()][column] = sigmoid(mine);
    }
    local_barrier();

    const int token = logical_group();
    const int column = logical_lane();
    if (token >= args.tokens) return;
    const float* normalised = args.normalised + token * streams * width + first_column + column;
    float sum = mix_first(normalised[0], shared.gate[0][token][column]);
    for (int stream = 1; stream < streams; ++stream) {
        sum = mix_next(normalised[stream * width], shared.gate[stream][token][column], sum);
    }
    const float mixed = canonical(mix_mean(sum, streams));
    args.mixed[token * width + first_column + column] = mixed;
    if (args.q8_1 != nullptr) {
        store_q8_block(args, token, static_cast<int>(blockIdx.x), static_cast<int>(width / kQ8Block), mixed);
    }
}

}  // namespace strata::gpu
