// Rows of weights that meet the activations together, a row an element of a vector.
#pragma once

#include <cstdint>

namespace strata::cpu {
namespace {

// In quads of rows `stride` apart.
template <int kRows>
struct RowsOf {
    const std::uint16_t* quad[kRows / 4];
    std::int64_t stride;
};

}  // namespace
}  // namespace strata::cpu
