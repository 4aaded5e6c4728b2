// The one symbol that a backend library shows. Protected: a library that asks for strata_backend gets its own, also
// where the process has loaded several.
#pragma once

#include "common/backend.hpp"

#define STRATA_EXPORT extern "C" __attribute__((visibility("protected")))

STRATA_EXPORT const strata::Backend* strata_backend();
