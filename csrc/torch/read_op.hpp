// The ops of the library as torch's dispatcher calls them: checks, allocation, and the backend's read.
//
// One source for every backend library; a library brings what is declared here and not defined in read_op.cpp.
#pragma once

#include <torch/csrc/stable/library.h>

#include "common/backend.hpp"

namespace strata {

// Registers the kernels of all ops for the dispatch key of `library`.
void register_reads(torch::stable::detail::StableLibrary& library);

// The library's own backend, whatever other libraries the process has.
const Backend& backend();

// While one is alive, `device` is the current one. stream() is the stream that torch is queueing work on there.
class DeviceScope {
  public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

    void* stream() const { return stream_; }

  private:
    void* stream_ = nullptr;
    [[maybe_unused]] DeviceGuardHandle guard_ = nullptr;  // the CPU needs none
};

}  // namespace strata
