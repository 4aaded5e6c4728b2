// The read with AVX2 and FMA. Compiled with -mavx2 -mfma: see read_vector.hpp for what this file must not contain.
#if defined(__x86_64__)

#include "cpu/read_vector.hpp"

namespace strata::cpu {
namespace {

struct Vector256 {
    using Floats = __m256;
    using Words = __m256i;
    static constexpr int kWidth = 8;
    static constexpr int kNearTokens = 4;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats broadcast(float v) { return _mm256_set1_ps(v); }
    static Floats load(const float* p) { return _mm256_loadu_ps(p); }
    static Floats canonical(Floats v) {
        return _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kNanBits))),
                                _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats low_halves(Words w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
    static Floats high_halves(Words w) {
        return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }

    // kChunks chunks of each row: word w of chunk k of the rows in order comes into words[k][w].
    template <int kChunks>
    static void load(const std::uint16_t* const* quad, std::int64_t stride, std::int64_t offset,
                     Words (&words)[kChunks][4]) {
        for (int k = 0; k < kChunks; ++k) {
            const auto half = [&](int q, int i) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(quad[q] + i * stride + offset + k * kChunk));
            };
            for (int i = 0; i < 4; ++i) {
                words[k][i] = _mm256_inserti128_si256(_mm256_castsi128_si256(half(0, i)), half(1, i), 1);
            }
            transpose(words[k]);
        }
    }

    // Few tokens: a bundle of a row, its word w of the chunks into words[w].
    __attribute__((always_inline)) static void load(const std::uint16_t* row, Words (&words)[4]) {
        for (int i = 0; i < 4; ++i) words[i] = _mm256_loadu_si256(reinterpret_cast<const Words*>(row + 16 * i));
        transpose(words);
    }
    static std::int64_t element(std::int64_t chunk) { return chunk % 2 * 4 + chunk / 2; }

    // Activations of a bundle: element e of its chunks into dealt[e].
    static void deal(const float* values, Floats (&dealt)[kChunk]) {
        Words low[4], high[4];
        for (int i = 0; i < 4; ++i) {
            const Words a = _mm256_loadu_si256(reinterpret_cast<const Words*>(values + 16 * i));
            const Words b = _mm256_loadu_si256(reinterpret_cast<const Words*>(values + 16 * i + 8));
            low[i] = _mm256_permute2x128_si256(a, b, 0x20);
            high[i] = _mm256_permute2x128_si256(a, b, 0x31);
        }
        transpose(low);
        transpose(high);
        for (int i = 0; i < 4; ++i) {
            dealt[i] = _mm256_castsi256_ps(low[i]);
            dealt[i + 4] = _mm256_castsi256_ps(high[i]);
        }
    }

    // The same of kWidth float4s, dealt as chunks are.
    static void deal(const float* values, Floats (&dealt)[4]) {
        Words words[4];
        for (int i = 0; i < 4; ++i) words[i] = _mm256_loadu_si256(reinterpret_cast<const Words*>(values + 8 * i));
        transpose(words);
        for (int i = 0; i < 4; ++i) dealt[i] = _mm256_castsi256_ps(words[i]);
    }

    // Of a bundle of which `count` weights are there, the rest being 0.
    static std::int64_t part(std::int64_t count) { return count; }
    static void load_part(const std::uint16_t* row, std::int64_t count, Words (&words)[4]) {
        std::uint16_t copy[kWidth * kChunk] = {};
        std::memcpy(copy, row, static_cast<std::size_t>(count) * sizeof *row);
        load(copy, words);
    }
    static constexpr int kOtherTail = 0;  // no two rows share a vector

    // The last three stages of the xor tree: the first of them for two rows, then the others, row 2 i and 2 i + 1 being
    // in pair(i).
    static Floats pair(Floats a, Floats b) {
        const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
        return _mm256_castpd_ps(_mm256_unpacklo_pd(c, d)) + _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
    }
    template <class Pair>
    static Floats tree(const Pair& pair) {
        Floats v[2];
        for (int i = 0; i < 2; ++i) {
            v[i] = _mm256_shuffle_ps(pair(2 * i), pair(2 * i + 1), 0x88) +
                   _mm256_shuffle_ps(pair(2 * i), pair(2 * i + 1), 0xdd);
        }
        return _mm256_permute2f128_ps(v[0], v[1], 0x20) + _mm256_permute2f128_ps(v[0], v[1], 0x31);
    }

    // Rows of few tokens that are read together. (One from 5 tokens on, so that all dots stay in registers: a fifth
    // slower at 5 and 6, as fast at 8.)
    static constexpr int rows_abreast(int tokens) { return tokens > 2 ? 2 : 4; }

  private:
    // 4 x 4 words within each half.
    static void transpose(Words (&v)[4]) {
        const Words a = _mm256_unpacklo_epi32(v[0], v[1]);
        const Words b = _mm256_unpackhi_epi32(v[0], v[1]);
        const Words c = _mm256_unpacklo_epi32(v[2], v[3]);
        const Words d = _mm256_unpackhi_epi32(v[2], v[3]);
        v[0] = _mm256_unpacklo_epi64(a, c);
        v[1] = _mm256_unpackhi_epi64(a, c);
        v[2] = _mm256_unpacklo_epi64(b, d);
        v[3] = _mm256_unpackhi_epi64(b, d);
    }
};

}  // namespace

constexpr Steps kAvx2 = vector_steps<Vector256>("avx2");

}  // namespace strata::cpu

#endif
