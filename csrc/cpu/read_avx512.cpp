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
    // Two chunks, each `offset` values from where `at` says.
    static Floats load_chunks(const float* const (&at)[2], std::int64_t offset) {
        return _mm512_maskz_insertf32x8(kAll, _mm512_castps256_ps512(_mm256_loadu_ps(at[0] + offset)),
                                        _mm256_loadu_ps(at[1] + offset), 1);
    }
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
