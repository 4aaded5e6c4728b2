// What the executor tells the strict card's detectors. In a fast library nobody listens and nothing of it is compiled.
#pragma once

#include "sim/block.hpp"

namespace strata::sim::watch {

#if defined(STRATA_SIM_STRICT)
inline constexpr bool kStrict = true;

void launch_begins();
void launch_ends();  // an error where no access was seen: the kernel's file was not instrumented
void block_begins(Block& block);
void block_ends(Block& block);
void barrier_passed(Block& block, Scope scope);
void wave_passed(Block& block, Wave& wave);
void fenced();
void next_may_begin();
void atomic(const void* address, const void* caller);
void reads(const void* address, std::size_t bytes, const void* caller);
void writes(const void* address, std::size_t bytes, const void* caller);
void copy_begins(const Copy& copy);
void copy_lands(const Copy& copy);
void arrivals_expected(Expected& expected, const void* caller);
void arrivals_used(const Expected& expected, const char* did, const void* caller);
void arrivals_waited(Expected& expected);
void bulk_copy_begins(const Delivery& delivery, const void* caller);
void send_begins(Block& to, const Delivery& delivery, const void* caller);
#else
inline constexpr bool kStrict = false;

inline void launch_begins() {}
inline void launch_ends() {}
inline void block_begins(Block&) {}
inline void block_ends(Block&) {}
inline void barrier_passed(Block&, Scope) {}
inline void wave_passed(Block&, Wave&) {}
inline void fenced() {}
inline void next_may_begin() {}
inline void atomic(const void*, const void*) {}
inline void reads(const void*, std::size_t, const void*) {}
inline void writes(const void*, std::size_t, const void*) {}
inline void copy_begins(const Copy&) {}
inline void copy_lands(const Copy&) {}
inline void arrivals_expected(Expected&, const void*) {}
inline void arrivals_used(const Expected&, const char*, const void*) {}
inline void arrivals_waited(Expected&) {}
inline void bulk_copy_begins(const Delivery&, const void*) {}
inline void send_begins(Block&, const Delivery&, const void*) {}
#endif

}  // namespace strata::sim::watch
