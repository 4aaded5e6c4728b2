// IEEE's default floating-point mode for as long as an object lives: round to nearest, subnormals kept, no traps.
// The caller's mode decides bits otherwise (torch.set_flush_denormal), and each thread has its own.
//
// The compiler may move arithmetic over the changes of mode, so the arithmetic belongs behind a call that it cannot
// see into.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace strata::cpu {

class IeeeMode {
  public:
    IeeeMode() : before_(get()) { set(kDefault); }
    ~IeeeMode() { set(before_); }
    IeeeMode(const IeeeMode&) = delete;
    IeeeMode& operator=(const IeeeMode&) = delete;

  private:
#if defined(__x86_64__)
    using Register = unsigned;
    static constexpr Register kDefault = 0x1f80;  // every exception masked, FTZ and DAZ clear
    static Register get() { return _mm_getcsr(); }
    static void set(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
    using Register = std::uint64_t;
    static constexpr Register kDefault = 0;
    static Register get() {
        Register value;
        asm volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void set(Register value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
#else
    using Register = int;  // nothing here is known to change the mode of another processor
    static constexpr Register kDefault = 0;
    static Register get() { return 0; }
    static void set(Register) {}
#endif

    Register before_;
};

}  // namespace strata::cpu
