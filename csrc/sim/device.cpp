// The device query and the choice of a variant, compiled for the simulated cards. backend.cpp puts its own
// strata_backend() in front of this one.
#define strata_backend strata_kernels_backend
#include "gpu/device.cu"
