// The simulated card: what csrc/gpu asks of a vendor, spelled in csrc/sim. Its siblings offer the same names.
//
// Host functions return an error code of the current card's vendor as an int, 0 for success.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "common/arithmetic.hpp"
#include "common/fused_gr_policy.hpp"
#include "sim/primitives.hpp"
#include "sim/runtime.hpp"

// The words of the kernels' language that C++ does not have. What a kernel is made of is inlined into it as by a card's
// compiler, so that a return address tells the whole path of an error.
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define STRATA_MOST_REGISTERS(count)
#define __grid_constant__

namespace strata::gpu {

// Whose error codes the current card gives: no constant here.
inline constexpr struct {
    operator GrBackend() const { return sim::vendor(); }
} kBackend;
inline constexpr const char* kBackendName = "sim";

// ---------------------------------------------------------------------------------------------------------------
// Device side

// threadIdx.x and its like: reading one asks the card.
template <unsigned (*ask)(int axis)>
struct AskedIndex {
    template <int kAxis>
    struct Axis {
        operator unsigned() const { return ask(kAxis); }
    };
    Axis<0> x;
    Axis<1> y;
    Axis<2> z;
};
inline constexpr AskedIndex<sim::thread_index> threadIdx{};
inline constexpr AskedIndex<sim::block_index> blockIdx{};
inline constexpr AskedIndex<sim::block_threads> blockDim{};
inline constexpr AskedIndex<sim::grid_blocks> gridDim{};

// Waits until all threads of the block are here and their memory accesses are seen by each other.
__forceinline__ void barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    sim::barrier(sim::Scope::Global, {file, line});
}

// The same for accesses to shared memory alone: what a thread wrote to global memory the others may not see.
__forceinline__ void local_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    sim::barrier(sim::Scope::Local, {file, line});
}

// Waits until all threads of the wave are here and their memory accesses are seen by each other.
__forceinline__ void wave_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    sim::barrier(sim::Scope::Wave, {file, line});
}

// `value`, which is the same in all lanes of a group of kLanes; and a value that is to be in its register by now. Both
// tell a compiler for a card what it cannot see.
__forceinline__ int same_in_group(int value) { return value; }
template <class T>
__forceinline__ void settle(T&) {}

// Orders this thread's accesses to global memory before its later ones, as seen by every block.
__forceinline__ void fence() { sim::fence(); }

#if defined(STRATA_FAULTS)
inline std::atomic<bool> narrow_masks{false};  // planted: every mask names the first kLanes lanes of its wave
#endif

// `value` of the lane whose number differs by `mask`, within a group of kLanes. All lanes of the group must call; on a
// 64-lane wave the other group may be elsewhere, so the mask names this group's lanes and no others.
__forceinline__ std::uint32_t shuffle_xor(std::uint32_t value, int mask) {
#if defined(STRATA_FAULTS)
    const bool narrow = narrow_masks;
#else
    constexpr bool narrow = false;
#endif
    const std::uint64_t group = std::uint64_t{0xffffffff} << (narrow ? 0 : sim::wave_lane() / kLanes * kLanes);
    return sim::shuffle(sim::Shuffle::Xor, group, value, mask, kLanes);
}
__forceinline__ float shuffle_xor(float value, int mask) { return bits_float(shuffle_xor(float_bits(value), mask)); }

// `value` of lane `lane` of the group of kLanes. All lanes of the group must call.
__forceinline__ float shuffle_from(float value, int lane) {
    const std::uint64_t group = std::uint64_t{0xffffffff} << (sim::wave_lane() / kLanes * kLanes);
    return bits_float(sim::shuffle(sim::Shuffle::Index, group, float_bits(value), lane, kLanes));
}

// Counts up and wraps to 0 after `last`; returns the count before.
__forceinline__ unsigned atomic_count(unsigned* counter, unsigned last) { return sim::atomic_increment(counter, last); }

__forceinline__ float load_from_other_block(const float* address) { return sim::load_past_caches(address); }
__forceinline__ Float4 load_from_other_block(const Float4* address) { return sim::load_float4(address); }
__forceinline__ Bf16x4 load_from_other_block(const Bf16x4* address) { return sim::load_bf16x4(address); }
__forceinline__ Chunk load_weights(const Chunk* address) { return sim::load_chunk(address); }
__forceinline__ Chunk load_weights_now(const Chunk* address) { return sim::load_chunk(address); }
__forceinline__ Float4 load_float4(const Float4* address) { return sim::load_float4(address); }
__forceinline__ void store_float4(Float4* address, Float4 value) { sim::store_float4(address, value); }
__forceinline__ Bf16x4 load_bf16x4(const Bf16x4* address) { return sim::load_bf16x4(address); }

// No launch overlaps another here, but the strict card knows what one that may must not touch before it has waited.
inline constexpr bool kLaunchesOverlap = true;
using sim::let_next_launch_begin;
using sim::wait_for_launch_before;
__forceinline__ void prefetch(const void*, unsigned) {}
__forceinline__ void pause(unsigned) {}

inline constexpr bool kBackgroundCopies = true;  // on some cards

// In the background where the card has that; it lands when its group is waited for, and not before.
__forceinline__ void copy_async(Float4* shared, const Float4* global) { sim::copy_async(shared, global); }
__forceinline__ void copy_async_commit() { sim::copy_async_commit(); }
template <int kPending>
__forceinline__ void copy_async_wait() {
    sim::copy_async_wait(kPending);
}

using sim::copies_in_background;

// Clusters: neighbouring blocks of a launch that run at once and write into each other's shared memory.
inline constexpr bool kClusterLaunches = true;  // on some cards
inline constexpr bool kClusters = true;
using sim::Arrivals;
using sim::copy_bulk;
using sim::copy_row_pieces;
using sim::expect_arrivals;
using sim::RowPieces;
__forceinline__ void prefetch_rows(const RowPieces&) {}
using sim::wait_arrivals;
using sim::wait_copies;
__forceinline__ void cluster_arrive(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    sim::cluster_arrive({file, line});
}
__forceinline__ void cluster_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    sim::cluster_wait({file, line});
}
template <class T>
__forceinline__ void send(T* place, int rank, T value, Arrivals& arrivals) {
    static_assert((sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16) && std::is_trivially_copyable_v<T>);
    sim::send(place, rank, &value, sizeof value, arrivals);
}

// The block's dynamic shared memory, and a statically sized piece (one for each type).
__forceinline__ Float4* dynamic_shared() { return sim::dynamic_shared(); }

template <class T>
inline constexpr char kStaticPiece = 0;  // its address stands for the type
template <class T>
__forceinline__ T& block_shared() {
    return *static_cast<T*>(sim::static_shared(&kStaticPiece<T>, sizeof(T)));
}

// ---------------------------------------------------------------------------------------------------------------
// Host side

using sim::Stream;

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using sim::count_devices;
using sim::error_name;
using sim::error_text;
using sim::pending_error;
using sim::take_error;

struct VendorDevice {
    char name[256];
    char arch[128];
    int wave_width;
    int compute_units;
    std::size_t shared_bytes;  // most that a block may ask for
    bool overlaps;             // a launch may begin before the one ahead of it has ended
    bool clusters;             // blocks of a launch can share their shared memory
};

inline int query_device(int device, VendorDevice* out) {
    sim::Card card;
    if (const int error = sim::device_card(device, &card)) return error;
    std::snprintf(out->name, sizeof out->name, "simulated %.200s", card.arch.c_str());
    std::snprintf(out->arch, sizeof out->arch, "%.100s", card.arch.c_str());
    out->wave_width = card.lanes;
    out->compute_units = card.compute_units;
    out->shared_bytes = card.shared_most;
    // The launches themselves do not: what the launcher does about it is what is simulated.
    out->overlaps = card.overlapping_launches;
    out->clusters = card.clusters;
    return 0;
}

template <class... Arguments>
int allow_shared(void (*kernel)(Arguments...), std::size_t bytes) {
    return sim::set_shared_limit(reinterpret_cast<const void*>(kernel), bytes);
}

template <class... Arguments>
int preload(void (*kernel)(Arguments...), bool* overlaps = nullptr) {
    if (overlaps != nullptr) *overlaps = true;
    return sim::preload(reinterpret_cast<const void*>(kernel));
}

inline int can_describe_rows(bool* can) {
    *can = true;
    return 0;
}
inline int describe_rows(RowPieces* rows, const void* memory, int count, int rounds, int pieces, int piece_bytes) {
    *rows = {static_cast<const char*>(memory), static_cast<unsigned>(count), static_cast<unsigned>(rounds),
             static_cast<unsigned>(pieces), static_cast<unsigned>(piece_bytes)};
    return 0;
}

// The blocks of a cluster always have room.
template <class Arguments>
int cluster_room(void (*)(Arguments), int, int, std::size_t, int, int* room) {
    *room = 1;
    return 0;
}

// Calls the kernel as a thread of the card. Not seen by the strict card's detectors: the arguments are the launch's.
template <class Arguments>
__attribute__((no_sanitize("thread"))) void enter_kernel(const void* kernel, const void* arguments) {
    reinterpret_cast<void (*)(Arguments)>(const_cast<void*>(kernel))(*static_cast<const Arguments*>(arguments));
}

template <class Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
           Arguments arguments, bool overlapping = false, unsigned cluster = 1) {
    const sim::Launch asked{reinterpret_cast<const void*>(kernel),
                            enter_kernel<Arguments>,
                            &arguments,
                            {grid.x, grid.y, grid.z},
                            static_cast<unsigned>(block),
                            shared_bytes,
                            stream,
                            overlapping,
                            cluster};
    return sim::launch(asked, sizeof arguments, stream);
}

template <class Arguments>
int launch_overlapping(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
                       Arguments arguments) {
    return launch(kernel, grid, block, shared_bytes, stream, arguments, true);
}

// The same, of clusters of so many blocks, which the grid is a multiple of. Only on cards that have them.
template <class Arguments>
int launch_clusters(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
                    Arguments arguments, int cluster) {
    return launch(kernel, grid, block, shared_bytes, stream, arguments, true, static_cast<unsigned>(cluster));
}

using sim::device_allocate;
using sim::device_free;
using sim::fill_bytes;
using sim::stream_create;
using sim::stream_destroy;
using sim::stream_is_capturing;
using sim::stream_synchronize;
inline int copy_to_host(void* host, const void* memory, std::size_t bytes, Stream stream) {
    return sim::copy_bytes(host, memory, bytes, stream);
}

// While one lives, this thread may call what a capture elsewhere would forbid, and disturbs no capture.
class RelaxedCapture {
  public:
    RelaxedCapture() : before_(sim::exchange_capture_mode(sim::CaptureMode::Relaxed)) {}
    ~RelaxedCapture() { sim::exchange_capture_mode(before_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    sim::CaptureMode before_;
};

// Makes `device` current while it lives, where it is not.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        error_ = sim::get_device(&before_);
        if (!error_ && before_ != device) {
            error_ = sim::set_device(device);
            changed_ = !error_;
        }
    }
    ~CurrentDevice() { leave(); }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    int error() const { return error_; }

    // Makes the former device current again, where it is not.
    int leave() {
        if (!std::exchange(changed_, false)) return 0;
        return sim::set_device(before_);
    }

  private:
    int before_ = 0;
    int error_ = 0;
    bool changed_ = false;
};

}  // namespace strata::gpu
