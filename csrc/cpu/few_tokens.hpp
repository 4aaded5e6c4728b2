// The sums of up to V::kWidth rows for few tokens: reading the weights is what takes the time. A few rows at a time are
// read in the order of memory, and each line of theirs is asked for ahead.
//
// An element of a vector is a lane: V::kWidth neighbouring chunks of a row, a bundle, meet the same chunks of a token,
// chunk k in element V::element(k). So the sums of a row are kVectors vectors a token; the first stages of the xor tree
// are between those, the others (V::tree) within them.
#pragma once

#include <immintrin.h>

#include <cstddef>
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

    // `count` values from `index` on, of one chunk.
    static void put(const Activations& x, const Group& group, int t, std::int64_t index, const float* values,
                    int count) {
        const std::int64_t chunk = index / kChunk;
        const std::int64_t bundle = chunk / kWidth;
        float* const to = at(x, group, t, bundle, static_cast<int>(index % kChunk)) + V::element(chunk % kWidth);
        const std::int64_t stride = group.count * kWidth;
        for (int i = 0; i < count; ++i) to[i * stride] = values[i];
        if (tails_share(x) && bundle == x.chunks() / kWidth) {
            for (int i = 0; i < count; ++i) to[i * stride + V::kOtherTail] = values[i];
        }
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
        constexpr float kNone[kChunk] = {};
        for (std::int64_t i = x.chunks() * kChunk; i % multiple != 0; i += kChunk) {
            for (int t = 0; t < group.count; ++t) put(x, group, t, i, kNone, kChunk);
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
    // for so few tokens that these are little beside the weights, a row is read at once. From kCrowdedTokens on the
    // sums take so much of that cache that parts are half as long, and those of the next one are asked for.
    static constexpr std::int64_t kShortWeights = 1024;
    static constexpr std::int64_t kPartWeights = 512;
    static constexpr int kAtOnce = 2;
    static constexpr int kCrowdedTokens = 6;

    // Asked for so many weights ahead. Of parts twice, all rows ahead and again kNearRows before: rows that are a
    // multiple of 4 kB apart share the sets of the first cache, which does not keep a part of all of them.
    static constexpr std::int64_t kAheadAtOnce = 3072;
    static constexpr std::int64_t kNearRows = kRows / 4;
    // Of short rows so many behind the rows that come next.
    static constexpr std::int64_t kAheadShort = 2560;

    static constexpr int kLine = 64 / sizeof(std::uint16_t);
    static constexpr int kLines = kBundle / kLine;

    static bool short_rows(const Activations& x) { return x.chunks() * kChunk < kShortWeights; }

    // Whether the last bundles of two rows, which have at most half their chunks, are one vector.
    static bool tails_share(const Activations& x) {
        const std::int64_t tail = x.chunks() % kWidth;
        return V::kOtherTail > 0 && short_rows(x) && tail > 0 && tail <= kWidth / 2;
    }

    // Of kHeld rows, read kAbreast at a time: vector v of the sums of row `row` and token t. What a step writes lies
    // together. (Token by token, a page each, it takes a fifth longer at 8 tokens.)
    template <int kTokens, int kHeld>
    struct Sums {
        static constexpr int kAbreast = V::rows_abreast(kTokens);
        static constexpr int kDots = kAbreast * kTokens;
        static_assert(kAbreast % 2 == 0 && kHeld % kAbreast == 0);

        void clear() {
            Floats* const sum = of[0][0];
#pragma GCC unroll 1
            for (std::size_t i = 0; i < sizeof of / sizeof *sum; ++i) sum[i] = V::zero();
        }
        Floats* step(std::int64_t row, std::int64_t v) { return of[row / kAbreast][v]; }
        Floats at(std::int64_t row, int t, std::int64_t v) const {
            return of[row / kAbreast][v][row % kAbreast * kTokens + t];
        }
        // The stages of the xor tree between the vectors, of which `first` is 0.
        Floats meet(std::int64_t row, int t, Floats first) const {
            if constexpr (kVectors == 2) {
                return first + at(row, t, 1);
            } else {
                static_assert(kVectors == 4);
                return (first + at(row, t, 2)) + (at(row, t, 1) + at(row, t, 3));
            }
        }
        Floats meet(std::int64_t row, int t) const { return meet(row, t, at(row, t, 0)); }

        Floats of[kHeld / kAbreast][kVectors][kDots];
    };

    // Rows 2 i and 2 i + 1 of token t, after the first stage within vectors.
    template <int kTokens>
    using Pairs = Floats[kRows / 2][kTokens];

    // What is asked for while a bundle of kAbreast rows is multiplied: as much from each of these on.
    template <int kAbreast>
    struct Asked {
        const std::uint16_t *near[kAbreast], *far[kAbreast];
    };

    // Each way of adding is a function of its own: in one, GCC spills more (up of 2 tokens with AVX2 a fifth slower).
    // What runs once a call is not unrolled: its code would come from memory, and is waited for.
    template <int kTokens>
    static void sum_of(const Activations& x, const Rows& rows, const Rows& follows, Floats* totals) {
        // Beyond the last row it is that one once more.
        const std::uint16_t* at[kRows];
        for (std::int64_t row = 0; row < kRows; ++row) {
            at[row] = rows.first + (row < rows.count ? row : rows.count - 1) * rows.stride;
        }
        Pairs<kTokens> pairs;
        if (short_rows(x)) {
            add_short_rows<kTokens>(x, rows, follows, at, pairs);
        } else {
            add_long_rows<kTokens>(x, rows, follows, at, pairs);
        }
#pragma GCC unroll 1
        for (int t = 0; t < kTokens; ++t) totals[t] = V::tree([&](int pair) { return pairs[pair][t]; });
    }

    // What follows is asked for in the order of memory. From 3 tokens on two steps are finished, tails and all, before
    // the next two begin: 8 tokens take 0.33 ms instead of 0.38 with all steps held.
    template <int kTokens>
    __attribute__((noinline)) static void add_short_rows(const Activations& x, const Rows& rows, const Rows& follows,
                                                         const std::uint16_t* const* at, Pairs<kTokens>& pairs) {
        constexpr int kAbreast = V::rows_abreast(kTokens);
        constexpr int kHeld = kTokens <= kAtOnce ? kRows : 2 * kAbreast;
        static_assert(kRows % kHeld == 0 && kHeld % (2 * kAbreast) == 0);
        const std::int64_t whole = x.chunks() / kWidth;
        const std::int64_t rest = x.chunks() % kWidth;
        const std::uint16_t* next = follows.first;
        // Vector 0 is the one that the tail is added to: the tree takes them in any such order.
        const std::int64_t turn = kVectors - whole % kVectors;
        Sums<kTokens, kHeld> sums;
        for (std::int64_t row = 0; row < kRows; row += kHeld) {
            if (row + kHeld > rows.count || whole < kVectors) sums.clear();
            for (std::int64_t step = 0; step < kHeld && row + step < rows.count; step += kAbreast) {
                // The next page first: to find it takes longer than to read it.
                if (kTokens > kAtOnce) ask(next + kAheadShort);
                for (std::int64_t bundle = 0; bundle < whole; ++bundle) {
                    const Asked<kAbreast> asked = in_order<kAbreast>(next);
                    add<kTokens, kTokens <= kAtOnce>(x, bundle, at + row + step, asked,
                                                     sums.step(step, (bundle + turn) % kVectors));
                    next += kAbreast * kBundle;
                }
            }
            if (tails_share(x)) {
                for (int held = 0; held < kHeld; held += 2 * kAbreast) {
                    finish_shared_tails(x, next, at + row, held, sums, pairs + row / 2);
                    next += kAbreast * kBundle;
                }
                continue;
            }
            for (std::int64_t step = 0; step < kHeld && rest != 0; step += kAbreast) {
                add_tail<kTokens>(x, next, at + row + step, sums.step(step, 0));
                next += kAbreast * kBundle;
            }
            finish(sums, pairs + row / 2);
        }
    }

    template <int kTokens>
    __attribute__((always_inline)) static void add_long_rows(const Activations& x, const Rows& rows,
                                                             const Rows& follows, const std::uint16_t* const* at,
                                                             Pairs<kTokens>& pairs) {
        constexpr int kAbreast = V::rows_abreast(kTokens);
        const std::int64_t whole = x.chunks() / kWidth;
        Sums<kTokens, kRows> sums;
        if (rows.count < kRows) sums.clear();
        if constexpr (kTokens <= kAtOnce) {
            add_at_once<kTokens>(x, rows, follows, at, sums);
        } else {
            add_in_parts<kTokens>(x, rows, follows, at, sums);
        }
        for (std::int64_t row = 0; row < rows.count && x.chunks() % kWidth != 0; row += kAbreast) {
            // (Nothing is asked for: the model has no such rows.)
            add_tail<kTokens>(x, at[row], at + row, sums.step(row, whole % kVectors));
        }
        finish(sums, pairs);
    }

    template <int kTokens, int kHeld>
    __attribute__((always_inline)) static void finish(const Sums<kTokens, kHeld>& sums, Floats (*pairs)[kTokens]) {
#pragma GCC unroll 1
        for (int row = 0; row < kHeld; row += 2) {
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) pairs[row / 2][t] = V::pair(sums.meet(row, t), sums.meet(row + 1, t));
        }
    }

    template <int kAbreast>
    static Asked<kAbreast> in_order(const std::uint16_t* next) {
        Asked<kAbreast> asked;
        for (int i = 0; i < kAbreast; ++i) {
            asked.near[i] = next + i * kBundle;
            asked.far[i] = asked.near[i] + kAheadShort;
        }
        return asked;
    }

    template <int kTokens>
    __attribute__((noinline)) static void add_at_once(const Activations& x, const Rows& rows, const Rows& follows,
                                                      const std::uint16_t* const* at, Sums<kTokens, kRows>& sums) {
        constexpr int kAbreast = V::rows_abreast(kTokens);
        constexpr std::int64_t kAhead = kAheadAtOnce / kAbreast / kBundle;
        const std::int64_t whole = x.chunks() / kWidth;
        for (std::int64_t row = 0; row < rows.count; row += kAbreast) {
            const std::uint16_t* next[kAbreast];
            for (int i = 0; i < kAbreast; ++i) {
                const std::int64_t r = row + kAbreast + i;
                next[i] = (r < rows.count ? at[r] : row_of(follows, r - rows.count)) - whole * kBundle;
            }
            for (std::int64_t bundle = 0; bundle < whole; ++bundle) {
                Asked<kAbreast> asked;
                for (int i = 0; i < kAbreast; ++i) {
                    asked.near[i] = (bundle + kAhead < whole ? at[row + i] : next[i]) + (bundle + kAhead) * kBundle;
                }
                add<kTokens, false>(x, bundle, at + row, asked, sums.step(row, bundle % kVectors));
            }
        }
    }

    template <int kTokens>
    __attribute__((noinline)) static void add_in_parts(const Activations& x, const Rows& rows, const Rows& follows,
                                                       const std::uint16_t* const* at, Sums<kTokens, kRows>& sums) {
        constexpr int kAbreast = V::rows_abreast(kTokens);
        constexpr bool kCrowded = kTokens >= kCrowdedTokens;
        constexpr std::int64_t kPart = (kCrowded ? kPartWeights / 2 : kPartWeights) / kBundle;
        const std::int64_t whole = x.chunks() / kWidth;
        const std::uint16_t* after[kRows];
        for (int i = 0; i < kRows; ++i) after[i] = row_of(follows, i);
        for (std::int64_t begin = 0, end; begin < whole; begin = end) {
            end = begin + 2 * kPart <= whole ? begin + kPart : whole;
            // The next part is of these rows, and so many bundles farther.
            const std::uint16_t* const* const later = end < whole ? at : after;
            const std::int64_t farther = end < whole ? end - begin : -begin;
            for (std::int64_t row = 0; row < rows.count; row += kAbreast) {
                const std::int64_t soon = row + kNearRows;
                Asked<kAbreast> step;
                for (int i = 0; i < kAbreast; ++i) {
                    step.near[i] = soon < rows.count ? at[soon + i] : later[soon - rows.count + i] + farther * kBundle;
                    step.far[i] = later[row + i] + farther * kBundle;
                }
                for (std::int64_t bundle = begin; bundle < end; ++bundle) {
                    Asked<kAbreast> asked;
                    for (int i = 0; i < kAbreast; ++i) {
                        asked.near[i] = step.near[i] + bundle * kBundle;
                        asked.far[i] = step.far[i] + bundle * kBundle;
                    }
                    if constexpr (kCrowded) {
                        // Each step asks for its share.
                        const float* const next = x.data() + ((bundle + farther) * kRows + row) * kChunk * kTokens;
#pragma GCC unroll 8
                        for (int i = 0; i < kAbreast * kChunk * kTokens; i += kLine / 2) {
                            _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T0);
                        }
                    }
                    add<kTokens, true>(x, bundle, at + row, asked, sums.step(row, bundle % kVectors));
                }
            }
        }
    }

    static const std::uint16_t* row_of(const Rows& rows, std::int64_t row) {
        return rows.first + (row < rows.count ? row : 0) * rows.stride;
    }

    // Adds a whole bundle of the rows of a step; the first ones to nothing.
    template <int kTokens, bool kFar>
    __attribute__((always_inline)) static void add(const Activations& x, std::int64_t bundle,
                                                   const std::uint16_t* const* at,
                                                   const Asked<V::rows_abreast(kTokens)>& asked, Floats* sums) {
        constexpr int kAbreast = V::rows_abreast(kTokens), kDots = kAbreast * kTokens;
        const std::int64_t offset = bundle * kBundle;
        Words words[kAbreast][4];
#pragma GCC unroll 4
        for (int i = 0; i < kAbreast; ++i) V::load(at[i] + offset, words[i]);
        Floats dots[kDots];
        multiply<kAbreast, kTokens, kFar>(words, x.data() + offset * kTokens, asked, dots);
        if (bundle < kVectors) {
#pragma GCC unroll 16
            for (int i = 0; i < kDots; ++i) sums[i] = V::zero() + dots[i];
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < kDots; ++i) sums[i] = sums[i] + dots[i];
        }
    }

    // Adds what is left of the rows of a step behind the whole bundles.
    template <int kTokens>
    __attribute__((noinline)) static void add_tail(const Activations& x, const std::uint16_t* next,
                                                   const std::uint16_t* const* at, Floats* sums) {
        constexpr int kAbreast = V::rows_abreast(kTokens), kDots = kAbreast * kTokens;
        const std::int64_t offset = x.chunks() / kWidth * kBundle;
        const auto part = V::part(x.chunks() * kChunk - offset);
        Words words[kAbreast][4];
#pragma GCC unroll 4
        for (int i = 0; i < kAbreast; ++i) V::load_part(at[i] + offset, part, words[i]);
        Floats dots[kDots];
        multiply<kAbreast, kTokens, kTokens <= kAtOnce>(words, x.data() + offset * kTokens, in_order<kAbreast>(next),
                                                        dots);
#pragma GCC unroll 16
        for (int i = 0; i < kDots; ++i) sums[i] = sums[i] + dots[i];
    }

    // The same of two steps, where a vector has those of two rows, and what finish() does.
    template <int kTokens, int kHeld>
    __attribute__((always_inline)) static void finish_shared_tails(const Activations& x, const std::uint16_t* next,
                                                                   const std::uint16_t* const* at, int first,
                                                                   const Sums<kTokens, kHeld>& sums,
                                                                   Floats (*pairs)[kTokens]) {
        if constexpr (V::kOtherTail > 0) {
            constexpr int kAbreast = V::rows_abreast(kTokens), kDots = kAbreast * kTokens;
            const std::int64_t offset = x.chunks() / kWidth * kBundle;
            const auto part = V::part(x.chunks() * kChunk - offset);
            Words words[kAbreast][4];
#pragma GCC unroll 4
            for (int i = 0; i < kAbreast; ++i) {
                V::load_tails(at[first + 2 * i] + offset, at[first + 2 * i + 1] + offset, part, words[i]);
            }
            Floats dots[kDots];
            multiply<kAbreast, kTokens, kTokens <= kAtOnce>(words, x.data() + offset * kTokens,
                                                            in_order<kAbreast>(next), dots);
#pragma GCC unroll 16
            for (int i = 0; i < kDots; ++i) {
                const int row = first + i / kTokens * 2, t = i % kTokens;
                Floats a = sums.at(row, t, 0), b = sums.at(row + 1, t, 0);
                V::add_tails(a, b, dots[i]);
                pairs[row / 2][t] = V::pair(sums.meet(row, t, a), sums.meet(row + 1, t, b));
            }
        }
    }

    // (Were this not inlined early, GCC would take it for a function that does nothing.)
    __attribute__((always_inline)) static void ask(const std::uint16_t* line) {
        _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_NTA);
    }

    // dots[i * kTokens + t]: of a bundle of row i and token t. Meanwhile as many lines are asked for, near and, with
    // kFar, far.
    template <int kAbreast, int kTokens, bool kFar>
    __attribute__((always_inline)) static void multiply(const Words (&words)[kAbreast][4], const float* x,
                                                        const Asked<kAbreast>& asked,
                                                        Floats (&dots)[kAbreast * kTokens]) {
        std::int64_t none = 0;
#pragma GCC unroll 8
        for (int e = 0; e < kChunk; ++e) {
            constexpr int kAsked = kAbreast * kLines;
#pragma GCC unroll 4
            for (int n = e * kAsked / kChunk; n < (e + 1) * kAsked / kChunk; ++n) {
                const std::int64_t line = n % kLines * kLine + none;
                ask(asked.near[n / kLines] + line);
                if (kFar) ask(asked.far[n / kLines] + line);
            }
            Floats weights[kAbreast];
#pragma GCC unroll 4
            for (int i = 0; i < kAbreast; ++i) {
                weights[i] = e % 2 == 0 ? V::low_halves(words[i][e / 2]) : V::high_halves(words[i][e / 2]);
            }
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
                Floats activation = V::load(x + (e * kTokens + t) * kWidth);
                // In a register, not loaded anew for each row. And the lines are asked for element by element, not all
                // at once where the compiler would have them (down at 8 tokens takes a tenth longer).
                if (t == 0) {
                    asm volatile("" : "+v"(activation), "+r"(none));
                } else {
                    asm("" : "+v"(activation));
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
