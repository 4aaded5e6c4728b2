// The two-plane layout of activations in shared memory, free of bank conflicts for those who write and who read it.
#pragma once

#include "gpu/vendor.hpp"

namespace strata::gpu {

// Where float4 `f` of kFloat4s lies. The even ones come first, then the odd ones, so that neighbouring lanes, whose
// chunks begin two float4s apart, read neighbouring words. Odd ones change places in pairs of four, so that the writes
// of neighbouring float4s, one even and one odd, do not meet in a bank.
template <int kFloat4s>
struct Planes {
    static_assert(kFloat4s / 2 % 8 == 0, "an exchange of fours stays in its plane");
    static constexpr __device__ int place(int f) { return (f & 1) * (kFloat4s / 2) + ((f >> 1) ^ ((f & 1) * 4)); }
};

}  // namespace strata::gpu
