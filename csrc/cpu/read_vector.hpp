// The read over vectors of V::kWidth floats, for the files that are compiled for a larger instruction set.
//
// An element of a vector is a lane of the contract where there are few tokens, which leaves the weights in the order in
// which they are read (few_tokens.hpp), and a row of weights where there are many, which leaves the activations so and
// needs no trees within vectors (many_tokens.hpp).
//
// All that is done to one value at a time (exp, the fold, q8_1) is the contract's scalar code in loops of a
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
#include "cpu/few_tokens.hpp"
#include "cpu/many_tokens.hpp"
#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

template <class V>
struct VectorRead {
    using Floats = typename V::Floats;
    using Words = typename V::Words;
    static constexpr int kWidth = V::kWidth;
    static_assert(kQ8Block % (2 * kWidth) == 0);

    // -----------------------------------------------------------------------------------------------------------
    // Norm

    // An element of a stream as a value, and R' as the stream holds it.
    static float value_of(float element) { return element; }
    static float value_of(std::uint16_t element) { return widen(element); }
    static void round_to(float* element, float value) { *element = canonical(value); }
    static void round_to(std::uint16_t* element, float value) { *element = bf16_bits(value); }

    // R' of a stream, folded as it is read.
    template <class Element, bool kFold>
    struct Stream {
        const Element *residual, *block_out;
        float gain;

        // `index`: token * streams + stream.
        Stream(const ReadArgs& a, std::int64_t index)
            : residual(static_cast<const Element*>(a.residual) + index * a.geometry.width),
              block_out(kFold ? static_cast<const Element*>(a.block_out) + index / a.geometry.streams * a.geometry.width
                              : nullptr),
              gain(kFold ? fold_gain(a.inject_prev[index], a.geometry.streams) : 0.0f) {}

        Element operator[](std::int64_t i) const {
            if constexpr (!kFold) return residual[i];
            Element out;
            round_to(&out, fmaf(value_of(block_out[i]), gain, value_of(residual[i])));
            return out;
        }
    };

    // A float4 is dealt as a chunk is, so the threads of a vector are in the order that V::tree takes. (With sums in
    // their own order, which compilers make of scalar code, norm of 8 tokens takes a fifth longer with AVX2.)
    template <class Values>
    static float square_sum(const Values& stream, std::int64_t width) {
        constexpr int kStep = 4 * kWidth;
        constexpr int kVectors = kLanes / kWidth;
        Floats threads[kNormThreads / kWidth];
        for (Floats& sums : threads) sums = V::zero();
        for (std::int64_t i = 0; i < width; i += kStep) {
            float values[kStep];
            if (i + kStep <= width) {
                for (int k = 0; k < kStep; ++k) values[k] = value_of(stream[i + k]);
            } else {
                for (int k = 0; k < kStep; ++k) values[k] = k < width - i ? value_of(stream[i + k]) : 0.0f;
            }
            Floats v[4];
            V::deal(values, v);
            Floats& sums = threads[i / kStep % (kNormThreads / kWidth)];
            sums = sums + V::fma(v[3], v[3], V::fma(v[2], v[2], V::fma(v[1], v[1], v[0] * v[0])));
        }
        Floats pairs[kWidth / 2];
        for (Floats& pair : pairs) pair = V::zero();
        for (int group = 0; group < kNormGroups; ++group) {
            Floats* const sums = threads + group * kVectors;
            for (int stage = kVectors / 2; stage > 0; stage /= 2) {
                for (int i = 0; i < stage; ++i) sums[i] = sums[i] + sums[i + stage];
            }
            if (group % 2 == 1) pairs[group / 2] = V::pair(sums[-kVectors], sums[0]);
        }
        float sums[kWidth];
        V::store(sums, V::tree([&](int pair) { return pairs[pair]; }));
        float total = 0.0f;
        for (int group = 0; group < kNormGroups; ++group) total = total + sums[group];
        return total;
    }

    // `unit`: token * streams + stream.
    template <class Element>
    static void fold_stream(const Pass& pass, std::int64_t unit) {
        const std::int64_t width = pass.args.geometry.width;
        const Stream<Element, true> stream(pass.args, unit);
        Element* residual_out = static_cast<Element*>(pass.args.residual_out) + unit * width;
        // A stream is too short for hardware to run ahead of: without this, norm takes a fifth longer.
        constexpr int kLine = 64 / sizeof(Element);
        constexpr int kFoldAhead = 32;
        for (std::int64_t i = 0; i < width; i += kWidthMultiple) {
            for (int k = 0; k < kWidthMultiple; k += kLine) {
                _mm_prefetch(reinterpret_cast<const char*>(stream.residual + i + kFoldAhead * kLine + k), _MM_HINT_T0);
            }
            Element out[kWidthMultiple];  // in place, the compiler would otherwise see loads after stores
            for (int k = 0; k < kWidthMultiple; ++k) out[k] = stream[i + k];
            std::memcpy(residual_out + i, out, sizeof out);
        }
    }

    // Each stream is normalised while it is in the first cache; what it takes to fold it twice is less than to store
    // and load it in between.
    template <class Element, bool kFold>
    static void norm_few(const Pass& pass, std::int64_t begin, std::int64_t end) {
        const ReadArgs& a = pass.args;
        const Group group = pass.group(0);
        for (std::int64_t c = begin; c < end; ++c) {
            for (int t = 0; t < group.count; ++t) {
                const std::int64_t index = t * a.geometry.streams + c;
                const Stream<Element, kFold> stream(a, index);
                const float rs = reciprocal_rms(square_sum(stream, a.geometry.width), a.geometry.width, a.eps);
                a.rs[index] = canonical(rs);
                normalise_few(pass, group, t, c, stream, rs);
            }
        }
    }

    template <class Element>
    static void norm_many(const Pass& pass, std::int64_t begin, std::int64_t end) {
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        const std::int64_t streams = a.geometry.streams;
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const Group group = pass.group(unit / streams);
            const std::int64_t c = unit % streams;
            float rs[kGroupTokens];
            for (int t = 0; t < group.count; ++t) {
                const std::int64_t stream = (group.first + t) * streams + c;
                if (pass.fold()) fold_stream<Element>(pass, stream);
                rs[t] =
                    reciprocal_rms(square_sum(pass.template streams<Element>() + stream * width, width), width, a.eps);
                a.rs[stream] = canonical(rs[t]);
            }
            normalise_many<Element>(pass, group, c, rs);
        }
    }

    // xn of kCount elements from `stream` on.
    template <int kCount, class Element>
    static void normalise(const Element* stream, const float* gain, float rs, float* xn) {
        float out[kCount];  // the compiler would otherwise see loads after stores
        for (int i = 0; i < kCount; ++i) out[i] = (value_of(stream[i]) * gain[i]) * rs;
        std::memcpy(xn, out, sizeof out);
    }

    // Bundle by bundle, but chunk by chunk where one has chunks of two streams. Asks for the stream that comes next.
    template <class Element, bool kFold>
    static void normalise_few(const Pass& pass, const Group& group, int t, std::int64_t c,
                              const Stream<Element, kFold>& stream, float rs) {
        using Sums = FewTokens<V>;
        const Geometry& g = pass.args.geometry;
        const Activations x = pass.xn;
        const std::int64_t index = t * g.streams + c;
        const Element* const next = static_cast<const Element*>(pass.args.residual) +
                                    (t + 1 < group.count ? index + g.streams : c + 1) * g.width;
        Element* const out = kFold ? static_cast<Element*>(pass.args.residual_out) + index * g.width : nullptr;
        const float* const gain = pass.args.w_norm + c * g.width;
        for (std::int64_t d = 0; d < g.width;) {
            const std::int64_t at = c * g.width + d;
            if (at % Sums::kBundle == 0 && d + Sums::kBundle <= g.width) {
                for (int k = 0; k < Sums::kBundle; k += 64 / sizeof(Element)) {
                    _mm_prefetch(reinterpret_cast<const char*>(next + d + k), _MM_HINT_T0);
                }
                float xn[Sums::kBundle];
                fold_and_normalise<Sums::kBundle>(stream, d, gain + d, rs, out, xn);
                Sums::put_bundle(x, group, t, at / Sums::kBundle, xn);
                d += Sums::kBundle;
            } else {
                float xn[kChunk];
                fold_and_normalise<kChunk>(stream, d, gain + d, rs, out, xn);
                Sums::put(x, group, t, at, xn, kChunk);
                d += kChunk;
            }
        }
        if (t == 0 && c == g.streams - 1) Sums::pad(x, group);
    }

    template <int kCount, class Element, bool kFold>
    static void fold_and_normalise(const Stream<Element, kFold>& stream, std::int64_t d, const float* gain, float rs,
                                   Element* out, float* xn) {
        Element folded[kCount];
        for (int i = 0; i < kCount; ++i) folded[i] = stream[d + i];
        if (kFold) std::memcpy(out + d, folded, sizeof folded);
        normalise<kCount>(folded, gain, rs, xn);
    }

    template <class Element>
    static void normalise_many(const Pass& pass, const Group& group, std::int64_t c, const float* rs) {
        const std::int64_t width = pass.args.geometry.width;
        const std::int64_t token = pass.args.geometry.streams * width;
        const Element* const stream = pass.template streams<Element>() + group.first * token + c * width;
        const float* const gain = pass.args.w_norm + c * width;
        for (std::int64_t d = 0; d < width; d += kChunk) {
            float* xn = pass.xn.at(group, (c * width + d) / kChunk);
            for (int t = 0; t < group.count; ++t) {
                normalise<kChunk>(stream + t * token + d, gain + d, rs[t], xn + t * kChunk);
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
    template <class Element>
    static void norm_of(const Pass& pass, std::int64_t begin, std::int64_t end) {
        if (pass.args.tokens > kFewTokens) {
            norm_many<Element>(pass, begin, end);
        } else {
            (pass.fold() ? norm_few<Element, true> : norm_few<Element, false>)(pass, begin, end);
        }
    }

    // -----------------------------------------------------------------------------------------------------------
    // Down

    static void down_few(const Pass& pass, std::int64_t begin, std::int64_t end) {
        using Sums = FewTokens<V>;
        using Rows = typename Sums::Rows;
        const ReadArgs& a = pass.args;
        const std::int64_t depth = a.geometry.depth();
        const std::int64_t rank = a.geometry.rank;
        const std::int64_t last = end * kRowsPerUnit < down_rows(a) ? end * kRowsPerUnit : down_rows(a);
        const std::int64_t last_gate = last < rank ? last : rank;
        const auto count = [](std::int64_t left) { return left < Sums::kRows ? left : std::int64_t{Sums::kRows}; };
        const auto rows_at = [&](std::int64_t row) -> Rows {
            if (row < last_gate) return {a.w_down + row * depth, depth, count(last_gate - row)};
            if (row < last) return {a.w_inject + (row - rank) * depth, depth, count(last - row)};
            // What up begins with, where threads share its rows as they share those of down.
            const std::int64_t column = begin * up_units(a) / down_units(a) * kQ8Block;
            return {a.w_up + column * rank, rank, Sums::kRows};
        };
        std::int64_t row = begin * kRowsPerUnit;
        while (row < last) {
            const Rows rows = rows_at(row);
            Sums::sum(pass, pass.xn, rows, rows_at(row + rows.count), [&](const Group& group, const Floats* sums) {
                for (int t = 0; t < group.count; ++t) {
                    if (row < last_gate) {
                        finish_gates<Sums>(pass, group, t, row, rows.count, sums[t]);
                        continue;
                    }
                    float raw[kWidth];
                    V::store(raw, sums[t]);
                    float* const inject = a.inject + t * a.geometry.streams + row - rank;
                    for (std::int64_t r = 0; r < rows.count; ++r) inject[r] = canonical(raw[r]);
                }
            });
            row += rows.count;
        }
        if (begin == 0) Sums::pad(pass.lo, pass.group(0));
    }

    static void down_many(const Pass& pass, std::int64_t begin, std::int64_t end) {
        using Sums = ManyTokens<V>;
        const ReadArgs& a = pass.args;
        const std::int64_t depth = a.geometry.depth();
        const std::int64_t rank = a.geometry.rank;
        const std::int64_t first = begin * kRowsPerUnit;
        const std::int64_t last = end * kRowsPerUnit < down_rows(a) ? end * kRowsPerUnit : down_rows(a);
        const std::int64_t last_gate = last < rank ? last : rank;
        constexpr int kQuads = Sums::kRows / 4;
        typename Sums::Rows rows;
        // What is beyond the last row is a row once more, and its sums are dropped.
        rows.stride = depth;
        for (std::int64_t row = first; row < last_gate; row += Sums::kRows) {
            for (int q = 0; q < kQuads; ++q) {
                rows.quad[q] = a.w_down + (row + 4 * q < last_gate ? row + 4 * q : last_gate - 4) * depth;
            }
            const std::int64_t count = last_gate - row < Sums::kRows ? last_gate - row : Sums::kRows;
            const int vectors = count > kWidth ? Sums::kRows / kWidth : 1;
            const std::int64_t jump = row + 2 * Sums::kRows <= last_gate ? Sums::kRows * depth : 0;
            Sums::sum(pass, pass.xn, rows, jump, vectors, [&](const Group& group, const Floats* sums) {
                for (int i = 0; i < group.count * vectors; ++i) {
                    const int v = i % vectors;
                    finish_gates<Sums>(pass, group, i / vectors, row + v * kWidth, count - v * kWidth, sums[i]);
                }
            });
        }
        // There may be fewer than four inject rows: one row a quad.
        rows.stride = 0;
        for (std::int64_t row = first > rank ? first : rank; row < last; row += kQuads) {
            for (int q = 0; q < kQuads; ++q) {
                rows.quad[q] = a.w_inject + ((row + q < last ? row + q : last - 1) - rank) * depth;
            }
            const int vectors = last - row > kWidth / 4 ? Sums::kRows / kWidth : 1;
            Sums::sum(pass, pass.xn, rows, 0, vectors, [&](const Group& group, const Floats* sums) {
                for (int t = 0; t < group.count; ++t) {
                    float raw[Sums::kRows];
                    for (int v = 0; v < vectors; ++v) V::store(raw + v * kWidth, sums[t * vectors + v]);
                    float* const inject = a.inject + (group.first + t) * a.geometry.streams + row - rank;
                    for (int q = 0; q < kQuads && row + q < last; ++q) inject[q] = canonical(raw[4 * q]);
                }
            });
        }
    }

    // Gate rows from `row` on, `count` or kWidth of them, for token t of the group.
    template <class Sums>
    static void finish_gates(const Pass& pass, const Group& group, int t, std::int64_t row, std::int64_t count,
                             Floats sums) {
        const ReadArgs& a = pass.args;
        float lo[kWidth];
        V::store(lo, sums);
        for (float& sum : lo) sum = canonical(down_activation(sum, a.geometry.streams));
        float* const out = a.lo + (group.first + t) * a.geometry.rank + row;
        for (std::int64_t r = 0; r < kWidth && r < count; r += kRowsPerUnit) {
            std::memcpy(out + r, lo + r, kRowsPerUnit * sizeof(float));
            Sums::put(pass.lo, group, t, row + r, lo + r, kRowsPerUnit);
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

    // Up, by either way stream by stream, so that the rows come in the order in which they lie in memory; `mixed` has
    // the sums so far.
    static void up_few(const Pass& pass, std::int64_t begin, std::int64_t end) {
        using Sums = FewTokens<V>;
        using Rows = typename Sums::Rows;
        const Geometry& g = pass.args.geometry;
        const std::int64_t first = begin * kQ8Block, last = end * kQ8Block;
        const auto rows_at = [&](std::int64_t c, std::int64_t d) -> Rows {
            const bool here = d < last;
            const std::int64_t row = (here ? c : c + 1) * g.width + (here ? d : first);
            if (row >= g.depth()) return {pass.args.w_up, 0, 0};
            return {pass.args.w_up + row * g.rank, g.rank, Sums::kRows};
        };
        for (std::int64_t c = 0; c < g.streams; ++c) {
            for (std::int64_t d = first; d < last; d += Sums::kRows) {
                Sums::sum(pass, pass.lo, rows_at(c, d), rows_at(c, d + Sums::kRows),
                          [&](const Group& group, const Floats* sums) { mix<1>(pass, group, c, d, sums); });
            }
        }
        quantise_blocks(pass, begin, end);
    }

    static void up_many(const Pass& pass, std::int64_t begin, std::int64_t end) {
        using Sums = ManyTokens<V>;
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        const std::int64_t rank = a.geometry.rank;
        typename Sums::Rows rows;
        rows.stride = rank;
        for (std::int64_t c = 0; c < a.geometry.streams; ++c) {
            for (std::int64_t d = begin * kQ8Block; d < end * kQ8Block; d += Sums::kRows) {
                const std::int64_t row = c * width + d;
                for (int q = 0; q < Sums::kRows / 4; ++q) rows.quad[q] = a.w_up + (row + 4 * q) * rank;
                const std::int64_t jump = row + 2 * Sums::kRows <= a.geometry.depth() ? Sums::kRows * rank : 0;
                constexpr int kVectors = Sums::kRows / kWidth;
                Sums::sum(pass, pass.lo, rows, jump, kVectors,
                          [&](const Group& group, const Floats* sums) { mix<kVectors>(pass, group, c, d, sums); });
            }
        }
        quantise_blocks(pass, begin, end);
    }

    static void quantise_blocks(const Pass& pass, std::int64_t begin, std::int64_t end) {
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        if (a.q8_1 == nullptr) return;
        for (std::int64_t token = 0; token < a.tokens; ++token) {
            for (std::int64_t unit = begin; unit < end; ++unit) {
                const std::int64_t block = token * (width / kQ8Block) + unit;
                quantise(a.mixed + block * kQ8Block, a.q8_1 + block * kQ8Bytes);
            }
        }
    }

    // Adds stream c to `mixed`, from column d on as many as there are in kVectors vectors. xn is computed once more: as
    // norm keeps it for down it is in another order.
    template <int kVectors>
    static void mix(const Pass& pass, const Group& group, std::int64_t c, std::int64_t d, const Floats* sums) {
        if (pass.args.stream_type == StreamType::BFloat16) {
            mix_of<kVectors, std::uint16_t>(pass, group, c, d, sums);
        } else {
            mix_of<kVectors, float>(pass, group, c, d, sums);
        }
    }

    template <int kVectors, class Element>
    static void mix_of(const Pass& pass, const Group& group, std::int64_t c, std::int64_t d, const Floats* sums) {
        const ReadArgs& a = pass.args;
        const std::int64_t width = a.geometry.width;
        const std::int64_t streams = a.geometry.streams;
        float gates[kGroupTokens * kVectors * kWidth];
        for (int i = 0; i < group.count * kVectors; ++i) {
            float* const gate = gates + i * kWidth;
            V::store(gate, sums[i]);
            for (int r = 0; r < kWidth; ++r) gate[r] = sigmoid(gate[r]);
        }
        // Out of the loop, which stores: the compiler would read all of `pass` anew for each token (8 tokens: up takes
        // a twenty-fifth longer).
        const Element* stream = pass.template streams<Element>() + (group.first * streams + c) * width + d;
        const float* gain = a.w_norm + c * width + d;
        const float* rs = a.rs + group.first * streams + c;
        float* mixed = a.mixed + group.first * width + d;
        for (int t = 0; t < group.count; ++t) {
            for (int v = 0; v < kVectors; ++v) {
                const std::int64_t column = v * kWidth;
                // A line of each token at a time is no stream that hardware sees (8 tokens: up takes a twentieth
                // longer).
                _mm_prefetch(reinterpret_cast<const char*>(stream + column + kVectors * kWidth), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(mixed + column + kVectors * kWidth), _MM_HINT_T0);
                float xn[kWidth];
                normalise<kWidth>(stream + column, gain + column, *rs, xn);
                const Floats open = V::load(gates + (t * kVectors + v) * kWidth);
                Floats mix = c == 0 ? V::load(xn) * open : V::fma(V::load(xn), open, V::load(mixed + column));
                if (c == streams - 1) mix = V::canonical(mix / V::broadcast(static_cast<float>(streams)));
                V::store(mixed + column, mix);
            }
            stream += streams * width;
            rs += streams;
            mixed += width;
        }
    }

    // -----------------------------------------------------------------------------------------------------------

    static void down(const Pass& pass, std::int64_t begin, std::int64_t end) {
        (pass.args.tokens <= kFewTokens ? down_few : down_many)(pass, begin, end);
    }
    static void up(const Pass& pass, std::int64_t begin, std::int64_t end) {
        (pass.args.tokens <= kFewTokens ? up_few : up_many)(pass, begin, end);
    }
};

template <class V>
constexpr Steps vector_steps(const char* name) {
    return {name, VectorRead<V>::norm, VectorRead<V>::down, VectorRead<V>::up};
}

}  // namespace
}  // namespace strata::cpu
