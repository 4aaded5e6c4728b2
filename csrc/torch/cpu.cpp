// The CPU library: the ops' schemas, their CPU kernels, and the CPU as a backend.
#include <pthread.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

#include "cpu/read.hpp"
#include "torch/export.hpp"
#include "torch/read_op.hpp"

namespace strata {

// The caller computes where it is: there is no device to enter and no stream.
DeviceScope::DeviceScope(int) {}
DeviceScope::~DeviceScope() = default;

namespace {

// The child of a fork() has none of the threads of torch's pool, and GNU's OpenMP waits for them for ever: it reads on
// the thread that it has. The bytes are the same.
std::atomic<bool> forked{false};
[[maybe_unused]] const int kAtFork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void torch_threads(std::int64_t begin, std::int64_t end, std::int64_t grain,
                   void (*body)(std::int64_t, std::int64_t, void*), void* context) {
    if (forked) return body(begin, end, context);
    if (torch_parallel_for(begin, end, grain, body, context) != 0) {
        throw std::runtime_error(
            "fused_gr_read: torch's thread pool failed; its own message is on the standard error "
            "output");
    }
}

int device_count(Report*) { return 1; }

template <std::size_t kSize>
void set(char (&field)[kSize], const std::string& text) {
    std::strncpy(field, text.c_str(), kSize - 1);
    field[kSize - 1] = '\0';
}

// As Linux names it; empty elsewhere.
std::string processor_name() {
    std::ifstream lines("/proc/cpuinfo");
    for (std::string line; std::getline(lines, line);) {
        const std::size_t colon = line.find(": ");
        if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
    }
    return {};
}

#if defined(__x86_64__)
constexpr const char* kProcessorFamily = "x86-64";
#elif defined(__aarch64__)
constexpr const char* kProcessorFamily = "aarch64";
#else
constexpr const char* kProcessorFamily = "unknown";
#endif

bool describe_cpu(int device, DeviceFacts* facts, Report* report) {
    if (device != 0) {
        report->say("the CPU is device 0, there is no device %d", device);
        return false;
    }
    *facts = {};
    std::uint32_t threads = 1;
    torch_get_num_threads(&threads);
    set(facts->name, processor_name());
    set(facts->arch, std::string(kProcessorFamily) + " " + cpu::default_path());
    facts->wave_width = 0;
    facts->compute_units = static_cast<int>(threads);
    set(facts->chosen, cpu::default_path());
    set(facts->why, "the widest instruction set that this processor has; all give the same bytes");
    return true;
}

std::int64_t scratch_size(const Geometry* geometry, std::int64_t tokens) {
    return cpu::scratch_size(*geometry, tokens);
}

bool read(const ReadArgs* args, const ReadChoice* choice, int, void*, Report* report) {
    return cpu::read(*args, choice->variant, torch_threads, report);
}

}  // namespace

const Backend& backend() {
    static const Backend kCpuBackend = {kBackendAbi,  "cpu",        kProcessorFamily, cpu::paths(),
                                        device_count, describe_cpu, scratch_size,     read};
    return kCpuBackend;
}

}  // namespace strata

STRATA_EXPORT const strata::Backend* strata_backend() { return &strata::backend(); }

// Written out in full: a schema is read more often than it changes.
STABLE_TORCH_LIBRARY(strata, library) {
    library.def(
        "fused_gr_read(Tensor residual, Tensor w_norm, Tensor w_down, Tensor w_up, Tensor? w_inject=None, "
        "Tensor? block_out=None, Tensor? inject_prev=None, *, float eps=1e-6, bool q8_1=False) "
        "-> (Tensor mixed, Tensor inject, Tensor residual_out, Tensor lo, Tensor rs, Tensor q8_1)");
    library.def(
        "fused_gr_read_(Tensor(a!) residual, Tensor w_norm, Tensor w_down, Tensor w_up, Tensor? w_inject=None, "
        "Tensor? block_out=None, Tensor? inject_prev=None, *, float eps=1e-6, bool q8_1=False) "
        "-> (Tensor mixed, Tensor inject, Tensor lo, Tensor rs, Tensor q8_1)");
    library.def(
        "fused_gr_read.out(Tensor residual, Tensor w_norm, Tensor w_down, Tensor w_up, Tensor? w_inject=None, "
        "Tensor? block_out=None, Tensor? inject_prev=None, *, float eps=1e-6, bool q8_1=False, "
        "Tensor(a!) mixed, Tensor(b!) inject, Tensor(c!) residual_out, Tensor(d!) lo, Tensor(e!) rs, "
        "Tensor(f!) q8_1_out) -> ()");
    library.def(
        "_fused_gr_read_variant(Tensor residual, Tensor w_norm, Tensor w_down, Tensor w_up, Tensor? w_inject=None, "
        "Tensor? block_out=None, Tensor? inject_prev=None, *, float eps=1e-6, bool q8_1=False, "
        "str variant, int q8_columns=0) "
        "-> (Tensor mixed, Tensor inject, Tensor residual_out, Tensor lo, Tensor rs, Tensor q8_1)");
}

STABLE_TORCH_LIBRARY_IMPL(strata, CPU, library) { strata::register_reads(library); }
