// The read with AVX-512. Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma: see read_vector.hpp for what
// this file must not contain.
#if defined(__x86_64__)

#include "cpu/read_vector.hpp"

namespace strata::cpu {
namespace {

struct Vector512 {
    using Floats = __m512;
    using Words = __m512i;
    static constexpr int kWidth = 16;
    static constexpr int kNearTokens = 8;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats broadcast(float v) { return _mm512_set1_ps(v); }
    static Floats load(const float* p) { return _mm512_loadu_ps(p); }
    static Floats canonical(Floats v) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), v,
                                    _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kNanBits))));
    }
    static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats low_halves(Words w) { return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, w, 16)); }
    static Floats high_halves(Words w) {
        return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }

    // The chunk at `offset` of each row: its word w of the rows in order comes into words[0][w].
    static void load(const std::uint16_t* const* quad, std::int64_t stride, std::int64_t offset, Words (&words)[1][4]) {
        const auto quarter = [&](int q, int i) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(quad[q] + i * stride + offset));
        };
        for (int i = 0; i < 4; ++i) {
            Words v = _mm512_castsi128_si512(quarter(0, i));
            v = _mm512_maskz_inserti32x4(kAll, v, quarter(1, i), 1);
            v = _mm512_maskz_inserti32x4(kAll, v, quarter(2, i), 2);
            words[0][i] = _mm512_maskz_inserti32x4(kAll, v, quarter(3, i), 3);
        }
        transpose(words[0]);
    }

    // The same for the four chunks from `offset` on. Each row is loaded once: lines of 16 rows 20 kB apart are in one
    // set of the first cache, which does not hold as many.
    static void load(const std::uint16_t* const* quad, std::int64_t stride, std::int64_t offset, Words (&words)[4][4]) {
        for (int i = 0; i < 4; ++i) {
            const auto row = [&](int q) { return _mm512_loadu_si512(quad[q] + i * stride + offset); };
            const Words even_low = _mm512_maskz_shuffle_i32x4(kAll, row(0), row(1), 0x88);
            const Words odd_low = _mm512_maskz_shuffle_i32x4(kAll, row(0), row(1), 0xdd);
            const Words even_high = _mm512_maskz_shuffle_i32x4(kAll, row(2), row(3), 0x88);
            const Words odd_high = _mm512_maskz_shuffle_i32x4(kAll, row(2), row(3), 0xdd);
            words[0][i] = _mm512_maskz_shuffle_i32x4(kAll, even_low, even_high, 0x88);
            words[1][i] = _mm512_maskz_shuffle_i32x4(kAll, odd_low, odd_high, 0x88);
            words[2][i] = _mm512_maskz_shuffle_i32x4(kAll, even_low, even_high, 0xdd);
            words[3][i] = _mm512_maskz_shuffle_i32x4(kAll, odd_low, odd_high, 0xdd);
        }
        for (auto& chunk : words) transpose(chunk);
    }

    // Few tokens: a bundle of a row, its word w of the chunks into words[w]. (As a call, which GCC makes of it, it
    // hands the words over in memory: up of 8 tokens takes a tenth longer.)
    __attribute__((always_inline)) static void load(const std::uint16_t* row, Words (&words)[4]) {
        for (int i = 0; i < 4; ++i) words[i] = _mm512_loadu_si512(row + 32 * i);
        transpose(words);
    }
    static std::int64_t element(std::int64_t chunk) { return chunk % 4 * 4 + chunk / 4; }

    // Activations of a bundle: element e of its chunks into dealt[e].
    static void deal(const float* values, Floats (&dealt)[kChunk]) {
        Words low[4], high[4];
        for (int i = 0; i < 4; ++i) {
            const Words a = _mm512_loadu_si512(values + 32 * i), b = _mm512_loadu_si512(values + 32 * i + 16);
            low[i] = _mm512_maskz_shuffle_i32x4(kAll, a, b, 0x88);
            high[i] = _mm512_maskz_shuffle_i32x4(kAll, a, b, 0xdd);
        }
        transpose(low);
        transpose(high);
        for (int i = 0; i < 4; ++i) {
            dealt[i] = _mm512_castsi512_ps(low[i]);
            dealt[i + 4] = _mm512_castsi512_ps(high[i]);
        }
    }

    // The same of kWidth float4s, dealt as chunks are.
    static void deal(const float* values, Floats (&dealt)[4]) {
        Words words[4];
        for (int i = 0; i < 4; ++i) words[i] = _mm512_loadu_si512(values + 16 * i);
        transpose(words);
        for (int i = 0; i < 4; ++i) dealt[i] = _mm512_castsi512_ps(words[i]);
    }

    // Of a bundle of which `count` weights are there, the rest being 0.
    struct Part {
        __mmask16 mask[4];
    };
    static Part part(std::int64_t count) {
        Part part;
        for (int i = 0; i < 4; ++i) {
            const std::int64_t words = count / 2 - 16 * i;
            part.mask[i] = static_cast<__mmask16>(words >= 16 ? 0xffffu : words <= 0 ? 0u : (1u << words) - 1u);
        }
        return part;
    }
    __attribute__((always_inline)) static void load_part(const std::uint16_t* row, const Part& part,
                                                         Words (&words)[4]) {
        for (int i = 0; i < 4; ++i) words[i] = _mm512_maskz_loadu_epi32(part.mask[i], row + 32 * i);
        transpose(words);
    }

    // Half a bundle at most of row a, in the elements where that is in a whole one, and of row b, kOtherTail farther.
    static constexpr int kOtherTail = 2;
    __attribute__((always_inline)) static void load_tails(const std::uint16_t* a, const std::uint16_t* b,
                                                          const Part& part, Words (&words)[4]) {
        for (int i = 0; i < 2; ++i) {
            words[i] = _mm512_maskz_loadu_epi32(part.mask[i], a + 32 * i);
            words[i + 2] = _mm512_maskz_loadu_epi32(part.mask[i], b + 32 * i);
        }
        transpose(words);
    }
    static void add_tails(Floats& a, Floats& b, Floats dots) {
        a = _mm512_mask_add_ps(a, 0x3333, a, dots);
        b = _mm512_mask_add_ps(b, 0x3333, b, _mm512_maskz_shuffle_ps(kAll, dots, dots, 0x4e));
    }

    // The last four stages of the xor tree: the first of them for two rows, then the others, row 2 i and 2 i + 1 being
    // in pair(i).
    static Floats pair(Floats a, Floats b) {
        const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        return _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAll64, c, d)) +
               _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAll64, c, d));
    }
    template <class Pair>
    static Floats tree(const Pair& pair) {
        Floats v[4];
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm512_maskz_shuffle_ps(kAll, pair(2 * i), pair(2 * i + 1), 0x88) +
                   _mm512_maskz_shuffle_ps(kAll, pair(2 * i), pair(2 * i + 1), 0xdd);
        }
        for (int i = 0; i < 2; ++i) {
            v[i] = _mm512_maskz_shuffle_f32x4(kAll, v[2 * i], v[2 * i + 1], 0x44) +
                   _mm512_maskz_shuffle_f32x4(kAll, v[2 * i], v[2 * i + 1], 0xee);
        }
        return _mm512_maskz_shuffle_f32x4(kAll, v[0], v[1], 0x88) + _mm512_maskz_shuffle_f32x4(kAll, v[0], v[1], 0xdd);
    }

    // Rows of few tokens that are read together: 16 dots and what they are made of fit into the registers.
    static constexpr int rows_abreast(int tokens) { return tokens > 4 ? 2 : 4; }

  private:
    // All elements, as a mask: GCC 12 warns about its own headers in the forms without one. The code is the same.
    static constexpr __mmask16 kAll = 0xffff;
    static constexpr __mmask8 kAll64 = 0xff;

    // 4 x 4 words within each quarter.
    static void transpose(Words (&v)[4]) {
        const Words a = _mm512_maskz_unpacklo_epi32(kAll, v[0], v[1]);
        const Words b = _mm512_maskz_unpackhi_epi32(kAll, v[0], v[1]);
        const Words c = _mm512_maskz_unpacklo_epi32(kAll, v[2], v[3]);
        const Words d = _mm512_maskz_unpackhi_epi32(kAll, v[2], v[3]);
        v[0] = _mm512_maskz_unpacklo_epi64(kAll64, a, c);
        v[1] = _mm512_maskz_unpackhi_epi64(kAll64, a, c);
        v[2] = _mm512_maskz_unpacklo_epi64(kAll64, b, d);
        v[3] = _mm512_maskz_unpackhi_epi64(kAll64, b, d);
    }
};

}  // namespace

constexpr Steps kAvx512 = vector_steps<Vector512>("avx512");

}  // namespace strata::cpu

#endif
