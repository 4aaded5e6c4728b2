// Picks the vendor header. The only guard of its kind: everything else in csrc/gpu is the same text for every card.
#pragma once

#if defined(STRATA_SIM)
#include "gpu/vendor/sim.hpp"
#elif defined(__HIPCC__)
#include "gpu/vendor/hip.hpp"
#else
#include "gpu/vendor/cuda.hpp"
#endif
