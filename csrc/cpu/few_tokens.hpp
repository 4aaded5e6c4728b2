// The sums of V::kWidth rows for few tokens: reading the weights is what takes the time. Each row is read once, from
// end to end, and the sums of all lanes are kept.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/rows.hpp"
#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

template <class V>
struct FewTokens {
    using Floats = typename V::Floats;
    using Words = typename V::Words;
    static constexpr int kRows = V::kWidth;
    using Rows = RowsOf<kRows>;

    // finish(group, sums): vector t has the sums of token t of the group. `jump` weights on are the rows that follow.
    template <class Finish>
    static void sum(const Pass& pass, const Activations& x, const Rows& rows, std::int64_t jump, int,
                    const Finish& finish) {
        using Instance = void (*)(const Pass&, const Activations&, const Rows&, std::int64_t, const Finish&);
        static constexpr Instance kInstances[] = {sum_of<1, Finish>, sum_of<2, Finish>, sum_of<3, Finish>,
                                                  sum_of<4, Finish>, sum_of<5, Finish>, sum_of<6, Finish>,
                                                  sum_of<7, Finish>, sum_of<8, Finish>};
        static_assert(sizeof kInstances / sizeof *kInstances == kFewTokens);
        kInstances[pass.args.tokens - 1](pass, x, rows, jump, finish);
    }

  private:
    template <int kTokens, class Finish>
    static void sum_of(const Pass& pass, const Activations& x, const Rows& rows, std::int64_t jump,
                       const Finish& finish) {
        Floats lanes[kLanes][kTokens];
        for (std::int64_t lane = x.chunks(); lane < kLanes; ++lane) {
            for (Floats& v : lanes[lane]) v = V::zero();
        }
        const Group group = pass.group(0);
        const float* activations = x.at(group, 0);
        const std::int64_t first = x.chunks() < kLanes ? x.chunks() : kLanes;
        add_chunks<kTokens, true>(rows, jump, 0, first, x.chunks(), activations, lanes);
        add_chunks<kTokens, false>(rows, jump, first, x.chunks(), x.chunks(), activations, lanes);
        Floats sums[kTokens];
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
        finish(group, sums);
    }

    // Adds the dots of chunks [begin, end) to their lanes. kFirst: to zero.
    //
    // A cache line of each row, four chunks, at once: lines of rows 20 kB apart drive each other out of the first cache
    // before their other chunks are asked for.
    template <int kTokens, bool kFirst>
    __attribute__((always_inline)) static void add_chunks(const Rows& rows, std::int64_t jump, std::int64_t begin,
                                                          std::int64_t end, std::int64_t chunks,
                                                          const float* activations, Floats (&lanes)[kLanes][kTokens]) {
        std::int64_t chunk = begin;
        for (; chunk + 4 <= end; chunk += 4) {
            add_dots_of<4, kTokens, kFirst>(rows, jump, chunk, chunks, activations, lanes);
        }
        for (; chunk < end; ++chunk) {
            add_dots_of<1, kTokens, kFirst>(rows, jump, chunk, chunks, activations, lanes);
        }
    }

    // Meanwhile the second cache is asked for what is kAhead chunks farther in the rows and, past their ends, for the
    // next rows: hardware does not see a stream in this order (without it, up takes twice as long). A line of weights
    // is four chunks, so each chunk's turn asks for a quarter of the rows.
    static constexpr std::int64_t kAhead = 64;

    template <int kChunks, int kTokens, bool kFirst>
    __attribute__((always_inline)) static void add_dots_of(const Rows& rows, std::int64_t jump, std::int64_t chunk,
                                                           std::int64_t chunks, const float* activations,
                                                           Floats (&lanes)[kLanes][kTokens]) {
        Words words[kChunks][4];
        V::load(rows.quad, rows.stride, chunk * kChunk, words);
        const std::int64_t near = chunks < kAhead ? chunks : kAhead;
        const std::int64_t ahead = (chunk + near) * kChunk + (chunk + near < chunks ? 0 : jump - chunks * kChunk);
#pragma GCC unroll 4
        for (int k = 0; k < kChunks; ++k) {
            const std::int64_t at = chunk + k;
            for (const std::uint16_t* quad : rows.quad) {
                _mm_prefetch(reinterpret_cast<const char*>(quad + at % 4 * rows.stride + ahead), _MM_HINT_T1);
            }
            add_dots<kTokens, kFirst>(words[k], activations + at * kChunk * kTokens, lanes[at % kLanes]);
        }
    }

    template <int kTokens, bool kFirst>
    __attribute__((always_inline)) static void add_dots(const Words (&words)[4], const float* activations,
                                                        Floats (&sums)[kTokens]) {
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
};

}  // namespace
}  // namespace strata::cpu
