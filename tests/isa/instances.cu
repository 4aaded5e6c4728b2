// Exact-token instances that launch.cu does not dispatch, compiled to know why.
#include "gpu/vendor.hpp"  // first: it brings the device side of the maths functions

#include "gpu/down_register_half.cuh"
#include "gpu/down_staged.cuh"

namespace strata::gpu {
#define INSTANCES(tokens)                                                    \
    template __global__ void gr_down_staged_kernel<tokens, true>(GroupArgs); \
    template __global__ void gr_down_register_half_kernel<tokens, true>(GroupArgs);
INSTANCES(5)
INSTANCES(6)
INSTANCES(7)
INSTANCES(8)
}  // namespace strata::gpu
