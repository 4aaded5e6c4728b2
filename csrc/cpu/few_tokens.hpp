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
    static constexpr std::int64_t kPart = kPartWeights / kBundle;  // bundles
    static_assert(kPart > 1);
    static constexpr int kAtOnce = 2;

    // Asked for so many weights ahead. Of parts twice, all rows ahead and again kNearRows before: rows that are a
    // multiple of 4 kB apart share the sets of the first cache, which does not keep a part of all of them.
    static constexpr std::int64_t kAheadAtOnce = 3072;
    static constexpr std::int64_t kNearRows = kRows / 4;
    // Of short rows so many behind the rows that come next.
    static constexpr std::int64_t kAheadShort = 2560;

    static constexpr int kLine = 64 / sizeof(std::uint16_t);
    static constexpr int kLines = kBundle / kLine;

    // Whether the last bundles of two rows, which have at most half their chunks, are one vector.
    static bool tails_share(const Activations& x) {
        const std::int64_t tail = x.chunks() % kWidth;
        return V::kOtherTail > 0 && tail > 0 && tail <= kWidth / 2;
    }

    // Of kRows rows, read kAbreast at a time: vector v of the sums of row `row` and token t. What a step writes lies
    // together. (Token by token, a page each, it takes a fifth longer at 8 tokens.)
    template <int kTokens>
    struct Sums {
        static constexpr int kAbreast = V::rows_abreast(kTokens);
        static constexpr int kDots = kAbreast * kTokens;
        static_assert(kRows % (2 * kAbreast) == 0, "tails are of two steps' rows at a time");

        Floats* step(std::int64_t row, std::int64_t v) { return of[row / kAbreast][v]; }
        Floats& at(std::int64_t row, int t, std::int64_t v) {
            return of[row / kAbreast][v][row % kAbreast * kTokens + t];
        }
        // The stages of the xor tree between the vectors.
        Floats meet(std::int64_t row, int t) {
            if constexpr (kVectors == 2) {
                return at(row, t, 0) + at(row, t, 1);
            } else {
                static_assert(kVectors == 4);
                return (at(row, t, 0) + at(row, t, 2)) + (at(row, t, 1) + at(row, t, 3));
            }
        }

        Floats of[kRows / kAbreast][kVectors][kDots];
    };

    // What is asked for while a bundle of kAbreast rows is multiplied: as much from each of these on.
    template <int kAbreast>
    struct Asked {
        const std::uint16_t *near[kAbreast], *far[kAbreast];
    };

    template <int kTokens>
    static void sum_of(const Activations& x, const Rows& rows, const Rows& follows, Floats* totals) {
        constexpr int kAbreast = Sums<kTokens>::kAbreast;
        const std::int64_t whole = x.chunks() / kWidth;
        Sums<kTokens> sums;
        for (std::int64_t row = 0; row < kRows; ++row) {
            for (std::int64_t v = row < rows.count ? whole : 0; v < kVectors; ++v) {
                for (int t = 0; t < kTokens; ++t) sums.at(row, t, v) = V::zero();
            }
        }
        // Beyond the last row it is that one once more.
        const std::uint16_t* at[kRows];
        for (std::int64_t row = 0; row < kRows; ++row) {
            at[row] = rows.first + (row < rows.count ? row : rows.count - 1) * rows.stride;
        }
        if (whole < 2 * kPart) {
            add_short_rows<kTokens>(x, rows, follows, at, sums);
        } else if constexpr (kTokens <= kAtOnce) {
            add_at_once<kTokens>(x, rows, follows, at, sums);
        } else {
            add_in_parts<kTokens>(x, rows, follows, at, sums);
        }
        if (x.chunks() % kWidth != 0) {
            // Of short rows the last ones that follow: the others were asked for above. (Of long ones with a tail what
            // is far behind, for nothing: the model has none.)
            const std::uint16_t* const asked = follows.first + rows.count / kAbreast * whole * kAbreast * kBundle;
            if (tails_share(x)) {
                add_shared_tails<kTokens>(x, rows.count, asked, at, sums);
            } else {
                add_tails<kTokens>(x, rows.count, asked, at, sums);
            }
        }
        for (int t = 0; t < kTokens; ++t) totals[t] = V::tree([&](int row) { return sums.meet(row, t); });
    }

    // What follows is asked for in the order of memory.
    template <int kTokens>
    __attribute__((always_inline)) static void add_short_rows(const Activations& x, const Rows& rows,
                                                              const Rows& follows, const std::uint16_t* const* at,
                                                              Sums<kTokens>& sums) {
        constexpr int kAbreast = Sums<kTokens>::kAbreast;
        const std::int64_t whole = x.chunks() / kWidth;
        const std::uint16_t* next = follows.first;
        for (std::int64_t row = 0; row < rows.count; row += kAbreast) {
            // The next page first: to find it takes longer than to read it.
            if (kTokens > kAtOnce) ask(next + kAheadShort);
            for (std::int64_t bundle = 0; bundle < whole; ++bundle) {
                const Asked<kAbreast> asked = in_order<kAbreast>(next);
                add<kTokens, kTokens <= kAtOnce>(x, bundle, at + row, asked, sums.step(row, bundle % kVectors));
                next += kAbreast * kBundle;
            }
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
    __attribute__((always_inline)) static void add_at_once(const Activations& x, const Rows& rows, const Rows& follows,
                                                           const std::uint16_t* const* at, Sums<kTokens>& sums) {
        constexpr int kAbreast = Sums<kTokens>::kAbreast;
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
    __attribute__((always_inline)) static void add_in_parts(const Activations& x, const Rows& rows, const Rows& follows,
                                                            const std::uint16_t* const* at, Sums<kTokens>& sums) {
        constexpr int kAbreast = Sums<kTokens>::kAbreast;
        static_assert(kNearRows % kAbreast == 0);
        const std::int64_t whole = x.chunks() / kWidth;
        // The rows of this part, then those of the next one.
        const std::uint16_t* later[2 * kRows];
        for (std::int64_t begin = 0, end; begin < whole; begin = end) {
            end = begin + 2 * kPart <= whole ? begin + kPart : whole;
            for (std::int64_t i = 0; i < 2 * kRows; ++i) {
                const std::int64_t next = i - rows.count;
                later[i] = next < 0      ? at[i]
                           : end < whole ? at[next % kRows] + (end - begin) * kBundle
                                         : row_of(follows, next) - begin * kBundle;
            }
            for (std::int64_t row = 0; row < rows.count; row += kAbreast) {
                for (std::int64_t bundle = begin; bundle < end; ++bundle) {
                    Asked<kAbreast> asked;
                    for (int i = 0; i < kAbreast; ++i) {
                        asked.near[i] = later[row + kNearRows + i] + bundle * kBundle;
                        asked.far[i] = later[row + kRows + i] + bundle * kBundle;
                    }
                    add<kTokens, true>(x, bundle, at + row, asked, sums.step(row, bundle % kVectors));
                }
            }
        }
    }

    static const std::uint16_t* row_of(const Rows& rows, std::int64_t row) {
        return rows.first + (row < rows.count ? row : 0) * rows.stride;
    }

    // Adds a whole bundle of the rows of a step.
    template <int kTokens, bool kFar>
    __attribute__((always_inline)) static void add(const Activations& x, std::int64_t bundle,
                                                   const std::uint16_t* const* at,
                                                   const Asked<Sums<kTokens>::kAbreast>& asked, Floats* sums) {
        constexpr int kAbreast = Sums<kTokens>::kAbreast, kDots = Sums<kTokens>::kDots;
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

    // Adds what is left behind the whole bundles.
    template <int kTokens>
    static void add_tails(const Activations& x, std::int64_t count, const std::uint16_t* next,
                          const std::uint16_t* const* at, Sums<kTokens>& sums) {
        constexpr int kAbreast = Sums<kTokens>::kAbreast, kDots = Sums<kTokens>::kDots;
        const std::int64_t bundle = x.chunks() / kWidth;
        const std::int64_t offset = bundle * kBundle;
        const auto part = V::part(x.chunks() * kChunk - offset);
        for (std::int64_t row = 0; row < count; row += kAbreast) {
            Words words[kAbreast][4];
#pragma GCC unroll 4
            for (int i = 0; i < kAbreast; ++i) V::load_part(at[row + i] + offset, part, words[i]);
            Floats dots[kDots];
            multiply<kAbreast, kTokens, kTokens <= kAtOnce>(words, x.data() + offset * kTokens,
                                                            in_order<kAbreast>(next), dots);
            next += kAbreast * kBundle;
            Floats* const own = sums.step(row, bundle % kVectors);
#pragma GCC unroll 16
            for (int i = 0; i < kDots; ++i) own[i] = own[i] + dots[i];
        }
    }

    // The same where a vector has those of two rows.
    template <int kTokens>
    __attribute__((always_inline)) static void add_shared_tails(const Activations& x, std::int64_t count,
                                                                const std::uint16_t* next,
                                                                const std::uint16_t* const* at, Sums<kTokens>& sums) {
        if constexpr (V::kOtherTail > 0) {
            constexpr int kAbreast = Sums<kTokens>::kAbreast, kDots = Sums<kTokens>::kDots;
            const std::int64_t bundle = x.chunks() / kWidth;
            const std::int64_t offset = bundle * kBundle;
            const auto part = V::part(x.chunks() * kChunk - offset);
            for (std::int64_t row = 0; row < count; row += 2 * kAbreast) {
                Words words[kAbreast][4];
#pragma GCC unroll 4
                for (int i = 0; i < kAbreast; ++i) {
                    V::load_tails(at[row + 2 * i] + offset, at[row + 2 * i + 1] + offset, part, words[i]);
                }
                Floats dots[kDots];
                multiply<kAbreast, kTokens, kTokens <= kAtOnce>(words, x.data() + offset * kTokens,
                                                                in_order<kAbreast>(next), dots);
                next += kAbreast * kBundle;
#pragma GCC unroll 16
                for (int i = 0; i < kDots; ++i) {
                    const std::int64_t first = row + i / kTokens * 2;
                    const int t = i % kTokens;
                    V::add_tails(sums.at(first, t, bundle % kVectors), sums.at(first + 1, t, bundle % kVectors),
                                 dots[i]);
                }
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
