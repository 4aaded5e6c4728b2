// AMD: what csrc/gpu asks of a vendor, spelled in HIP. Its siblings offer the same names.
//
// Host functions return the runtime's error code as an int, 0 for success. HIP 5.2 to 7 are served.
#pragma once

// ROCm 6.2 brought the _sync shuffles behind this switch; from 7.0 on they are always there.
#define HIP_ENABLE_WARP_SYNC_BUILTINS
#include <hip/hip_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "common/arithmetic.hpp"
#include "common/fused_gr_policy.hpp"

// Of a kernel's argument: not copied for each thread. No kernel that asks for it is compiled here.
#ifndef __grid_constant__
#define __grid_constant__
#endif

namespace strata::gpu {

inline constexpr GrBackend kBackend = GrBackend::Hip;
inline constexpr const char* kBackendName = "hip";

// ---------------------------------------------------------------------------------------------------------------
// Device side

// Whether this pass compiles for 32-lane waves. The macro for it is gone from ROCm 7; the host pass has no answer.
#define STRATA_WAVE32 __has_builtin(__builtin_amdgcn_ballot_w32)

// The second number of __launch_bounds__ for a kernel of which so many blocks should fit a multiprocessor at once. Here
// it counts waves of a SIMD, and more than one costs registers: gfx942 would spill.
constexpr int resident_blocks(int) { return 1; }

// At most so many registers for each thread of a kernel: of those with clusters, which are empty here.
#define STRATA_MOST_REGISTERS(count)

// Waits until all threads of the block are here and their memory accesses are seen by each other.
__device__ __forceinline__ void barrier() { __syncthreads(); }

// The same for shared memory alone: accesses to global memory stay in flight.
//
// Compilers lower every barrier() to a wait for all loads; a fence for shared memory alone does not change that in
// LLVM 19 or 24, so the instructions are spelled here. Older cards would want the wait itself before their s_barrier.
__device__ __forceinline__ void local_barrier() {
#if defined(__GFX12__)
    asm volatile("s_wait_dscnt 0x0\n\ts_barrier_signal -1\n\ts_barrier_wait -1" ::: "memory");
#elif defined(__GFX11__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
    asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory");
#else
    __syncthreads();
#endif
}

// `value`, which is the same in all lanes of a group of kLanes. Where a wave is one group, the compiler learns that it
// is the same in the wave: what follows from it is computed once a wave, and branches on it cost no masks.
__device__ __forceinline__ int same_in_group(int value) {
#if STRATA_WAVE32
    return __builtin_amdgcn_readfirstlane(value);
#else
    return value;
#endif
}

// `value` is in its register before what follows in the source: arithmetic is done, a load has arrived. Compilers move
// arithmetic over a barrier, away from the loads that it is there to hide, and let a loop wait in each iteration for
// what was loaded before the first.
template <class T>
__device__ __forceinline__ void settle(T& value) {
#if defined(__HIP_DEVICE_COMPILE__)
    asm volatile("" : "+v"(value));
#else
    (void)value;
#endif
}

// Orders this thread's accesses to global memory before its later ones, as seen by every block.
__device__ __forceinline__ void fence() { __threadfence(); }

// The lanes that a shuffle names, for the headers that ask. On 64-lane waves the other group may be elsewhere: a debug
// build names this thread's group alone, and the header traps where some of it is missing. It compares the lanes' masks
// in a release build too, in a loop for each shuffle where they may differ, so there all that are here are named.
__device__ __forceinline__ unsigned long long shuffle_lanes() {
#if STRATA_WAVE32
    return 0xffffffffull;
#elif defined(NDEBUG)
    return __ballot(1);
#else
    return 0xffffffffull << (__lane_id() / kLanes * kLanes);
#endif
}

// `value` of the lane whose number differs by `mask`, within a group of kLanes. All lanes of the group must call.
template <class T>
__device__ __forceinline__ T shuffle_xor_group(T value, int mask) {
#if HIP_VERSION >= 60200000
    return __shfl_xor_sync(shuffle_lanes(), value, mask, kLanes);
#else
    return __shfl_xor(value, mask, kLanes);
#endif
}
__device__ __forceinline__ float shuffle_xor(float value, int mask) { return shuffle_xor_group(value, mask); }
__device__ __forceinline__ std::uint32_t shuffle_xor(std::uint32_t value, int mask) {
    return shuffle_xor_group(value, mask);
}

// `value` of lane `lane` of the group of kLanes. All lanes of the group must call.
__device__ __forceinline__ float shuffle_from(float value, int lane) {
#if HIP_VERSION >= 60200000
    return __shfl_sync(shuffle_lanes(), value, lane, kLanes);
#else
    return __shfl(value, lane, kLanes);
#endif
}

// Counts up and wraps to 0 after `last`; returns the count before.
// (As HIP 7 spells atomicInc: HIP 5.2 calls an instruction by a name that later compilers have dropped.)
__device__ __forceinline__ unsigned atomic_count(unsigned* counter, unsigned last) {
    return __builtin_amdgcn_atomic_inc32(counter, last, __ATOMIC_RELAXED, "agent");
}

// A value that another block of this launch wrote: past the caches that are private to a compute unit.
__device__ __forceinline__ float load_from_other_block(const float* address) {
    return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ Float4 load_from_other_block(const Float4* address) {
    return {load_from_other_block(&address->x), load_from_other_block(&address->y), load_from_other_block(&address->z),
            load_from_other_block(&address->w)};
}
__device__ __forceinline__ Bf16x4 load_from_other_block(const Bf16x4* address) {
    const auto word = [&](int i) {
        return __hip_atomic_load(&address->word[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    };
    return {{word(0), word(1)}};
}

__device__ __forceinline__ Chunk load_weights(const Chunk* address) { return *address; }
__device__ __forceinline__ Chunk load_weights_now(const Chunk* address) { return *address; }

// No launch overlaps another here.
inline constexpr bool kLaunchesOverlap = false;
__device__ __forceinline__ void let_next_launch_begin() {}
__device__ __forceinline__ void wait_for_launch_before() {}
__device__ __forceinline__ void prefetch(const void*, unsigned) {}
__device__ __forceinline__ void pause(unsigned) {}

// No blocks here share their shared memory.
inline constexpr bool kClusterLaunches = false;
inline constexpr bool kClusters = false;
struct Arrivals {
    std::uint64_t state;
};
__device__ __forceinline__ void expect_arrivals(Arrivals&, unsigned) {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void copy_bulk(void*, const void*, unsigned, Arrivals&) {}
struct RowPieces {};
__device__ __forceinline__ void prefetch_rows(const RowPieces&) {}
__device__ __forceinline__ void copy_row_pieces(void*, const RowPieces&, int, int, Arrivals&) {}
template <class T>
__device__ __forceinline__ void send(T*, int, const T&, Arrivals&) {}
__device__ __forceinline__ void wait_arrivals(Arrivals&) {}
__device__ __forceinline__ void wait_copies(Arrivals&) {}

// A float4 as one vector value. A plain struct copy is a memcpy to this compiler, and a variable that is only ever
// copied so stays in private memory.
using Vector4 = float __attribute__((ext_vector_type(4)));
__device__ __forceinline__ Float4 load_float4(const Float4* address) {
    const Vector4 v = *reinterpret_cast<const Vector4*>(address);
    return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ void store_float4(Float4* address, Float4 value) {
    *reinterpret_cast<Vector4*>(address) = Vector4{value.x, value.y, value.z, value.w};
}

// Four bf16 likewise.
using Words2 = std::uint32_t __attribute__((ext_vector_type(2)));
__device__ __forceinline__ Bf16x4 load_bf16x4(const Bf16x4* address) {
    const Words2 v = *reinterpret_cast<const Words2*>(address);
    return {{v.x, v.y}};
}

inline constexpr bool kBackgroundCopies = false;

// No copies in the background here: the copy is done when the thread has done it, and commit and wait say nothing.
__device__ __forceinline__ void copy_async(Float4* shared, const Float4* global) {
    store_float4(shared, load_float4(global));
}
__device__ __forceinline__ void copy_async_commit() {}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {}

__device__ __forceinline__ constexpr bool copies_in_background() { return false; }

// The block's dynamic shared memory, and a statically sized piece (one for each type).
__device__ __forceinline__ Float4* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char strata_dynamic_shared[];
    return reinterpret_cast<Float4*>(strata_dynamic_shared);
}

template <class T>
__device__ __forceinline__ T& block_shared() {
    __shared__ __align__(16) unsigned char storage[sizeof(T)];
    return *reinterpret_cast<T*>(storage);
}

// ---------------------------------------------------------------------------------------------------------------
// Host side

using Stream = hipStream_t;

inline const char* error_name(int code) { return hipGetErrorName(static_cast<hipError_t>(code)); }
inline const char* error_text(int code) { return hipGetErrorString(static_cast<hipError_t>(code)); }

// The calling thread's last error, left in place; and taken away.
inline int pending_error() { return hipPeekAtLastError(); }
inline int take_error() { return hipGetLastError(); }

inline int count_devices(int* count) { return hipGetDeviceCount(count); }

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
    hipDeviceProp_t properties;
    if (const int error = hipGetDeviceProperties(&properties, device)) return error;
    std::snprintf(out->name, sizeof out->name, "%s", properties.name);
    std::snprintf(out->arch, sizeof out->arch, "%.*s", static_cast<int>(sizeof out->arch - 1), properties.gcnArchName);
    out->wave_width = properties.warpSize;
    out->compute_units = properties.multiProcessorCount;
    out->shared_bytes = properties.sharedMemPerBlock;
    out->overlaps = false;
    out->clusters = false;
    return 0;
}

// Lets `kernel` ask for up to `bytes` of dynamic shared memory, on the current device, and prefers shared memory to
// first-level cache for it.
template <class... Arguments>
int allow_shared(void (*kernel)(Arguments...), std::size_t bytes) {
    const auto function = reinterpret_cast<const void*>(kernel);
    if (const int error =
            hipFuncSetAttribute(function, hipFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))) {
        return error;
    }
    return hipFuncSetAttribute(function, hipFuncAttributePreferredSharedMemoryCarveout, 100);
}

// Loads `kernel` onto the current device, which a capture must not be the first to do. No launches overlap.
template <class... Arguments>
int preload(void (*kernel)(Arguments...), bool* overlaps = nullptr) {
    if (overlaps != nullptr) *overlaps = false;
    hipFuncAttributes attributes;
    return hipFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

template <class Arguments>
int cluster_room(void (*)(Arguments), int, int, std::size_t, int, int* room) {
    *room = 0;
    return 0;
}

template <class Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
           Arguments arguments) {
    void* values[] = {&arguments};
    return hipLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(block)), values,
                           shared_bytes, stream);
}

// Here a launch like any other.
template <class Arguments>
int launch_overlapping(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
                       Arguments arguments) {
    return launch(kernel, grid, block, shared_bytes, stream, arguments);
}

// No card here is asked for these.
inline int can_describe_rows(bool* can) {
    *can = false;
    return 0;
}
inline int describe_rows(RowPieces*, const void*, int, int, int, int) { return hipErrorNotSupported; }
template <class Arguments>
int launch_clusters(void (*)(Arguments), dim3, int, std::size_t, Stream, Arguments, int) {
    return hipErrorNotSupported;
}

// A stream that does not wait for the legacy stream, nor it for this one.
inline int stream_create(Stream* stream) { return hipStreamCreateWithFlags(stream, hipStreamNonBlocking); }
inline int stream_destroy(Stream stream) { return hipStreamDestroy(stream); }
inline int stream_synchronize(Stream stream) { return hipStreamSynchronize(stream); }

inline int stream_is_capturing(Stream stream, bool* capturing) {
    hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
    const int error = hipStreamIsCapturing(stream, &status);
    *capturing = status != hipStreamCaptureStatusNone;
    return error;
}

inline int device_allocate(void** memory, std::size_t bytes) { return hipMalloc(memory, bytes); }
inline int device_free(void* memory) { return hipFree(memory); }
inline int fill_bytes(void* memory, int value, std::size_t bytes, Stream stream) {
    return hipMemsetAsync(memory, value, bytes, stream);
}
inline int copy_to_host(void* host, const void* memory, std::size_t bytes, Stream stream) {
    return hipMemcpyAsync(host, memory, bytes, hipMemcpyDeviceToHost, stream);
}

// While one lives, this thread may call what a capture elsewhere would forbid, and disturbs no capture.
class RelaxedCapture {
  public:
    RelaxedCapture() { (void)hipThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { (void)hipThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    hipStreamCaptureMode mode_ = hipStreamCaptureModeRelaxed;
};

// Makes `device` current while it lives, where it is not.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        error_ = hipGetDevice(&before_);
        if (!error_ && before_ != device) {
            error_ = hipSetDevice(device);
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
        return hipSetDevice(before_);
    }

  private:
    int before_ = 0;
    int error_ = 0;
    bool changed_ = false;
};

// ---------------------------------------------------------------------------------------------------------------
// The numbers of the policy's error table, as this header names them.

#define STRATA_CODE(number, name) static_assert(hip##name == (number), "hip" #name " was renumbered")
STRATA_CODE(0, Success);
STRATA_CODE(1, ErrorInvalidValue);
STRATA_CODE(2, ErrorOutOfMemory);
STRATA_CODE(3, ErrorNotInitialized);
STRATA_CODE(9, ErrorInvalidConfiguration);
STRATA_CODE(13, ErrorInvalidSymbol);
STRATA_CODE(17, ErrorInvalidDevicePointer);
STRATA_CODE(21, ErrorInvalidMemcpyDirection);
STRATA_CODE(35, ErrorInsufficientDriver);
STRATA_CODE(98, ErrorInvalidDeviceFunction);
STRATA_CODE(100, ErrorNoDevice);
STRATA_CODE(101, ErrorInvalidDevice);
STRATA_CODE(200, ErrorInvalidImage);
STRATA_CODE(201, ErrorInvalidContext);
STRATA_CODE(209, ErrorNoBinaryForGpu);
STRATA_CODE(214, ErrorECCNotCorrectable);
STRATA_CODE(215, ErrorUnsupportedLimit);
STRATA_CODE(218, ErrorInvalidKernelFile);
STRATA_CODE(300, ErrorInvalidSource);
STRATA_CODE(301, ErrorFileNotFound);
STRATA_CODE(302, ErrorSharedObjectSymbolNotFound);
STRATA_CODE(303, ErrorSharedObjectInitFailed);
STRATA_CODE(400, ErrorInvalidHandle);
STRATA_CODE(401, ErrorIllegalState);
STRATA_CODE(500, ErrorNotFound);
STRATA_CODE(600, ErrorNotReady);
STRATA_CODE(700, ErrorIllegalAddress);
STRATA_CODE(701, ErrorLaunchOutOfResources);
STRATA_CODE(702, ErrorLaunchTimeOut);
STRATA_CODE(708, ErrorSetOnActiveProcess);
STRATA_CODE(709, ErrorContextIsDestroyed);
STRATA_CODE(710, ErrorAssert);
STRATA_CODE(719, ErrorLaunchFailure);
STRATA_CODE(720, ErrorCooperativeLaunchTooLarge);
STRATA_CODE(801, ErrorNotSupported);
STRATA_CODE(900, ErrorStreamCaptureUnsupported);
STRATA_CODE(901, ErrorStreamCaptureInvalidated);
STRATA_CODE(902, ErrorStreamCaptureMerge);
STRATA_CODE(903, ErrorStreamCaptureUnmatched);
STRATA_CODE(904, ErrorStreamCaptureUnjoined);
STRATA_CODE(905, ErrorStreamCaptureIsolation);
STRATA_CODE(906, ErrorStreamCaptureImplicit);
STRATA_CODE(907, ErrorCapturedEvent);
STRATA_CODE(908, ErrorStreamCaptureWrongThread);
STRATA_CODE(910, ErrorGraphExecUpdateFailure);
#if HIP_VERSION >= 60000000  // 5.2 has no name for these two
STRATA_CODE(911, ErrorInvalidChannelDescriptor);
STRATA_CODE(912, ErrorInvalidTexture);
#endif
STRATA_CODE(999, ErrorUnknown);
STRATA_CODE(1052, ErrorRuntimeMemory);
STRATA_CODE(1053, ErrorRuntimeOther);
#undef STRATA_CODE

}  // namespace strata::gpu
