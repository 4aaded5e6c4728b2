// The read on the CPU: what the torch layer calls. No torch here; threads come through `parallel_for`.
#pragma once

#include "common/backend.hpp"

namespace strata::cpu {

// Calls body(begin, end, context) over parts of [begin, end), on any number of threads, and returns when all are done.
using ParallelFor = void (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                             void (*body)(std::int64_t begin, std::int64_t end, void* context), void* context);

// The instruction sets that the read is written for and this processor has, comma separated, "portable" first and the
// one that runs by default last.
const char* paths();
const char* default_path();

std::int64_t scratch_size(const Geometry& geometry, std::int64_t tokens);

// Computes the whole read before it returns. `path` is one of paths(), or null for the default. Gives the same bytes
// for every path and every number of threads. False, with a report, where the path is not to be had.
bool read(const ReadArgs& args, const char* path, ParallelFor parallel_for, Report* report);

}  // namespace strata::cpu
