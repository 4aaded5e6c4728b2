// The arithmetic contract's pieces, each against something that shares nothing with them: higher precision, an
// exhaustive table, or bits worked out by hand where another order of the same operations gives other ones.
#include "common/arithmetic.hpp"

#include <algorithm>
#include <cfloat>
#include <limits>
#include <utility>
#include <vector>

#include "check.hpp"
#include "exp_error.hpp"

using namespace strata;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits(float value) { return float_bits(value); }

std::uint16_t bf16(float value) {  // of a value that bf16 has
    CHECK((bits(value) & 0xffffu) == 0, value);
    return static_cast<std::uint16_t>(bits(value) >> 16);
}

Chunk chunk(const float (&values)[kChunk]) {
    std::uint16_t halves[kChunk];
    for (int i = 0; i < kChunk; ++i) halves[i] = bf16(values[i]);
    Chunk result;
    std::memcpy(&result, halves, sizeof result);
    return result;
}

float dot(const float (&w)[kChunk], const float (&x)[kChunk]) {
    return chunk_dot(chunk(w), {x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]});
}

// 2^exponent
float two(int exponent) { return std::ldexp(1.0f, exponent); }

// ---------------------------------------------------------------------------------------------------------------

// bf16_bits() of one of every 509 floats, and of all around each step, by a search among the values that bf16 has.
void bf16_rounding() {
    const auto nearest = [](float value) {
        std::uint32_t low = bits(std::fabs(value)) >> 16;  // below or at the magnitude; low + 1 is above it
        const double magnitude = std::fabs(static_cast<double>(value));
        const auto number = [](std::uint32_t pattern) {  // one step beyond the largest is 2^128
            return pattern < 0x7f80u ? static_cast<double>(bits_float(pattern << 16)) : std::ldexp(1.0, 128);
        };
        const double down = magnitude - number(low), up = number(low + 1) - magnitude;
        if (up < down || (up == down && (low & 1u) != 0)) ++low;
        return static_cast<std::uint16_t>((bits(value) >> 31) << 15 | low);
    };
    const auto look = [&](std::uint32_t pattern) {
        const float value = bits_float(pattern);
        const std::uint16_t got = bf16_bits(value);
        if (value != value) {
            CHECK(got == kBf16Nan, pattern, got);
        } else if (std::isinf(value)) {
            CHECK(got == pattern >> 16, pattern, got);
        } else {
            CHECK(got == nearest(value), pattern, got);
        }
    };
    for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); pattern += 509) {
        look(static_cast<std::uint32_t>(pattern));
    }
    for (std::uint32_t high = 0; high < 0x10000u; ++high) {
        for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) look(high << 16 | low);
    }
    // By hand: ties to even, the last finite value and the first that is infinite, zeros and subnormals with their
    // sign.
    CHECK(bf16_bits(bits_float(0x3f808000u)) == 0x3f80 && bf16_bits(bits_float(0x3f818000u)) == 0x3f82);
    CHECK(bf16_bits(bits_float(0x7f7f7fffu)) == 0x7f7f && bf16_bits(bits_float(0xff7f8000u)) == 0xff80);
    CHECK(bf16_bits(-0.0f) == 0x8000 && bf16_bits(bits_float(0x80008000u)) == 0x8000);
    CHECK(bf16_bits(bits_float(0x80008001u)) == 0x8001 && bf16_bits(bits_float(0xffffffffu)) == kBf16Nan);
    for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {  // widening is exact, four at a time too
        const auto half = static_cast<std::uint16_t>(pattern);
        const float wide = widen(half);
        CHECK(bits(wide) == pattern << 16);
        const Float4 four = widen(Bf16x4{{pattern | 0x12340000u, 0x5678u | pattern << 16}});
        CHECK(bits(four.x) == bits(wide) && bits(four.y) == 0x12340000u, pattern);
        CHECK(bits(four.z) == 0x56780000u && bits(four.w) == bits(wide), pattern);
        const Bf16x4 again = round_bf16({wide, bits_float(0x3f808001u), -0.0f, wide});
        const std::uint32_t expected = wide != wide ? kBf16Nan : pattern;
        CHECK(again.word[0] == (0x3f810000u | expected) && again.word[1] == (0x8000u | expected << 16), pattern);
    }
}

void exp_dense() {
    double worst = 0.0;
    const auto look = [&](std::uint32_t pattern) {
        const float x = bits_float(pattern);
        const double error = test::exp_error(x, std::exp(static_cast<long double>(x)));
        worst = std::max(worst, error);
        CHECK(error <= 1.0, x, error);
    };
    for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); pattern += 509) {
        look(static_cast<std::uint32_t>(pattern));
    }
    // Overflow, the first subnormal result, the last result above 0, 2 and 1/2, and where rint(x log2 e) turns.
    std::vector<float> points = {0.0f,     -0.0f,       88.722839f,   89.0f,        90.0f,  104.0f,  FLT_MAX,
                                 -FLT_MAX, -87.336544f, -103.278929f, -103.972077f, -89.0f, -104.0f, -105.0f,
                                 1.0f,     -1.0f,       FLT_MIN,      -FLT_MIN,     kInf,   -kInf,   kNan};
    for (int n = -151; n <= 129; ++n) {
        points.push_back(static_cast<float>(n * 0.69314718055994530942));
        points.push_back(static_cast<float>((n + 0.5) * 0.69314718055994530942));
    }
    for (const float point : points) {
        for (std::uint32_t away = 0; away <= 2000; ++away) look(bits(point) - 1000u + away);
    }
    std::cout << "exp: at most " << worst << " ulp over the sample\n";

    CHECK(bits(exp_f32(0.0f)) == 0x3f800000u && bits(exp_f32(-0.0f)) == 0x3f800000u);
    CHECK(bits(exp_f32(kInf)) == kInfinityBits && bits(exp_f32(FLT_MAX)) == kInfinityBits);
    CHECK(bits(exp_f32(-kInf)) == 0u && bits(exp_f32(-FLT_MAX)) == 0u && bits(exp_f32(-104.0f)) == 0u);
    CHECK(bits(exp_f32(-103.0f)) == 1u, bits(exp_f32(-103.0f)));
    CHECK(bits(exp_f32(88.8f)) == kInfinityBits && exp_f32(88.7f) < kInf);
    for (const std::uint32_t nan : {0x7f800001u, 0x7fc00000u, 0xffffffffu, 0xff800001u}) {
        CHECK(std::isnan(exp_f32(bits_float(nan))), nan);
    }
}

void sigmoid_and_silu() {
    CHECK(bits(sigmoid(0.0f)) == 0x3f000000u && bits(sigmoid(-0.0f)) == 0x3f000000u);
    CHECK(bits(sigmoid(kInf)) == 0x3f800000u && bits(sigmoid(20.0f)) == 0x3f800000u);
    CHECK(bits(sigmoid(-kInf)) == 0u && bits(sigmoid(-89.0f)) == 0u);
    CHECK(sigmoid(-88.0f) > 0.0f && std::isnan(sigmoid(kNan)));

    CHECK(bits(silu(0.0f)) == 0u && bits(silu(-0.0f)) == kSignBit);
    CHECK(bits(silu(kInf)) == kInfinityBits && std::isnan(silu(-kInf)) && std::isnan(silu(kNan)));
    CHECK(bits(silu(-89.0f)) == kSignBit && bits(silu(-FLT_MAX)) == kSignBit && bits(silu(FLT_MAX)) == bits(FLT_MAX));
    CHECK(silu(-88.0f) < 0.0f);

    int other = 0;                         // where x * sigmoid(x) would show
    for (int i = -2950; i <= 2950; ++i) {  // beyond, exp overflows
        const float x = static_cast<float>(i) * 0.03f;
        const long double gate = 1.0L / (1.0L + std::exp(-static_cast<long double>(x)));
        const long double of_gate = std::fabs(sigmoid(x) - gate), of_silu = std::fabs(silu(x) - x * gate);
        // exp's unit, then two roundings; each at most half a unit of a value that is no more than twice the result.
        CHECK(of_gate <= 3 * 0x1p-23L * gate + 0x1p-149L, x);
        CHECK(of_silu <= 3 * 0x1p-23L * std::fabs(x * gate) + 0x1p-149L, x);
        // One division each, of a rounded sum. (To divide doubles and round again does no harm: 53 > 2 * 24 + 2.)
        const auto sum = static_cast<double>(static_cast<float>(1.0 + static_cast<double>(exp_f32(-x))));
        CHECK(bits(sigmoid(x)) == bits(static_cast<float>(1.0 / sum)), x);
        CHECK(bits(silu(x)) == bits(static_cast<float>(static_cast<double>(x) / sum)), x);
        other += bits(silu(x)) != bits(x * sigmoid(x));
    }
    CHECK(other > 100, other);

    CHECK(bits(fold_gain(0.0f, 4)) == 0x3f800000u && bits(fold_gain(kInf, 4)) == 0x40000000u);
    CHECK(bits(fold_gain(5.0f, 4)) == bits(2.0f * sigmoid(1.25f)));
    for (int i = 1; i <= 200; ++i) {
        const float x = static_cast<float>(i) * 0.03f;
        const auto third = static_cast<float>(static_cast<double>(x) / 3.0);
        CHECK(bits(fold_gain(x, 3)) == bits(2.0f * sigmoid(third)), x);
        CHECK(bits(down_activation(x, 3)) == bits(silu(third)), x);
    }
    CHECK(bits(down_activation(5.0f, 4)) == bits(silu(1.25f)));
}

// ---------------------------------------------------------------------------------------------------------------
// Orders. The comments say what another reading would give.

void orders() {
    // A dot is one multiply and seven fmaf in element order: 1, and then seven times too little to move it.
    // From the other end the little things meet first: 1 + 4 * 2^-23.
    const float ones[kChunk] = {1, 1, 1, 1, 1, 1, 1, 1};
    const float falling[kChunk] = {1, two(-24), two(-24), two(-24), two(-24), two(-24), two(-24), two(-24)};
    const float rising[kChunk] = {two(-24), two(-24), two(-24), two(-24), two(-24), two(-24), two(-24), 1};
    CHECK(bits(dot(ones, falling)) == 0x3f800000u, bits(dot(ones, falling)));
    CHECK(bits(dot(ones, rising)) == 0x3f800004u, bits(dot(ones, rising)));
    CHECK(bits(dot(falling, ones)) == 0x3f800000u && bits(dot(rising, ones)) == 0x3f800004u);
    for (int big = 1; big < kChunk; ++big) {  // `big` little ones before the 1, the rest after it
        float x[kChunk];
        for (int i = 0; i < kChunk; ++i) x[i] = i == big ? 1.0f : two(-24);
        const float before = static_cast<float>(static_cast<double>(two(-24)) * big + 1.0);
        float expected = before;  // after it, each is half a unit: to even, once
        if (big + 1 < kChunk && (bits(before) & 1u)) expected = bits_float(bits(before) + 1u);
        CHECK(bits(dot(ones, x)) == bits(expected), big, bits(dot(ones, x)));
    }
    // Every step rounds once: (1 + 2^-7)(1 + 2^-23) - (1 + 2^-7) is exact. A rounded product would leave 2^-23.
    const float wide[kChunk] = {-1.0078125f, 1.0078125f, 0, 0, 0, 0, 0, 0};
    const float fine[kChunk] = {1, 1.0f + two(-23), 0, 0, 0, 0, 0, 0};
    CHECK(dot(wide, fine) == 1.0078125f * two(-23), dot(wide, fine));
    // The first product is rounded, not added to +0.
    const float zeros[kChunk] = {}, negative[kChunk] = {-1, -1, -1, -1, -1, -1, -1, -1};
    CHECK(bits(dot(negative, zeros)) == kSignBit, bits(dot(negative, zeros)));

    // A float4's square: x first. The other way round: 1 + 2 * 2^-23.
    CHECK(bits(square({1, two(-12), two(-12), two(-12)})) == 0x3f800000u);
    CHECK(bits(square({two(-12), two(-12), two(-12), 1})) == 0x3f800002u);

    // (residual * gain) * rs, in this order: 2^100 * 2^100 overflows though * 2^-100 would save it, and so on.
    const Float4 normed =
        normalise({two(100), two(-100), two(100), 3.0f}, {two(100), two(-100), two(-100), 1.1f}, two(-100));
    CHECK(std::isinf(normed.x) && bits(normed.y) == 0u && normed.z == two(-100), normed.x, normed.y, normed.z);
    const float product = 3.0f * 1.1f;
    CHECK(bits(normed.w) == bits(product * two(-100)));

    CHECK(bits(fold({1, 1, 1, 1}, two(-24), {1, 1.0f + two(-23), -1, 0}).y) == 0x3f800002u);
    CHECK(fold({1.0f + two(-23), 0, 0, 0}, 1.0078125f, {-1.0078125f, 0, 0, 0}).x == 1.0078125f * two(-23));
    CHECK(mix_next(1.0f + two(-23), 1.0078125f, -1.0078125f) == 1.0078125f * two(-23));
    CHECK(bits(mix_mean(1.0f, 3)) == bits(1.0f / 3.0f) && mix_mean(10.0f, 4) == 2.5f);

    // A division by the width, a square root, a division: each rounded.
    CHECK(bits(reciprocal_rms(kInf, 2560, 1e-6f)) == 0u);
    CHECK(bits(reciprocal_rms(0.0f, 2560, 0.0f)) == kInfinityBits);
    CHECK(reciprocal_rms(2560.0f, 2560, 0.0f) == 1.0f);
    int other = 0;  // where multiplying by a reciprocal, or one rounding for all three, would show
    for (int i = 1; i <= 2000; ++i) {
        const float sum = static_cast<float>(i) * 1.37f;
        const auto mean = static_cast<float>(static_cast<double>(sum) / 96.0);
        const auto shifted = static_cast<float>(static_cast<double>(mean) + static_cast<double>(1e-6f));
        const auto root = static_cast<float>(std::sqrt(static_cast<double>(shifted)));
        const auto expected = static_cast<float>(1.0 / static_cast<double>(root));  // innocuous: 53 > 2 * 24 + 2
        CHECK(bits(reciprocal_rms(sum, 96, 1e-6f)) == bits(expected), sum);
        other += bits(expected) != bits(static_cast<float>(1.0 / std::sqrt(static_cast<double>(sum) / 96.0 + 1e-6)));
    }
    CHECK(other > 100, other);
}

void trees() {
    std::uint32_t state = 1;
    int sequential_differs = 0, halves_differ = 0;
    for (int round = 0; round < 1000; ++round) {
        float lanes[kLanes], butterfly[kLanes];
        for (float& lane : lanes) {
            state = state * 1664525u + 1013904223u;
            lane = static_cast<float>(static_cast<std::int32_t>(state)) * two(-31 - static_cast<int>(state >> 29));
        }
        float in_order = 0.0f, pairs[kLanes];
        for (const float lane : lanes) in_order += lane;
        std::copy(lanes, lanes + kLanes, butterfly);
        for (const int stage : {16, 8, 4, 2, 1}) {  // as 32 lanes do it
            float next[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) next[lane] = butterfly[lane] + butterfly[lane ^ stage];
            std::copy(next, next + kLanes, butterfly);
        }
        std::copy(lanes, lanes + kLanes, pairs);
        for (const int stage : {1, 2, 4, 8, 16}) {  // the stages from the other end
            float next[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) next[lane] = pairs[lane] + pairs[lane ^ stage];
            std::copy(next, next + kLanes, pairs);
        }
        const float sum = tree_sum(lanes);
        for (const float lane : butterfly) CHECK(bits(lane) == bits(sum), round);
        sequential_differs += bits(in_order) != bits(sum);
        halves_differ += bits(pairs[0]) != bits(sum);
    }
    CHECK(sequential_differs > 100 && halves_differ > 100, sequential_differs, halves_differ);

    float negative_zeros[kLanes];
    std::fill(negative_zeros, negative_zeros + kLanes, -0.0f);
    CHECK(bits(tree_sum(negative_zeros)) == kSignBit);
}

// ---------------------------------------------------------------------------------------------------------------
// Half

double half_value(std::uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

// By the table of all halves: the nearer neighbour, the even one of two that are as near, never beyond 65504.
std::uint16_t nearest_half(float value, const std::vector<double>& halves) {
    if (std::isnan(value)) return 0x7e00;
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= halves.back()) return sign | 0x7bff;
    const auto above = std::upper_bound(halves.begin(), halves.end(), magnitude);
    const auto low = static_cast<std::uint16_t>(above - halves.begin() - 1);
    const double down = magnitude - halves[low], up = *above - magnitude;
    const bool take_upper = up < down || (up == down && low % 2 == 1);
    return static_cast<std::uint16_t>(sign | (low + take_upper));
}

void halves() {
    std::vector<double> table;
    for (std::uint16_t half = 0; half <= 0x7bff; ++half) table.push_back(half_value(half));
    const auto look = [&](float value) {
        CHECK(half_bits(value) == nearest_half(value, table), bits(value), half_bits(value));
        CHECK(half_bits(-value) == nearest_half(-value, table), bits(-value), half_bits(-value));
    };
    for (std::uint32_t half = 0; half <= 0x7bff; ++half) {
        const double here = table[half], next = half == 0x7bff ? 65536.0 : table[half + 1];
        const auto exact = static_cast<float>(here), middle = static_cast<float>((here + next) / 2);
        CHECK(half_bits(exact) == half && static_cast<double>(middle) == (here + next) / 2, half);
        for (const float value : {exact, middle}) {
            look(value);
            look(std::nextafter(value, 0.0f));
            look(std::nextafter(value, kInf));
        }
    }
    for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 31); pattern += 997) {
        look(bits_float(static_cast<std::uint32_t>(pattern)));
    }
    for (const std::uint32_t nan : {0x7f800001u, 0x7fc00000u, 0xffffffffu, 0xff800001u}) {
        CHECK(half_bits(bits_float(nan)) == 0x7e00, nan);
    }
    CHECK(half_bits(kInf) == 0x7bff && half_bits(-kInf) == 0xfbff && half_bits(65519.996f) == 0x7bff);
}

// ---------------------------------------------------------------------------------------------------------------
// q8_1

void q8() {
    const auto value = [](float x, float amax) { return static_cast<int>(q8_value(x, magnitude_bits(amax))); };
    for (int q = -127; q <= 127; ++q) {
        const float away = q < 0 ? -0.5f : 0.5f;
        CHECK(value(static_cast<float>(q), 127.0f) == q, q);
        if (q != 127 && q != -127) {  // halves away from zero; just under a half, towards it
            CHECK(value(static_cast<float>(q) + away, 127.0f) == q + (q < 0 ? -1 : 1), q);
            CHECK(value(std::nextafter(static_cast<float>(q) + away, 0.0f), 127.0f) == q, q);
        }
    }
    CHECK(value(0.0f, 0.0f) == 0 && value(-0.0f, 0.0f) == 0);
    CHECK(value(kInf, kInf) == 0 && value(1.0f, kInf) == 0 && value(1.0f, kNan) == 0 && value(kNan, kNan) == 0);
    // d = 1.496 units rounds to one: 190 / 1 is limited. Of 63 units it rounds to none.
    CHECK(value(190 * two(-149), 190 * two(-149)) == 127 && value(-190 * two(-149), 190 * two(-149)) == -127);
    CHECK(value(63 * two(-149), 63 * two(-149)) == 0 && value(64 * two(-149), 64 * two(-149)) == 64);
    CHECK(value(FLT_MAX, FLT_MAX) == 127 && value(-FLT_MAX, FLT_MAX) == -127);

    CHECK(magnitude_bits(-0.0f) == 0 && magnitude_bits(-1.0f) == 0x3f800000u);
    CHECK(magnitude_bits(kNan) > magnitude_bits(kInf) && magnitude_bits(kInf) > magnitude_bits(FLT_MAX));
    CHECK(q8_scale_half(magnitude_bits(kNan)) == 0x7e00 && q8_scale_half(kInfinityBits) == 0x7bff);
    CHECK(q8_scale_half(magnitude_bits(127.0f)) == 0x3c00 && q8_scale_half(magnitude_bits(1e9f)) == 0x7bff);
    CHECK(q8_scale_half(magnitude_bits(127 * two(-25))) == 0 && q8_scale_half(magnitude_bits(127 * two(-24))) == 1);
    CHECK(q8_sum_half(1.0f, magnitude_bits(kNan)) == 0x7e00 && q8_sum_half(1e6f, magnitude_bits(1.0f)) == 0x7bff);
    CHECK(q8_sum_half(kNan, kInfinityBits) == 0x7e00 && q8_sum_half(-kInf, kInfinityBits) == 0xfbff);
    CHECK(q8_sum_half(-0.0f, 0) == 0x8000);

    CHECK(bits(canonical(bits_float(0xffc00001u))) == kNanBits && bits(canonical(-0.0f)) == kSignBit);
    const Float4 four = canonical(Float4{bits_float(0x7f800001u), 1.0f, bits_float(0xffffffffu), -kInf});
    CHECK(bits(four.x) == kNanBits && four.y == 1.0f && bits(four.z) == kNanBits && four.w == -kInf);
    CHECK(bits(widen_low(0x12345678u)) == 0x56780000u && bits(widen_high(0x12345678u)) == 0x12340000u);
}

}  // namespace

int main() {
    bf16_rounding();
    exp_dense();
    sigmoid_and_silu();
    orders();
    trees();
    halves();
    q8();
    return test::result();
}
