// The kernels' own source, compiled as C++ for the simulated cards. For the strict card this file is instrumented, and
// no kernel may be instantiated in another one: the linker keeps one copy of a template's instance, and with a copy
// that is not instrumented every detector would be silent.
#include "gpu/launch.cu"
#include "gpu/selftest.cu"
