// The sums of 2 * V::kWidth rows for many tokens: arithmetic is what takes the time. Each weight is brought into place
// once, in a packed copy that the nearest caches hold, and then meets the groups of tokens in turn; an activation that
// is broadcast meets two vectors of rows; a lane's sums stay in registers for its whole chain.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

template <class V>
struct ManyTokens {
    using Floats = typename V::Floats;
    using Words = typename V::Words;
    static constexpr int kVectors = 2;
    static constexpr int kRows = kVectors * V::kWidth;

    // In quads of rows `stride` apart.
    struct Rows {
        const std::uint16_t* quad[kRows / 4];
        std::int64_t stride;
    };

    // `count` values of token t of the group from `index` on, of one chunk.
    static void put(const Activations& x, const Group& group, int t, std::int64_t index, const float* values,
                    int count) {
        float* const to = x.at(group, index / kChunk) + t * kChunk + index % kChunk;
        for (int i = 0; i < count; ++i) to[i] = values[i];
    }

    // Of the rows of the first one or two `vectors`. finish(group, sums): sums[t * vectors + v] are those of token t of
    // the group and vector v of the rows. `jump` weights on are the rows that follow.
    //
    // `packed` and `slots` take 344 kB of the thread's stack with AVX-512, 172 kB with AVX2.
    template <class Finish>
    static void sum(const Pass& pass, const Activations& x, const Rows& rows, std::int64_t jump, int vectors,
                    const Finish& finish) {
        const bool whole = x.chunks() <= kWhole;
        const std::int64_t steps = x.steps(0);
        const std::int64_t limit = whole ? steps : kPartSteps;
        const std::int64_t parts = (steps + limit - 1) / limit;
        Words packed[kPacked];
        Floats slots[kPassTokens / kGroupTokens][kLanes * kSlot];
        for (std::int64_t p = 0; p < parts; ++p) {
            const Part part{p * steps / parts, (p + 1) * steps / parts, p + 1 == parts};
            const Part follows =
                part.last ? Part{0, steps / parts, false} : Part{part.end, (p + 2) * steps / parts, false};
            const std::int64_t next = follows.begin * kLanes * kChunk + (part.last ? jump : 0);
            for (int quad = 0; quad < kQuads; quad += whole ? kQuads : 1) {
                const bool more = !whole && quad + 1 < kQuads;
                const std::int64_t first = more ? (part.begin * kLanes + kVisits.lane[quad + 1]) * kChunk : next;
                const Part& asked = more ? part : follows;
                Ahead ahead = whole ? Ahead(rows, first, kQuad * kChunk, (x.chunks() + kQuad - 1) / kQuad,
                                            x.chunks() * pass.groups())
                                    : Ahead(rows, first, kLanes * kChunk, asked.end - asked.begin,
                                            (part.end - part.begin) * kQuad * pass.groups());
                Turn turns[kLanes];
                const int last = plan(x, part, whole, quad, vectors, packed, turns) - 1;
                for (int q = quad; q < (whole ? kQuads : quad + 1); ++q) {
                    pack(x, part, whole, kVisits.lane[q], vectors, rows, packed);
                }
                for (std::int64_t g = 0; g < pass.groups(); ++g) {
                    const Group group = pass.group(g);
                    Floats* const own = slots[whole ? 0 : g];
                    instance(vectors, group.count)(turns, last, part.begin > 0, x.at(group, 0), own, ahead);
                    if (part.last && (whole || quad == kQuads - 1)) finish(group, own + turns[last].slot * kSlot);
                }
            }
        }
    }

  private:
    // Rows of at most kWhole chunks are packed whole; of longer ones the lanes of a quad, which share cache lines, and
    // so many steps of them. (Shorter parts, of all lanes, let the weights stream from memory in their order: slower
    // from 16 tokens on.)
    static constexpr int kWhole = 64;
    static constexpr int kPartSteps = 40;
    static constexpr int kQuad = 4;
    static constexpr int kQuads = kLanes / kQuad;
    static constexpr int kChunkWords = 4;
    static constexpr int kPacked = kQuad * kPartSteps * kVectors * kChunkWords;
    static_assert(kWhole <= kQuad * kPartSteps);

    // The sums of a group. A visit's are in its own slot until another visit's have met them; of whole rows, which come
    // one group after the other, only those that wait are kept, one slot a level of the tree.
    static constexpr int kSlot = kGroupTokens * kVectors;

    struct Part {
        std::int64_t begin, end;  // steps
        bool last;
    };

    struct Visits {
        int lane[kLanes] = {};
        constexpr Visits() {
            for (int visit = 0; visit < kLanes; ++visit) lane[visit] = visited_lane(visit);
        }
    };
    static constexpr Visits kVisits{};

    // A visit to a lane: adds `steps` dots to the lane's sum and, at the end of the chain, that to those that have
    // waited for it.
    struct Turn {
        const Words* weights;
        std::int64_t place;  // of the activations' first chunk
        std::int64_t steps;
        int slot;
        int waiting[5], merges;  // slots
    };

    static int plan(const Activations& x, const Part& part, bool whole, int quad, int vectors, const Words* packed,
                    Turn* turns) {
        // Where lanes 16 to 31 have one chunk at most, it is one more step of lane - 16, whose sum it meets first:
        // a + (0 + dot) is a + dot, as `a` started at +0 and is never -0.
        const bool paired = whole && x.chunks() <= kLanes + kLanes / 2;
        int count = 0;
        for (int visit = whole ? paired : quad; visit < kLanes; visit += whole ? 1 + paired : kQuads) {
            const int lane = kVisits.lane[visit];
            const int first = paired ? lane - kLanes / 2 : lane;
            const std::int64_t end = part.end < x.steps(lane) ? part.end : x.steps(lane);
            Turn& turn = turns[count++];
            turn.weights = packed + (whole ? x.place(first) : lane % kQuad * kPartSteps) * vectors * kChunkWords;
            turn.place = x.place(first) + part.begin;
            turn.steps = paired ? x.steps(first) + x.steps(lane) : end - part.begin;
            turn.merges = 0;
            int level = paired;
            for (; part.last && (visit >> level & 1); ++level) {
                turn.waiting[turn.merges++] = whole ? level : visit - (1 << level);
            }
            turn.slot = whole ? level : visit;
        }
        return count;
    }

    // The chunks of a part from `lane` and its three neighbours.
    static void pack(const Activations& x, const Part& part, bool whole, int lane, int vectors, const Rows& rows,
                     Words* packed) {
        for (std::int64_t step = part.begin; step < part.end; ++step) {
            const std::int64_t chunk = step * kLanes + lane;
            const auto to = [&](int k, int r) {
                const std::int64_t place = whole ? x.place(chunk + k) : k * kPartSteps + step - part.begin;
                return packed + (place * vectors + r) * kChunkWords;
            };
            for (int r = 0; r < vectors; ++r) {
                if (chunk + kQuad <= x.chunks()) {
                    Words words[kQuad][kChunkWords];
                    V::load(rows.quad + r * (V::kWidth / 4), rows.stride, chunk * kChunk, words);
                    for (int k = 0; k < kQuad; ++k) {
                        for (int i = 0; i < kChunkWords; ++i) to(k, r)[i] = words[k][i];
                    }
                } else {
                    for (int k = 0; chunk + k < x.chunks(); ++k) {
                        Words words[1][kChunkWords];
                        V::load(rows.quad + r * (V::kWidth / 4), rows.stride, (chunk + k) * kChunk, words);
                        for (int i = 0; i < kChunkWords; ++i) to(k, r)[i] = words[0][i];
                    }
                }
            }
        }
    }

    // Asks the second cache for `lines` lines of each row, `apart` weights apart from `first` on, evenly over `turns`:
    // hardware does not see a stream in the order in which rows are packed, and what is asked for much earlier does not
    // stay.
    class Ahead {
      public:
        Ahead(const Rows& rows, std::int64_t first, std::int64_t apart, std::int64_t lines, std::int64_t turns)
            : rows_(&rows),
              first_(first),
              apart_(apart),
              length_(lines * apart),
              share_((lines * kRows + turns - 1) / turns) {
            begin_row();
        }
        void ask() {
            for (std::int64_t i = 0; i < share_ && row_ < kRows; ++i) {
                _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
                next_ += apart_;
                if (next_ >= end_ && ++row_ < kRows) begin_row();
            }
        }

      private:
        void begin_row() {
            next_ = rows_->quad[row_ / 4] + row_ % 4 * rows_->stride + first_;
            end_ = next_ + length_;
        }
        const Rows* rows_;
        std::int64_t first_, apart_, length_, share_;
        int row_ = 0;
        const std::uint16_t *next_, *end_;
    };

    template <int kUsed, int kTokens>
    static void take_turns(const Turn* turns, int last, bool resume, const float* activations, Floats* slots,
                           Ahead& shared_ahead) {
        constexpr int kNear = kTokens < V::kNearTokens ? kTokens : V::kNearTokens;
        static_assert(kTokens <= 2 * kNear);
        Ahead ahead = shared_ahead;  // in registers
        for (const Turn* turn = turns; turn <= turns + last; ++turn) {
            take_turn<kUsed, kTokens, 0, kNear>(*turn, resume, activations, slots, ahead);
            if constexpr (kNear < kTokens) {
                take_turn<kUsed, kTokens, kNear, kTokens - kNear>(*turn, resume, activations, slots, ahead);
            }
        }
        shared_ahead = ahead;
    }

    // For kCount of a group's kTokens tokens, from token kFirst on.
    template <int kUsed, int kTokens, int kFirst, int kCount>
    __attribute__((always_inline)) static void take_turn(const Turn& turn, bool resume, const float* activations,
                                                         Floats* slots, Ahead& ahead) {
        constexpr int kSums = kCount * kUsed;
        Floats* const own = slots + turn.slot * kSlot + kFirst * kUsed;
        Floats sums[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sums[i] = resume ? own[i] : V::zero();
        const Words* words = turn.weights;
        const float* x = activations + (turn.place * kTokens + kFirst) * kChunk;
        for (std::int64_t step = 0; step < turn.steps; ++step) {
            if (kFirst == 0) ahead.ask();
            add_dots<kUsed, kSums>(words, x, sums);
            words += kUsed * kChunkWords;
            x += kTokens * kChunk;
        }
        for (int m = 0; m < turn.merges; ++m) {
            const Floats* waiting = slots + turn.waiting[m] * kSlot + kFirst * kUsed;
#pragma GCC unroll 16
            for (int i = 0; i < kSums; ++i) sums[i] = waiting[i] + sums[i];
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) own[i] = sums[i];
    }

    // Adds the dots of a chunk of kUsed vectors of rows: sums[t * kUsed + v].
    template <int kUsed, int kSums>
    __attribute__((always_inline)) static void add_dots(const Words* words, const float* x, Floats (&sums)[kSums]) {
        Floats dots[kSums];
#pragma GCC unroll 8
        for (int e = 0; e < kChunk; ++e) {
            Floats weights[kUsed];
#pragma GCC unroll 2
            for (int v = 0; v < kUsed; ++v) {
                const Words word = words[v * kChunkWords + e / 2];
                weights[v] = e % 2 == 0 ? V::low_halves(word) : V::high_halves(word);
            }
#pragma GCC unroll 16
            for (int i = 0; i < kSums; ++i) {
                const Floats activation = V::broadcast(x[i / kUsed * kChunk + e]);
                dots[i] = e == 0 ? weights[i % kUsed] * activation : V::fma(weights[i % kUsed], activation, dots[i]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sums[i] = sums[i] + dots[i];
    }

    using Instance = void (*)(const Turn*, int, bool, const float*, Floats*, Ahead&);
    static Instance instance(int vectors, int tokens) {
        static constexpr Instance kInstances[kVectors][kGroupTokens] = {
            {take_turns<1, 1>, take_turns<1, 2>, take_turns<1, 3>, take_turns<1, 4>, take_turns<1, 5>, take_turns<1, 6>,
             take_turns<1, 7>, take_turns<1, 8>},
            {take_turns<2, 1>, take_turns<2, 2>, take_turns<2, 3>, take_turns<2, 4>, take_turns<2, 5>, take_turns<2, 6>,
             take_turns<2, 7>, take_turns<2, 8>}};
        return kInstances[vectors - 1][tokens - 1];
    }
};

}  // namespace
}  // namespace strata::cpu
