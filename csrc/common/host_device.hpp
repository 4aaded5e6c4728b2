// The one spelling of "compiled for the host and for every device".
#pragma once

#if defined(__HIP__)  // the attributes themselves: their macros come with a runtime header, which is not included here
#define STRATA_HOST_DEVICE __attribute__((host, device, always_inline)) inline
#elif defined(__CUDACC__)
#define STRATA_HOST_DEVICE __host__ __device__ __forceinline__
#else  // always inlined, so that a file compiled for AVX-512 leaves no copy that the linker could give to the others
#define STRATA_HOST_DEVICE __attribute__((always_inline)) inline
#endif
