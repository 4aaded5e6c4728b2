// How far exp_f32 is from the true value, in units in the last place of that value.
#pragma once

#include <cmath>

#include "common/arithmetic.hpp"

namespace strata::test {

// `truth` is exp(x), to many more bits than a float's. The unit is that of the floats around it, 2^-149 among the
// subnormal ones; an infinite result counts as 2^128, so that it may stand for what is at most a unit from it.
// Infinity where something is wrong that no distance tells.
template <class Real>
double exp_error(float x, Real truth) {
    const float result = exp_f32(x);
    constexpr double kWrong = HUGE_VAL;
    if (std::isnan(x)) return std::isnan(result) ? 0.0 : kWrong;
    if (std::isnan(result) || std::signbit(result)) return kWrong;
    const Real overflow = std::ldexp(Real(1), 128);
    if (truth >= overflow) return std::isinf(result) ? 0.0 : kWrong;
    if (x == 0) return result == 1.0f ? 0.0 : kWrong;
    if (truth == 0) return result == 0.0f ? 0.0 : kWrong;
    const int exponent = std::ilogb(truth);
    const int unit = (exponent < -126 ? -126 : exponent) - 23;
    const Real value = std::isinf(result) ? overflow : static_cast<Real>(result);
    return static_cast<double>(std::fabs(std::ldexp(value - truth, -unit)));
}

}  // namespace strata::test
