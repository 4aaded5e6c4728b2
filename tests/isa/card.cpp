// A HIP runtime whose card is a function: the library's own host code runs on it, and each launch is handed, with the
// code object that the library carries, to whoever executes it (emulator.py). Linked in place of libamdhip64.
//
// It knows what csrc/gpu calls and no more; a call that is missing here is a link error.
#include <hip/hip_runtime.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "common/backend.hpp"
#include "gpu/group_args.hpp"

namespace {

// Runs a kernel; `arguments` is its by-value struct.
using Execute = int (*)(const char* kernel, const unsigned* grid, const unsigned* block, unsigned shared_bytes,
                        const void* arguments);

struct Card {
    std::string arch;
    int lanes = 0;
    std::size_t shared_bytes = 0;
    Execute execute = nullptr;
};

Card card;
thread_local hipError_t last_error = hipSuccess;

hipError_t answer(hipError_t code) {
    if (code != hipSuccess) last_error = code;
    return code;
}

std::map<const void*, std::string>& kernels() {
    static std::map<const void*, std::string> all;
    return all;
}
std::vector<const void*>& bundles() {
    static std::vector<const void*> all;
    return all;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// For Python

extern "C" {

void card_insert(const char* arch, int lanes, std::size_t shared_bytes, Execute execute) {
    card = {arch, lanes, shared_bytes, execute};
}

// What the compiler packed for all its targets; null past the last one.
const void* card_bundle(std::size_t index) { return index < bundles().size() ? bundles()[index] : nullptr; }

// False with the report's text in `text`.
bool card_read(const strata::ReadArgs* args, const char* variant, int q8_columns, char* text, std::size_t size) {
    strata::Report report;
    const strata::ReadChoice choice{variant, q8_columns};
    const bool good = strata_backend()->read(args, &choice, 0, nullptr, &report);
    std::snprintf(text, size, "%s", report.text);
    return good;
}

// The library's self-test on this card: comparisons made and equal, then what it chose and why. False with `text` where
// it did not complete.
struct GateAnswer {
    int cases, equal;
    char chosen[32], why[512];
};
bool card_gate(GateAnswer* answer, char* text, std::size_t size) {
    strata::Report report;
    *answer = {};
    const auto visit = [](const strata::CheckLine* line, void* context) {
        auto* counts = static_cast<GateAnswer*>(context);
        ++counts->cases;
        counts->equal += line->equal ? 1 : 0;
    };
    strata::DeviceFacts facts;
    const bool good =
        strata_backend()->check(0, visit, answer, &report) && strata_backend()->describe(0, &facts, &report);
    std::snprintf(text, size, "%s", report.text);
    if (good) {
        std::snprintf(answer->chosen, sizeof answer->chosen, "%s", facts.chosen);
        std::snprintf(answer->why, sizeof answer->why, "%s", facts.why);
    }
    return good;
}

int card_argument_bytes() { return static_cast<int>(sizeof(strata::gpu::GroupArgs)); }

std::int64_t card_scratch_size(const strata::Geometry* geometry, std::int64_t tokens) {
    return strata_backend()->scratch_size(geometry, tokens);
}

// ---------------------------------------------------------------------------------------------------------------
// What a compiled library calls when it is loaded

struct FatBinary {
    unsigned magic;
    unsigned version;
    const void* data;
};

void** __hipRegisterFatBinary(const FatBinary* binary) {
    bundles().push_back(binary->data);
    static void* handle = nullptr;
    return &handle;
}
void __hipRegisterFunction(void**, const void* host, char*, const char* name, unsigned, void*, void*, void*, void*,
                           int*) {
    kernels()[host] = name;
}
void __hipUnregisterFatBinary(void**) {}
hipError_t __hipPopCallConfiguration(dim3*, dim3*, std::size_t*, hipStream_t*) { return answer(hipErrorUnknown); }

// ---------------------------------------------------------------------------------------------------------------
// The runtime

hipError_t hipGetDeviceCount(int* count) {
    *count = 1;
    return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
    *device = 0;
    return hipSuccess;
}
hipError_t hipSetDevice(int) { return hipSuccess; }
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
    std::memset(static_cast<void*>(properties), 0, sizeof *properties);
    std::strcpy(properties->name, "emulated");
    std::strcpy(properties->gcnArchName, card.arch.c_str());
    properties->warpSize = card.lanes;
    properties->multiProcessorCount = 1;
    properties->sharedMemPerBlock = card.shared_bytes;
    return hipSuccess;
}
hipError_t hipPeekAtLastError() { return last_error; }
hipError_t hipGetLastError() {
    const hipError_t error = last_error;
    last_error = hipSuccess;
    return error;
}
const char* hipGetErrorName(hipError_t) { return "hipError"; }
const char* hipGetErrorString(hipError_t) { return "an error of the emulated card"; }

hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* host) {
    std::memset(static_cast<void*>(attributes), 0, sizeof *attributes);
    return answer(kernels().count(host) != 0 ? hipSuccess : hipErrorInvalidDeviceFunction);
}
hipError_t hipFuncSetAttribute(const void* host, hipFuncAttribute attribute, int value) {
    if (kernels().count(host) == 0) return answer(hipErrorInvalidDeviceFunction);
    const bool fits =
        attribute != hipFuncAttributeMaxDynamicSharedMemorySize || static_cast<std::size_t>(value) <= card.shared_bytes;
    return answer(fits ? hipSuccess : hipErrorInvalidValue);
}
hipError_t hipLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                           hipStream_t) {
    if (kernels().count(host) == 0) return answer(hipErrorInvalidDeviceFunction);
    if (shared_bytes > card.shared_bytes) return answer(hipErrorInvalidValue);
    const unsigned grid_size[] = {grid.x, grid.y, grid.z};
    const unsigned block_size[] = {block.x, block.y, block.z};
    const int code =
        card.execute(kernels()[host].c_str(), grid_size, block_size, static_cast<unsigned>(shared_bytes), arguments[0]);
    return answer(code == 0 ? hipSuccess : hipErrorLaunchFailure);
}

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) {
    *stream = nullptr;
    return hipSuccess;
}
hipError_t hipStreamDestroy(hipStream_t) { return hipSuccess; }
hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }
hipError_t hipStreamIsCapturing(hipStream_t, hipStreamCaptureStatus* status) {
    *status = hipStreamCaptureStatusNone;
    return hipSuccess;
}
hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode*) { return hipSuccess; }
hipError_t hipMalloc(void** memory, std::size_t bytes) {
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return answer(*memory != nullptr ? hipSuccess : hipErrorOutOfMemory);
}
hipError_t hipFree(void* memory) {
    std::free(memory);
    return hipSuccess;
}
hipError_t hipMemsetAsync(void* memory, int value, std::size_t bytes, hipStream_t) {
    std::memset(memory, value, bytes);
    return hipSuccess;
}
hipError_t hipMemcpyAsync(void* to, const void* from, std::size_t bytes, hipMemcpyKind, hipStream_t) {
    std::memcpy(to, from, bytes);
    return hipSuccess;
}

// ---------------------------------------------------------------------------------------------------------------
// Running one wave. The emulator makes a function of each instruction; a wave calls them from its program counter on.

struct Step {
    void (*function)(void*, void*, void*, void*, void*, void*);
    unsigned char arguments[6];  // of the wave's buffers
    unsigned char stops;         // a barrier: the wave is left there
};

struct Wave {
    void* buffers[6];  // the first one is the scalar registers
};

enum Stop { kEnd, kBarrier, kUnknownInstruction, kTooLong };

int card_run_wave(const Step* steps, std::uint64_t first, std::uint64_t bytes, const Wave* wave, int counter,
                  std::uint64_t end, std::uint64_t* executed) {
    const auto* scalars = static_cast<const std::uint32_t*>(wave->buffers[0]);
    for (std::uint64_t n = 0; n < 10'000'000; ++n, ++*executed) {
        const std::uint64_t at = scalars[counter] | std::uint64_t{scalars[counter + 1]} << 32;
        if (at == end) return kEnd;
        if (at - first >= bytes) return kUnknownInstruction;
        const Step& step = steps[(at - first) / 4];
        if (step.function == nullptr) return kUnknownInstruction;
        const auto buffer = [&](int i) { return wave->buffers[step.arguments[i]]; };
        step.function(buffer(0), buffer(1), buffer(2), buffer(3), buffer(4), buffer(5));
        if (step.stops != 0) {
            ++*executed;
            return kBarrier;
        }
    }
    return kTooLong;
}

}  // extern "C"
