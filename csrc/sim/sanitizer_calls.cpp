// The functions that a file compiled with -fsanitize=thread,alignment calls, in place of the sanitizers' runtimes: they
// hand each access to the strict card's detectors. GCC 12 and clang 19 call different ones of them.
#include <cstdint>
#include <cstring>

#include "sim/watch.hpp"

#define STRATA_HOOK extern "C" __attribute__((visibility("hidden"), noinline, used))

namespace {
namespace sim = strata::sim;
}  // namespace

#define STRATA_ACCESS(size)                                              \
    STRATA_HOOK void __tsan_read##size(const void* address) {            \
        sim::watch::reads(address, size, __builtin_return_address(0));   \
    }                                                                    \
    STRATA_HOOK void __tsan_write##size(const void* address) {           \
        sim::watch::writes(address, size, __builtin_return_address(0));  \
    }                                                                    \
    STRATA_HOOK void __tsan_unaligned_read##size(const void* address) {  \
        sim::watch::reads(address, size, __builtin_return_address(0));   \
    }                                                                    \
    STRATA_HOOK void __tsan_unaligned_write##size(const void* address) { \
        sim::watch::writes(address, size, __builtin_return_address(0));  \
    }                                                                    \
    STRATA_HOOK void __tsan_volatile_read##size(const void* address) {   \
        sim::watch::reads(address, size, __builtin_return_address(0));   \
    }                                                                    \
    STRATA_HOOK void __tsan_volatile_write##size(const void* address) {  \
        sim::watch::writes(address, size, __builtin_return_address(0));  \
    }

STRATA_ACCESS(1)
STRATA_ACCESS(2)
STRATA_ACCESS(4)
STRATA_ACCESS(8)
STRATA_ACCESS(16)

STRATA_HOOK void __tsan_read_range(const void* address, std::size_t bytes) {
    sim::watch::reads(address, bytes, __builtin_return_address(0));
}
STRATA_HOOK void __tsan_write_range(const void* address, std::size_t bytes) {
    sim::watch::writes(address, bytes, __builtin_return_address(0));
}

STRATA_HOOK void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
    sim::watch::reads(from, bytes, __builtin_return_address(0));
    sim::watch::writes(to, bytes, __builtin_return_address(0));
    return std::memcpy(to, from, bytes);
}
STRATA_HOOK void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
    sim::watch::reads(from, bytes, __builtin_return_address(0));
    sim::watch::writes(to, bytes, __builtin_return_address(0));
    return std::memmove(to, from, bytes);
}
STRATA_HOOK void* __tsan_memset(void* to, int byte, std::size_t bytes) {
    sim::watch::writes(to, bytes, __builtin_return_address(0));
    return std::memset(to, byte, bytes);
}

// Guards of the host code's function-local statics. Kernels have no C++ atomics.
STRATA_HOOK std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t* address, int) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

STRATA_HOOK void __tsan_init() {}
STRATA_HOOK void __tsan_func_entry(void*) {}
STRATA_HOOK void __tsan_func_exit() {}
STRATA_HOOK void __tsan_vptr_update(void**, void*) {}
STRATA_HOOK void __tsan_vptr_read(void**) {}

// -fsanitize=alignment calls this where an address is not a multiple of its type's alignment. What it passes begins
// with the place in the source.
struct UbsanPlace {
    const char* file;
    std::uint32_t line;
    std::uint32_t column;
};
STRATA_HOOK void __ubsan_handle_type_mismatch_v1(const UbsanPlace* where, std::uintptr_t) {
    if (sim::current == nullptr) return;
    const int code = sim::now.card->vendor == strata::GrBackend::Cuda ? 716 : 700;
    sim::stop_here({code,
                    nullptr,
                    nullptr,
                    {where->file, static_cast<int>(where->line)},
                    "an address is not aligned as its type must be"});
}
