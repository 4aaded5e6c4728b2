// The read in plain C++ from the functions of the arithmetic contract: the reference for every other path and card.
// Nothing here is tuned beyond using each weight for all tokens of a pass while it is in a cache.
#include <algorithm>

#include "common/arithmetic.hpp"
#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

Float4 load(const float* p) { return {p[0], p[1], p[2], p[3]}; }

void store(float* p, Float4 v) {
    p[0] = v.x;
    p[1] = v.y;
    p[2] = v.z;
    p[3] = v.w;
}

// The same of a stream of bf16; a store rounds. A stream of fp32 has one NaN too.
Float4 load_stream(const float* p) { return load(p); }
Float4 load_stream(const std::uint16_t* p) { return {widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
void store_stream(float* p, Float4 v) { store(p, canonical(v)); }
void store_stream(std::uint16_t* p, Float4 v) {
    p[0] = bf16_bits(v.x);
    p[1] = bf16_bits(v.y);
    p[2] = bf16_bits(v.z);
    p[3] = bf16_bits(v.w);
}

Chunk load(const std::uint16_t* p) {
    Chunk chunk;
    for (int i = 0; i < 4; ++i) {
        chunk.word[i] = static_cast<std::uint32_t>(p[2 * i]) | static_cast<std::uint32_t>(p[2 * i + 1]) << 16;
    }
    return chunk;
}

// The row at `weights` against token `t` of the group.
float row_sum(const std::uint16_t* weights, const Activations& activations, const Group& group, int t) {
    float lanes[kLanes] = {};
    for (std::int64_t chunk = 0; chunk < activations.chunks(); ++chunk) {
        const float* x = activations.at(group, chunk) + t * kChunk;
        float& sum = lanes[chunk % kLanes];
        sum = sum + chunk_dot(load(weights + chunk * kChunk), load(x), load(x + 4));
    }
    return tree_sum(lanes);
}

template <class Element>
float square_sum(const Element* stream, std::int64_t width) {
    float threads[kNormThreads] = {};
    for (std::int64_t i = 0; i < width; i += 4) {
        float& sum = threads[i / 4 % kNormThreads];
        sum = sum + square(load_stream(stream + i));
    }
    float total = 0.0f;
    for (int group = 0; group < kNormGroups; ++group) {
        float lanes[kLanes];
        std::copy_n(threads + group * kLanes, kLanes, lanes);
        total = total + tree_sum(lanes);
    }
    return total;
}

template <class Element>
void norm_of(const Pass& pass, std::int64_t begin, std::int64_t end) {
    const ReadArgs& a = pass.args;
    const std::int64_t width = a.geometry.width;
    const std::int64_t streams = a.geometry.streams;
    for (std::int64_t unit = begin; unit < end; ++unit) {
        const Group group = pass.group(unit / streams);
        const std::int64_t c = unit % streams;
        for (int t = 0; t < group.count; ++t) {
            const std::int64_t token = group.first + t;
            const std::int64_t stream_of_token = token * streams + c;
            if (pass.fold()) {
                const float gain = fold_gain(a.inject_prev[stream_of_token], streams);
                const Element* old = static_cast<const Element*>(a.residual) + stream_of_token * width;
                const Element* block_out = static_cast<const Element*>(a.block_out) + token * width;
                Element* folded = static_cast<Element*>(a.residual_out) + stream_of_token * width;
                for (std::int64_t i = 0; i < width; i += 4) {
                    store_stream(folded + i, fold(load_stream(block_out + i), gain, load_stream(old + i)));
                }
            }
            const Element* stream = pass.streams<Element>() + stream_of_token * width;
            const float rs = reciprocal_rms(square_sum(stream, width), width, a.eps);
            a.rs[stream_of_token] = canonical(rs);
            for (std::int64_t i = 0; i < width; i += 4) {
                float* xn = pass.xn.at(group, (c * width + i) / kChunk) + t * kChunk + i % kChunk;
                store(xn, normalise(load_stream(stream + i), load(a.w_norm + c * width + i), rs));
            }
        }
    }
}

void norm(const Pass& pass, std::int64_t begin, std::int64_t end) {
    if (pass.args.stream_type == StreamType::BFloat16) {
        norm_of<std::uint16_t>(pass, begin, end);
    } else {
        norm_of<float>(pass, begin, end);
    }
}

void down(const Pass& pass, std::int64_t begin, std::int64_t end) {
    const ReadArgs& a = pass.args;
    const std::int64_t depth = a.geometry.depth();
    const std::int64_t rank = a.geometry.rank;
    const std::int64_t streams = a.geometry.streams;
    for (std::int64_t row = begin * kRowsPerUnit; row < std::min(end * kRowsPerUnit, down_rows(a)); ++row) {
        const bool gate = row < rank;
        const std::uint16_t* weights = gate ? a.w_down + row * depth : a.w_inject + (row - rank) * depth;
        for (std::int64_t g = 0; g < pass.groups(); ++g) {
            const Group group = pass.group(g);
            for (int t = 0; t < group.count; ++t) {
                const std::int64_t token = group.first + t;
                const float sum = row_sum(weights, pass.xn, group, t);
                if (gate) {
                    const float lo = canonical(down_activation(sum, streams));
                    a.lo[token * rank + row] = lo;
                    pass.lo.at(group, row / kChunk)[t * kChunk + row % kChunk] = lo;
                } else {
                    a.inject[token * streams + row - rank] = canonical(sum);
                }
            }
        }
    }
}

void quantise(const float* values, std::uint8_t* out) {
    std::uint32_t amax_bits = 0;
    for (int i = 0; i < kQ8Block; ++i) amax_bits = std::max(amax_bits, magnitude_bits(values[i]));
    float lanes[kLanes];
    std::copy_n(values, kLanes, lanes);
    const std::uint16_t d = q8_scale_half(amax_bits);
    const std::uint16_t s = q8_sum_half(tree_sum(lanes), amax_bits);
    out[0] = static_cast<std::uint8_t>(d);
    out[1] = static_cast<std::uint8_t>(d >> 8);
    out[2] = static_cast<std::uint8_t>(s);
    out[3] = static_cast<std::uint8_t>(s >> 8);
    for (int i = 0; i < kQ8Block; ++i) out[4 + i] = static_cast<std::uint8_t>(q8_value(values[i], amax_bits));
}

void up_token(const Pass& pass, const Group& group, int t, std::int64_t begin, std::int64_t end) {
    const ReadArgs& a = pass.args;
    const std::int64_t width = a.geometry.width;
    const std::int64_t rank = a.geometry.rank;
    const std::int64_t streams = a.geometry.streams;
    const std::int64_t token = group.first + t;
    float* mixed = a.mixed + token * width;
    for (std::int64_t d = begin * kQ8Block; d < end * kQ8Block; ++d) {
        float mix = 0.0f;
        for (std::int64_t c = 0; c < streams; ++c) {
            const std::int64_t row = c * width + d;
            const float xn = pass.xn.at(group, row / kChunk)[t * kChunk + row % kChunk];
            const float gate = sigmoid(row_sum(a.w_up + row * rank, pass.lo, group, t));
            mix = c == 0 ? mix_first(xn, gate) : mix_next(xn, gate, mix);
        }
        mixed[d] = canonical(mix_mean(mix, streams));
    }
    if (a.q8_1 == nullptr) return;
    for (std::int64_t block = begin; block < end; ++block) {
        quantise(mixed + block * kQ8Block, a.q8_1 + (token * (width / kQ8Block) + block) * kQ8Bytes);
    }
}

void up(const Pass& pass, std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = 0; g < pass.groups(); ++g) {
        const Group group = pass.group(g);
        for (int t = 0; t < group.count; ++t) up_token(pass, group, t, begin, end);
    }
}

}  // namespace

constexpr Steps kPortable = {"portable", norm, down, up};

}  // namespace strata::cpu
