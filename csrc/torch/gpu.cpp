// The GPU library, CUDA or HIP: the ops' kernels under the dispatch key CUDA (torch's HIP builds use it too), on the
// current device and stream of torch. The backend is csrc/gpu's; no vendor's runtime is seen here.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "torch/export.hpp"
#include "torch/read_op.hpp"

namespace strata {
namespace {

using CurrentStream = AOTITorchError (*)(std::int32_t device_index, void** stream);

// Torch's library of the same vendor has the function. It is looked up in the process instead of linked, so that this
// library builds where torch has no such library (or only a CPU build is installed) and needs no stub of it.
CurrentStream find_current_stream() {
    const bool hip = std::strcmp(backend().name, "hip") == 0;
    const char* library = hip ? "libtorch_hip.so" : "libtorch_cuda.so";
    void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    void* function = loaded != nullptr ? dlsym(loaded, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (function == nullptr) {
        throw std::runtime_error(std::string("fused_gr_read: ") + library +
                                 " is not loaded, so this torch has no GPU streams; install a " +
                                 (hip ? "ROCm" : "CUDA") + " build of torch 2.11 or later");
    }
    CurrentStream result;
    std::memcpy(&result, &function, sizeof result);
    return result;
}

void require(AOTITorchError failed, const char* what) {
    if (failed != 0) throw std::runtime_error(std::string("fused_gr_read: torch failed to ") + what);
}

}  // namespace

const Backend& backend() { return *strata_backend(); }

DeviceScope::DeviceScope(int device) {
    static const CurrentStream kCurrentStream = find_current_stream();
    std::int32_t current = -1;
    require(aoti_torch_get_current_device_index(&current), "name the current device");
    require(kCurrentStream(device, &stream_), "name the current stream");
    if (current != device) require(aoti_torch_create_device_guard(device, &guard_), "switch the current device");
}

DeviceScope::~DeviceScope() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
}

}  // namespace strata

STABLE_TORCH_LIBRARY_IMPL(strata, CUDA, library) { strata::register_reads(library); }
