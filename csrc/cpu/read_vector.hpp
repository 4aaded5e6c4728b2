// The read over vectors of V::kWidth floats, for the files that are compiled for a larger instruction set.
//
// An element of a vector is a row of weights: a transpose in registers brings the same two weights of kWidth rows into
// one vector, and an activation is broadcast to them all. So the chains, lanes and trees of the contract are plain
// vector operations, and any number of chunks will do. (With the contract's lanes as elements instead, ragged rows need
// masks, the trees need shuffles, and each pair of rows reads all activations again: at 8 tokens it took twice as
// long.)
//
// All that is done to one value at a time (exp, the fold, the mix, q8_1) is the contract's scalar code in loops of a
// fixed length, which compilers vectorise (GCC only with -fno-trapping-math, which changes no value).
//
// A function that the linker may share with other files must not be compiled for this instruction set, or machines
// without it would run it. So everything here has internal linkage, and inline functions of other headers must end up
// inlined: a test looks for symbols in these objects.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/arithmetic.hpp"
#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

// Rows of weights for one vector, in quads of rows `stride` apart: row 4 * q + i is at(q, i).
template <int kWidth>
struct RowsOf {
    const std::uint16_t* quad[kWidth / 4];
    std::int64_t stride;
    const std::uint16_t* at(int q, int i) const { return quad[q] + i * stride; }
};

template <class V>
struct VectorRead {
    using Floats = typename V::Floats;
    using Words = typename V::Words;
    static constexpr int kWidth = V::kWidth;
    static_assert(kQ8Block % kWidth == 0);

    // -----------------------------------------------------------------------------------------------------------
    // Norm

    // An element of a stream as a value, and R' as the stream holds it.
    static float value_of(float element) { return element; }
    static float value_of(std::uint16_t element) { return widen(element); }
    static void round_to(float* element, float value) { *element = canonical(value); }
    static void round_to(std::uint16_t* element, float value) { *element = bf16_bits(value); }

    template <class Element>
    static float square_sum(const Element* stream, std::int64_t width) {
        float threads[kNormThreads] = {};
        for (std::int64_t i = 0; i < width; i += 4 * kNormThreads) {
            const std::int64_t rest = (width - i) / 4;
            const std::int64_t count = rest < kNormThreads ? rest : kNormThreads;
            for (std::int64_t t = 0; t < count; ++t) {
                const Element* f = stream + i + 4 * t;
                threads[t] = threads[t] + square({value_of(f[0]), value_of(f[1]), value_of(f[2]), value_of(f[3])});
            }
        }
        float total = 0.0f;
        for (int group = 0; group < kNormGroups; ++group) {
            float lanes[kLanes];
            std::memcpy(lanes, threads + group * kLanes, sizeof lanes);
            total = total + tree_sum(lanes);
        }
        return total;
    }

    template <class Element>
    static void fold_stream(const Pass& pass, std::int64_t unit) {
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        const float gain = fold_gain(a.inject_prev[unit], a.geometry.streams);
        const Element* block_out = static_cast<const Element*>(a.block_out) + unit / a.geometry.streams * width;
        const Element* residual = static_cast<const Element*>(a.residual) + unit * width;
        Element* residual_out = static_cast<Element*>(a.residual_out) + unit * width;
        for (std::int64_t i = 0; i < width; i += kWidthMultiple) {
            Element out[kWidthMultiple];  // in place, the compiler would otherwise see loads after stores
            for (int k = 0; k < kWidthMultiple; ++k) {
                round_to(out + k, fmaf(value_of(block_out[i + k]), gain, value_of(residual[i + k])));
            }
            std::memcpy(residual_out + i, out, sizeof out);
        }
    }

    template <class Element>
    static void norm_of(const Pass& pass, std::int64_t begin, std::int64_t end) {
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t token = unit / a.geometry.streams;
            const std::int64_t c = unit % a.geometry.streams;
            if (pass.fold()) fold_stream<Element>(pass, unit);
            const Element* stream = pass.template streams<Element>() + unit * width;
            const float rs = reciprocal_rms(square_sum(stream, width), width, a.eps);
            a.rs[unit] = canonical(rs);
            const float* gain = a.w_norm + c * width;
            for (std::int64_t i = 0; i < width; i += kChunk) {
                float chunk[kChunk];
                for (int e = 0; e < kChunk; ++e) chunk[e] = (value_of(stream[i + e]) * gain[i + e]) * rs;
                std::memcpy(pass.chunk_at(pass.xn, (c * width + i) / kChunk, token), chunk, sizeof chunk);
            }
        }
    }

    static void norm(const Pass& pass, std::int64_t begin, std::int64_t end) {
        if (pass.args.stream_type == StreamType::BFloat16) {
            norm_of<std::uint16_t>(pass, begin, end);
        } else {
            norm_of<float>(pass, begin, end);
        }
    }

    // -----------------------------------------------------------------------------------------------------------
    // Rows

    using Rows = RowsOf<kWidth>;

    // kWidth rows of `length` weights against the activations of kTokens tokens: a row's sum a vector element.
    //
    // Chunks are loaded kStep at a time. Meanwhile the second cache is asked for what is kAhead farther in the rows
    // and, past their ends, for the rows at `jump`: hardware does not see a stream in this order (without it, up takes
    // twice as long). A line of weights is four chunks, so each chunk's turn asks for a quarter of the rows.
    template <int kTokens, int kStep>
    static void row_sums(const Rows& rows, std::int64_t length, std::int64_t jump, const float* activations,
                         Floats (&sums)[kTokens]) {
        Floats lanes[kLanes][kTokens];
        for (std::int64_t lane = length / kChunk; lane < kLanes; ++lane) {
            for (Floats& v : lanes[lane]) v = V::zero();
        }
        const std::int64_t first = length < kLanes * kChunk ? length : kLanes * kChunk;
        add_chunks<kTokens, kStep, true>(rows, 0, first, length, jump, activations, lanes);
        add_chunks<kTokens, kStep, false>(rows, first, length, length, jump, activations, lanes);
        for (int t = 0; t < kTokens; ++t) {
            Floats v[kLanes / 2];
#pragma GCC unroll 16
            for (int lane = 0; lane < kLanes / 2; ++lane) v[lane] = lanes[lane][t] + lanes[lane + kLanes / 2][t];
#pragma GCC unroll 4
            for (int stage = kLanes / 4; stage > 0; stage /= 2) {
#pragma GCC unroll 8
                for (int lane = 0; lane < stage; ++lane) v[lane] = v[lane] + v[lane + stage];
            }
            sums[t] = v[0];
        }
    }

    static constexpr std::int64_t kAhead = 512;

    // Adds the dots of weights [begin, end) to their lanes. kFirst: to zero.
    template <int kTokens, int kStep, bool kFirst>
    static void add_chunks(const Rows& rows, std::int64_t begin, std::int64_t end, std::int64_t length,
                           std::int64_t jump, const float* activations, Floats (&lanes)[kLanes][kTokens]) {
        const std::int64_t near = length < kAhead ? length : kAhead;
        for (std::int64_t i = begin; i < end; i += kStep * kChunk) {
            const std::int64_t ahead = i + near < length ? i + near : i + near - length + jump;
            Words words[kStep][4];
            V::load(rows, i, words);
#pragma GCC unroll 4
            for (int k = 0; k < kStep; ++k) {
                const std::int64_t chunk = i / kChunk + k;
                const std::int64_t quarter = chunk % 4 * rows.stride + ahead;
                for (const std::uint16_t* quad : rows.quad) {
                    _mm_prefetch(reinterpret_cast<const char*>(quad + quarter), _MM_HINT_T1);
                }
                add_dots<kTokens, kFirst>(words[k], activations + chunk * kChunk * kTokens, lanes[chunk % kLanes]);
            }
        }
    }

    template <int kTokens, bool kFirst>
    static void add_dots(const Words (&words)[4], const float* activations, Floats (&sums)[kTokens]) {
        Floats weights[kChunk];
        for (int i = 0; i < 4; ++i) {
            weights[2 * i] = V::low_halves(words[i]);
            weights[2 * i + 1] = V::high_halves(words[i]);
        }
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            const float* x = activations + t * kChunk;
            Floats dot = weights[0] * V::broadcast(x[0]);
#pragma GCC unroll 8
            for (int e = 1; e < kChunk; ++e) dot = V::fma(weights[e], V::broadcast(x[e]), dot);
            sums[t] = (kFirst ? V::zero() : sums[t]) + dot;
        }
    }

    // -----------------------------------------------------------------------------------------------------------
    // Down

    // A cache line of each row at once: lines of rows 20 kB apart drive each other out of the first cache before their
    // other chunks are asked for.
    static constexpr int kDownStep = 4;
    static_assert(kWidthMultiple % (kDownStep * kChunk) == 0);

    template <int kTokens>
    static void down(const Pass& pass, std::int64_t begin, std::int64_t end) {
        const ReadArgs& a = pass.args;
        const std::int64_t depth = a.geometry.depth();
        const std::int64_t rank = a.geometry.rank;
        const std::int64_t streams = a.geometry.streams;
        const std::int64_t first = begin * kRowsPerUnit;
        const std::int64_t last = end * kRowsPerUnit < down_rows(a) ? end * kRowsPerUnit : down_rows(a);
        const std::int64_t last_gate = last < rank ? last : rank;
        for (std::int64_t row = first; row < last_gate; row += kWidth) {
            Rows rows{{}, depth};
            for (int q = 0; q < kWidth / 4; ++q) {
                const std::int64_t there = row + 4 * q < last_gate ? row + 4 * q : last_gate - 4;
                rows.quad[q] = a.w_down + there * depth;
            }
            Floats sums[kTokens];
            row_sums<kTokens, kDownStep>(rows, depth, row + 2 * kWidth <= last_gate ? kWidth * depth : 0, pass.xn,
                                         sums);
            float lo[kTokens * kWidth];
            for (int t = 0; t < kTokens; ++t) V::store(lo + t * kWidth, sums[t]);
            for (float& sum : lo) sum = canonical(down_activation(sum, streams));
            const std::int64_t count = last_gate - row < kWidth ? last_gate - row : kWidth;
            for (int t = 0; t < kTokens; ++t) {
                for (std::int64_t r = 0; r < count; ++r) {
                    a.lo[t * rank + row + r] = lo[t * kWidth + r];
                    pass.chunk_at(pass.lo, (row + r) / kChunk, t)[(row + r) % kChunk] = lo[t * kWidth + r];
                }
            }
        }
        // There may be fewer than four inject rows: one row a quad.
        for (std::int64_t row = first > rank ? first : rank; row < last; row += kWidth / 4) {
            Rows rows{{}, 0};
            for (int q = 0; q < kWidth / 4; ++q) {
                const std::int64_t there = row + q < last ? row + q : last - 1;
                rows.quad[q] = a.w_inject + (there - rank) * depth;
            }
            Floats sums[kTokens];
            row_sums<kTokens, kDownStep>(rows, depth, 0, pass.xn, sums);
            for (int t = 0; t < kTokens; ++t) {
                float raw[kWidth];
                V::store(raw, sums[t]);
                for (int q = 0; q < kWidth / 4 && row + q < last; ++q) {
                    a.inject[t * streams + row + q - rank] = canonical(raw[4 * q]);
                }
            }
        }
    }

    // -----------------------------------------------------------------------------------------------------------
    // Up

    static void quantise(const float* values, std::uint8_t* out) {
        std::uint32_t amax_bits = 0;
        for (int i = 0; i < kQ8Block; ++i) {
            const std::uint32_t bits = magnitude_bits(values[i]);
            amax_bits = amax_bits > bits ? amax_bits : bits;
        }
        float lanes[kLanes];
        std::memcpy(lanes, values, sizeof lanes);
        const std::uint16_t d = q8_scale_half(amax_bits);
        const std::uint16_t s = q8_sum_half(tree_sum(lanes), amax_bits);
        std::int8_t q[kQ8Block];
        for (int i = 0; i < kQ8Block; ++i) q[i] = q8_value(values[i], amax_bits);
        std::memcpy(out, &d, 2);
        std::memcpy(out + 2, &s, 2);
        std::memcpy(out + 4, q, sizeof q);
    }

    // Stream by stream, so that the rows come in the order in which they lie in memory; `mixed` has the sums so far.
    template <int kTokens>
    static void up(const Pass& pass, std::int64_t begin, std::int64_t end) {
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        const std::int64_t rank = a.geometry.rank;
        const std::int64_t streams = a.geometry.streams;
        for (std::int64_t c = 0; c < streams; ++c) {
            for (std::int64_t d = begin * kQ8Block; d < end * kQ8Block; d += kWidth) {
                const std::int64_t row = c * width + d;
                Rows rows{{}, rank};
                for (int q = 0; q < kWidth / 4; ++q) rows.quad[q] = a.w_up + (row + 4 * q) * rank;
                const bool more = row + 2 * kWidth <= a.geometry.depth();
                Floats sums[kTokens];
                row_sums<kTokens, 1>(rows, rank, more ? kWidth * rank : 0, pass.lo, sums);
                float gates[kTokens * kWidth];
                for (int t = 0; t < kTokens; ++t) V::store(gates + t * kWidth, sums[t]);
                for (float& gate : gates) gate = sigmoid(gate);
                for (int t = 0; t < kTokens; ++t) {
                    float xn[kWidth];
                    for (int i = 0; i < kWidth; i += kChunk) {
                        std::memcpy(xn + i, pass.chunk_at(pass.xn, (row + i) / kChunk, t), kChunk * sizeof(float));
                    }
                    const float* gate = gates + t * kWidth;
                    float mix[kWidth];
                    if (c == 0) {
                        for (int i = 0; i < kWidth; ++i) mix[i] = mix_first(xn[i], gate[i]);
                    } else {
                        std::memcpy(mix, a.mixed + t * width + d, sizeof mix);
                        for (int i = 0; i < kWidth; ++i) mix[i] = mix_next(xn[i], gate[i], mix[i]);
                    }
                    if (c == streams - 1) {
                        for (float& value : mix) value = canonical(mix_mean(value, streams));
                    }
                    std::memcpy(a.mixed + t * width + d, mix, sizeof mix);
                }
            }
        }
        if (a.q8_1 == nullptr) return;
        for (int t = 0; t < kTokens; ++t) {
            for (std::int64_t unit = begin; unit < end; ++unit) {
                const std::int64_t block = t * (width / kQ8Block) + unit;
                quantise(a.mixed + block * kQ8Block, a.q8_1 + block * kQ8Bytes);
            }
        }
    }

    // -----------------------------------------------------------------------------------------------------------
    // By number of tokens

    static void down_any(const Pass& pass, std::int64_t begin, std::int64_t end) {
        static constexpr Step kSteps[] = {down<1>, down<2>, down<3>, down<4>, down<5>, down<6>, down<7>, down<8>};
        static_assert(sizeof kSteps / sizeof *kSteps == kPassTokens);
        kSteps[pass.args.tokens - 1](pass, begin, end);
    }

    static void up_any(const Pass& pass, std::int64_t begin, std::int64_t end) {
        static constexpr Step kSteps[] = {up<1>, up<2>, up<3>, up<4>, up<5>, up<6>, up<7>, up<8>};
        static_assert(sizeof kSteps / sizeof *kSteps == kPassTokens);
        kSteps[pass.args.tokens - 1](pass, begin, end);
    }
};

template <class V>
constexpr Steps vector_steps(const char* name) {
    return {name, VectorRead<V>::norm, VectorRead<V>::down_any, VectorRead<V>::up_any};
}

}  // namespace
}  // namespace strata::cpu
