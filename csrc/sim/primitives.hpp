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
// which must call with the same mask, width and, but for Index, operand; `width` cuts the wave into segments.
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
bool copies_in_background();

// What a block waits for: bytes that bulk copies and other blocks of its cluster bring into its shared memory, where it
// lies. The card keeps the count elsewhere.
struct alignas(8) Arrivals {
    std::uint64_t state;
};

// Once a launch for each object, by one thread of its block, before that thread arrives at the cluster's barrier.
void expect_arrivals(Arrivals& arrivals, unsigned bytes);

// The cluster's barrier, in two halves. All threads of the cluster call both. After it each block has begun and expects
// its arrivals; it orders nothing else.
void cluster_arrive(Place place);
void cluster_wait(Place place);

// Bytes on their way. They are in shared memory at some time before a wait for `arrivals` returns: some at a time that
// the seed says, others as late as that wait. A copy is for the own block; what is sent, 4, 8 or 16 bytes, goes to
// where `place` and `arrivals` of the own block are in the block of this `rank`.
void copy_bulk(void* shared, const void* global, unsigned bytes, Arrivals& arrivals);
void send(void* place, int rank, const void* value, unsigned bytes, Arrivals& arrivals);

// Rows of `rounds` rounds of `pieces` pieces, and a copy of one piece of each round of a row, one behind the other.
struct RowPieces {
    const char* memory;
    unsigned count, rounds, pieces, piece_bytes;
};
void copy_row_pieces(void* shared, const RowPieces& rows, int row, int piece, Arrivals& arrivals);

// Until all bytes that were expected have come; the second, where none of them were sent.
void wait_arrivals(Arrivals& arrivals);
void wait_copies(Arrivals& arrivals);

}  // namespace strata::sim
