// From an address in the kernels' code to the source line that it was compiled from.
#pragma once

#include <string>

namespace strata::sim {

// "csrc/gpu/lanes.cuh:21, in csrc/gpu/down.cuh:77, in csrc/gpu/down_staged.cuh:52": the line of the call that returns
// to `return_address`, then the lines that it was inlined into. It runs addr2line or llvm-symbolizer, so it is for
// errors only; without either, the answer is the library and the offset in it.
std::string source_line(const void* return_address);

// The name of the function that starts at `entry`, without its arguments.
std::string function_name(const void* entry);

// `path` from the project's root on, where it leads through the project.
std::string project_path(const std::string& path);

}  // namespace strata::sim
