// The sums of up to V::kWidth rows for few tokens: reading the weights is what takes the time. A few rows at a time are
// read in the order of memory, and each line of theirs is asked for ahead.
//
// An element of a vector is a lane: V::kWidth neighbouring chunks of a row, a bundle, meet the same chunks of a token,
// chunk k in element V::element(k). So the sums of a row are kVectors vectors a token; the first stages of the xor tree
// are between those, the others (V::tree) within them.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

template <class V>
struct FewTokens {
    using Floats = typename V::Floats;
    using Words = typename V::Words;
    static constexpr int kWidth = V::kWidth;
    static constexpr int kBundle = kWidth * kChunk;
    static constexpr int kRows = kWidth;

    // At most kRows, `stride` weights apart.
    struct Rows {
        const std::uint16_t* first;
        std::int64_t stride, count;
    };

    // -----------------------------------------------------------------------------------------------------------
    // Activations: of a bundle first element 0 of its chunks, kWidth values for each token, then element 1, and so on.

    // Of token t of the group.
    static float* at(const Activations& x, const Group& group, int t, std::int64_t bundle, int e) {
        return x.data() + ((bundle * kChunk + e) * group.count + t) * kWidth;
    }

    static void put(const Activations& x, const Group& group, int t, std::int64_t index, float value) {
        const std::int64_t chunk = index / kChunk;
        const std::int64_t bundle = chunk / kWidth;
        float* const to = at(x, group, t, bundle, static_cast<int>(index % kChunk)) + V::element(chunk % kWidth);
        to[0] = value;
        if (tails_share(x) && bundle == x.chunks() / kWidth) to[V::kOtherTail] = value;
    }

    // The values of a whole bundle.
    static void put_bundle(const Activations& x, const Group& group, int t, std::int64_t bundle, const float* values) {
        Floats dealt[kChunk];
        V::deal(values, dealt);
        for (int e = 0; e < kChunk; ++e) V::store(at(x, group, t, bundle, e), dealt[e]);
    }

    // What stands behind the last value meets weights of zero, and must not make a NaN of them.
    static void pad(const Activations& x, const Group& group) {
        const std::int64_t multiple = tails_share(x) ? kBundle / 2 : kBundle;
        for (std::int64_t i = x.chunks() * kChunk; i % multiple != 0; ++i) {
            for (int t = 0; t < group.count; ++t) put(x, group, t, i, 0.0f);
        }
    }

    // -----------------------------------------------------------------------------------------------------------
    // finish(group, sums): vector t has the sums of token t of the group. `follows` are the rows that come next.
    template <class Finish>
    static void sum(const Pass& pass, const Activations& x, const Rows& rows, const Rows& follows,
                    const Finish& finish) {
        using Instance = void (*)(const Activations&, const Rows&, const Rows&, Floats*);
        static constexpr Instance kInstances[] = {sum_of<1>, sum_of<2>, sum_of<3>, sum_of<4>,
                                                  sum_of<5>, sum_of<6>, sum_of<7>, sum_of<8>};
        static_assert(sizeof kInstances / sizeof *kInstances == kFewTokens);
        Floats sums[kFewTokens];
        kInstances[pass.args.tokens - 1](x, rows, follows, sums);
        finish(pass.group(0), sums);
    }

  private:
    static constexpr int kVectors = kLanes / kWidth;  // of the sums of a row

    // Long rows are read in parts, each by all rows before the next, so that its activations stay in the first cache;
    // for so few tokens that these are little beside the weights, a row is read at once.
    static constexpr std::int64_t kPartWeights = 512;
    static constexpr int kAtOnce = 2;
    // Asked for so far ahead.
    static constexpr std::int64_t kAheadWeights = 4096;

    static constexpr int kLine = 64 / sizeof(std::uint16_t);
    static constexpr int kLines = kBundle / kLine;

    // Whether the last bundles of two rows, which have at most half their chunks, are one vector.
    static bool tails_share(const Activations& x) {
        const std::int64_t tail = x.chunks() % kWidth;
        return V::kOtherTail > 0 && tail > 0 && tail <= kWidth / 2;
    }

    // Rows that meet an activation together, and what is asked for meanwhile, at the place of the bundle that is
    // multiplied: asked[0], from bundle `turn` on asked[1].
    template <int kAbreast>
    struct Abreast {
        const std::uint16_t *at[kAbreast], *asked[2][kAbreast];
        std::int64_t turn;
    };

    template <int kTokens>
    static void sum_of(const Activations& x, const Rows& rows, const Rows& follows, Floats* totals) {
        constexpr int kAbreast = V::rows_abreast(kTokens);
        constexpr std::int64_t kSteps = kRows / kAbreast;
        constexpr std::int64_t kPart = kPartWeights / kBundle;
        constexpr std::int64_t kAhead = kAheadWeights / kAbreast / kBundle;
        const std::int64_t bundles = (x.chunks() + kWidth - 1) / kWidth;
        static_assert(kPart > 1, "a whole bundle in the last part");
        const std::int64_t part = kTokens <= kAtOnce || bundles < 2 * kPart ? bundles : kPart;
        Floats sums[kSteps][kAbreast * kTokens * kVectors], lanes[kRows * kTokens];
        for (std::int64_t begin = 0, end; begin < bundles; begin = end) {
            end = begin + 2 * part <= bundles ? begin + part : bundles;
            const std::int64_t length = end - begin;
            // Asked for is what comes `rest` bundles later in the same rows or, where a part is shorter, in the rows of
            // `steps` steps later; where it is the whole row, in the rows that follow.
            const std::int64_t rest = length > kAhead ? kAhead : 0;
            const std::int64_t steps = rest > 0 ? 0 : part == bundles ? kSteps : kAhead / length;
            const auto later = [&](std::int64_t row) {
                if (row < rows.count) return rows.first + row * rows.stride;
                const std::int64_t r = row - rows.count;
                if (end < bundles) return rows.first + (r < rows.count ? r : 0) * rows.stride + length * kBundle;
                return follows.first + (r < follows.count ? r : 0) * follows.stride - begin * kBundle;
            };
            for (std::int64_t row = 0; row < rows.count; row += kAbreast) {
                Abreast<kAbreast> abreast;
                for (int i = 0; i < kAbreast; ++i) {
                    // Beyond the last row it is that one once more.
                    abreast.at[i] = rows.first + (row + i < rows.count ? row + i : rows.count - 1) * rows.stride;
                    abreast.asked[0][i] = later(row + steps * kAbreast + i) + rest * kBundle;
                    abreast.asked[1][i] = later(row + (steps + 1) * kAbreast + i) + (rest - length) * kBundle;
                }
                abreast.turn = end - rest;
                Floats* const own = sums[part == bundles ? 0 : row / kAbreast];
                add<kAbreast, kTokens>(abreast, begin, end, x, own, lanes + row * kTokens);
            }
        }
        for (std::int64_t i = rows.count * kTokens; i < kRows * kTokens; ++i) lanes[i] = V::zero();
        for (int t = 0; t < kTokens; ++t) totals[t] = V::template tree<kTokens>(lanes + t);
    }

    // Adds bundles [begin, end) to the sums, and after the last one makes of them lanes[i * kTokens + t].
    template <int kAbreast, int kTokens>
    __attribute__((noinline)) static void add(const Abreast<kAbreast>& rows, std::int64_t begin, std::int64_t end,
                                              const Activations& x, Floats* sums, Floats* lanes) {
        constexpr int kDots = kAbreast * kTokens;
        const std::int64_t whole = x.chunks() / kWidth;
        const bool last = end * kWidth >= x.chunks();
        if (begin == 0 && whole < kVectors) {
            for (int i = 0; i < kDots * kVectors; ++i) sums[i] = V::zero();
        }
        for (std::int64_t bundle = begin; bundle < (last ? whole - 1 : end); ++bundle) {
            Floats dots[kDots];
            multiply_whole<kAbreast, kTokens>(rows, bundle, x, dots);
            Floats* const own = sums + bundle % kVectors;
            if (bundle < kVectors) {
#pragma GCC unroll 16
                for (int i = 0; i < kDots; ++i) own[i * kVectors] = V::zero() + dots[i];
            } else {
#pragma GCC unroll 16
                for (int i = 0; i < kDots; ++i) own[i * kVectors] = own[i * kVectors] + dots[i];
            }
        }
        if (!last) return;
        // The last whole bundle comes behind the part of one that follows it, which is of other lanes: its sums meet
        // the others without being stored.
        if (whole * kWidth < x.chunks()) add_tails<kAbreast, kTokens>(rows, x, sums);
        if (whole == 0) {
            for (int i = 0; i < kDots; ++i) lanes[i] = meet(sums + i * kVectors, 0, sums[i * kVectors]);
            return;
        }
        Floats dots[kDots];
        multiply_whole<kAbreast, kTokens>(rows, whole - 1, x, dots);
        const std::int64_t own = (whole - 1) % kVectors;
#pragma GCC unroll 16
        for (int i = 0; i < kDots; ++i) {
            const Floats* const v = sums + i * kVectors;
            lanes[i] = meet(v, own, (whole <= kVectors ? V::zero() : v[own]) + dots[i]);
        }
    }

    // The stages of the xor tree between the vectors of a row's sums, of which v[own] is `sum`.
    static Floats meet(const Floats* v, std::int64_t own, Floats sum) {
        if constexpr (kVectors == 2) {
            return sum + v[own ^ 1];
        } else {
            static_assert(kVectors == 4);
            return (sum + v[own ^ 2]) + (v[own ^ 1] + v[own ^ 3]);
        }
    }

    template <int kAbreast, int kTokens>
    __attribute__((always_inline)) static void multiply_whole(const Abreast<kAbreast>& rows, std::int64_t bundle,
                                                              const Activations& x,
                                                              Floats (&dots)[kAbreast * kTokens]) {
        const std::int64_t offset = bundle * kBundle;
        Words words[kAbreast][4];
#pragma GCC unroll 4
        for (int i = 0; i < kAbreast; ++i) V::load(rows.at[i] + offset, words[i]);
        multiply<kAbreast, kTokens, kAbreast * kLines>(words, x.data() + offset * kTokens,
                                                       rows.asked[bundle >= rows.turn], offset, dots);
    }

    // The same for what is left behind the whole bundles.
    template <int kAbreast, int kTokens>
    __attribute__((always_inline)) static void add_tails(const Abreast<kAbreast>& rows, const Activations& x,
                                                         Floats* sums) {
        const std::int64_t bundle = x.chunks() / kWidth;
        const std::int64_t offset = bundle * kBundle;
        const auto part = V::part(x.chunks() * kChunk - offset);
        const std::uint16_t* const* const asked = rows.asked[bundle >= rows.turn];
        Floats* const own = sums + bundle % kVectors;
        if constexpr (V::kOtherTail > 0) {
            if (tails_share(x)) {
                constexpr int kPairs = kAbreast / 2;
                Words words[kPairs][4];
#pragma GCC unroll 2
                for (int i = 0; i < kPairs; ++i) {
                    V::load_tails(rows.at[2 * i] + offset, rows.at[2 * i + 1] + offset, part, words[i]);
                }
                Floats dots[kPairs * kTokens];
                multiply<kPairs, kTokens, kAbreast * kLines / 2, kAbreast>(words, x.data() + offset * kTokens, asked,
                                                                           offset, dots);
#pragma GCC unroll 16
                for (int i = 0; i < kPairs * kTokens; ++i) {
                    Floats* const first = own + (i / kTokens * 2 * kTokens + i % kTokens) * kVectors;
                    V::add_tails(first[0], first[kTokens * kVectors], dots[i]);
                }
                return;
            }
        }
        Words words[kAbreast][4];
#pragma GCC unroll 4
        for (int i = 0; i < kAbreast; ++i) V::load_part(rows.at[i] + offset, part, words[i]);
        Floats dots[kAbreast * kTokens];
        multiply<kAbreast, kTokens, kAbreast * kLines>(words, x.data() + offset * kTokens, asked, offset, dots);
#pragma GCC unroll 16
        for (int i = 0; i < kAbreast * kTokens; ++i) own[i * kVectors] = own[i * kVectors] + dots[i];
    }

    // dots[i * kTokens + t]: of a bundle of row i and token t. Meanwhile kAsked lines of kAskedRows rows are asked for.
    template <int kAbreast, int kTokens, int kAsked, int kAskedRows = kAbreast>
    __attribute__((always_inline)) static void multiply(const Words (&words)[kAbreast][4], const float* x,
                                                        const std::uint16_t* const* asked, std::int64_t offset,
                                                        Floats (&dots)[kAbreast * kTokens]) {
#pragma GCC unroll 8
        for (int e = 0; e < kChunk; ++e) {
#pragma GCC unroll 4
            for (int n = e * kAsked / kChunk; n < (e + 1) * kAsked / kChunk; ++n) {
                _mm_prefetch(reinterpret_cast<const char*>(asked[n % kAskedRows] + offset + n / kAskedRows * kLine),
                             _MM_HINT_NTA);
            }
            Floats weights[kAbreast];
#pragma GCC unroll 4
            for (int i = 0; i < kAbreast; ++i) {
                weights[i] = e % 2 == 0 ? V::low_halves(words[i][e / 2]) : V::high_halves(words[i][e / 2]);
            }
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
                Floats activation = V::load(x + (e * kTokens + t) * kWidth);
                if (kAbreast > 1) {
                    // In a register, not loaded anew for each row. And the lines are asked for element by element, not
                    // all at once where the compiler would have them (down at 8 tokens takes a tenth longer).
                    if (t == 0) {
                        asm volatile("" : "+v"(activation), "+r"(offset));
                    } else {
                        asm("" : "+v"(activation));
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < kAbreast; ++i) {
                    Floats& dot = dots[i * kTokens + t];
                    dot = e == 0 ? weights[i] * activation : V::fma(weights[i], activation, dot);
                }
            }
        }
    }
};

}  // namespace
}  // namespace strata::cpu
