// What a kernel on the simulated card calls: one function for each thing that hardware does for a thread. They are
// defined outside the files that hold kernels, so that a strict object, whose every load and store is reported, does
// not report the card itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/arithmetic.hpp"

namespace strata::sim {

// Where a thread stands in the source, for errors.
struct Place {
    const char* file;
    int line;
};

// Who is asking. Constant for as long as a kernel runs on one thread's stack, which the attribute says.
[[gnu::const]] unsigned thread_index(int axis);  // in its block
[[gnu::const]] unsigned block_index(int axis);
[[gnu::const]] unsigned block_threads(int axis);
[[gnu::const]] unsigned grid_blocks(int axis);
[[gnu::const]] unsigned wave_lane();

// Shared memory of the block: the dynamic piece, and one static piece for each `key`.
Float4* dynamic_shared();
void* static_shared(const void* key, std::size_t bytes);

enum class Scope { Global, Local, Wave };  // a barrier's: orders all memory of the block; its shared memory; a wave's
void barrier(Scope scope, Place place);
void fence();

// Of a launch that may overlap the one ahead of it. Here launches run one after the other: it is the strict card that
// knows what a thread may touch before it has waited.
void let_next_launch_begin();
void wait_for_launch_before();

// What __shfl_*_sync do on a wave of the card's width. `lanes` names the lanes of the wave that take part, each of
// which must call with the same mask, operand and width; `width` cuts the wave into segments.
enum class Shuffle { Xor, Down, Up, Index };
std::uint32_t shuffle(Shuffle kind, std::uint64_t lanes, std::uint32_t value, int operand, int width);

unsigned atomic_increment(unsigned* counter, unsigned last);  // wraps to 0 after `last`; returns the count before
float load_past_caches(const float* address);
Chunk load_chunk(const Chunk* address);
Float4 load_float4(const Float4* address);
void store_float4(Float4* address, const Float4& value);
Bf16x4 load_bf16x4(const Bf16x4* address);

// A copy lands when the group that it was committed in is waited for, not before; where the card has no copies in the
// background, at once.
void copy_async(Float4* shared, const Float4* global);
void copy_async_commit();
void copy_async_wait(int pending);

}  // namespace strata::sim
