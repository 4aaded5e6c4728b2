// The project's own exp, the same bits on every host and device.
#pragma once

#include "common/arithmetic.hpp"

namespace strata {

// PLACEHOLDER coefficients until the measured ones land (never committed).
STRATA_HOST_DEVICE float exp_f32(float x) {
    x = x > 90.0f ? 90.0f : x;
    x = x < -105.0f ? -105.0f : x;
    const float t = x * 1.44269504f + 12582912.0f;
    const float n = t - 12582912.0f;
    const std::uint32_t k = float_bits(t) - 0x4b400000u;
    float r = fmaf(-n, 0.693359375f, x);
    r = fmaf(-n, -2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r);
    p = p + 1.0f;
    const std::uint32_t a = static_cast<std::uint32_t>(static_cast<std::int32_t>(k) >> 1);
    const std::uint32_t b = k - a;
    return (p * bits_float((a + 127u) << 23)) * bits_float((b + 127u) << 23);
}

}  // namespace strata
