// NVIDIA: what csrc/gpu asks of a vendor, spelled in CUDA. Its siblings offer the same names.
//
// Host functions return the runtime's error code as an int, 0 for success.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "common/arithmetic.hpp"
#include "common/fused_gr_policy.hpp"

namespace strata::gpu {

inline constexpr GrBackend kBackend = GrBackend::Cuda;
inline constexpr const char* kBackendName = "cuda";

// ---------------------------------------------------------------------------------------------------------------
// Device side

// The second number of __launch_bounds__ for a kernel of which so many blocks should fit a multiprocessor at once.
constexpr int resident_blocks(int blocks) { return blocks; }

// Instead of __launch_bounds__: at most so many registers for each thread of a kernel.
#define STRATA_MOST_REGISTERS(count) __maxnreg__(count)

// Waits until all threads of the block are here and their memory accesses are seen by each other.
__device__ __forceinline__ void barrier() { __syncthreads(); }

// The same for shared memory alone. Here no barrier waits for loads in flight, so it is the same one.
__device__ __forceinline__ void local_barrier() { __syncthreads(); }

// `value`, which is the same in all lanes of a group of kLanes: told to compilers that gain by it, which this is not.
__device__ __forceinline__ int same_in_group(int value) { return value; }

// Computes `value` before what follows in the source, where compilers must be told.
template <class T>
__device__ __forceinline__ void settle(T&) {}

// Orders this thread's accesses to global memory before its later ones, as seen by every block.
__device__ __forceinline__ void fence() { __threadfence(); }

// `value` of the lane whose number differs by `mask`, within a group of kLanes. All lanes of the group must call.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask, kLanes);
}
__device__ __forceinline__ std::uint32_t shuffle_xor(std::uint32_t value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask, kLanes);
}

// `value` of lane `lane` of the group of kLanes. All lanes of the group must call.
__device__ __forceinline__ float shuffle_from(float value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane, kLanes);
}

// Counts up and wraps to 0 after `last`; returns the count before.
__device__ __forceinline__ unsigned atomic_count(unsigned* counter, unsigned last) { return atomicInc(counter, last); }

// A value that another block wrote, of this launch or, before wait_for_launch_before(), of an earlier one: past the
// caches that are private to a multiprocessor.
__device__ __forceinline__ float load_from_other_block(const float* address) { return __ldcg(address); }

__device__ __forceinline__ Float4 load_from_other_block(const Float4* address) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(address));
    return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ Bf16x4 load_from_other_block(const Bf16x4* address) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(address));
    return {{v.x, v.y}};
}

// Weights are read once by one thread of a launch: they need no place in the first-level cache.
__device__ __forceinline__ Chunk load_weights(const Chunk* address) {
    Chunk chunk;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]), "=r"(chunk.word[3])
        : "l"(address));
    return chunk;
}

// The same, asked for before whatever waits behind it in the source.
__device__ __forceinline__ Chunk load_weights_now(const Chunk* address) {
    Chunk chunk;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]), "=r"(chunk.word[3])
                 : "l"(address)
                 : "memory");
    return chunk;
}

#if __CUDA_ARCH__ >= 900
inline constexpr bool kLaunchesOverlap = true;  // as this pass of the compiler knows
#else
inline constexpr bool kLaunchesOverlap = false;
#endif

// For kernels that launch_overlapping() launches. The next launch may begin; and everything before this launch has
// ended and is seen. On cards without overlapping launches both are so from the start.
__device__ __forceinline__ void let_next_launch_begin() {
    if constexpr (kLaunchesOverlap) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_launch_before() {
    if constexpr (kLaunchesOverlap) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Asks for memory into the second-level cache, and waits for some time: only where launches overlap.
__device__ __forceinline__ void prefetch(const void* address, unsigned bytes) {
    if constexpr (kLaunchesOverlap) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
    }
}
__device__ __forceinline__ void pause(unsigned nanoseconds) {
    if constexpr (kLaunchesOverlap) __nanosleep(nanoseconds);
}

// Clusters: blocks of a launch that run at once and write into each other's shared memory. launch_clusters() makes
// them, on cards that have them (VendorDevice::clusters).
inline constexpr bool kClusterLaunches = true;       // on some cards
inline constexpr bool kClusters = kLaunchesOverlap;  // on those that this pass of the compiler is for

// What a block waits for, once a launch: bytes that bulk copies and other blocks of its cluster bring into its shared
// memory. Lives there itself.
struct alignas(8) Arrivals {
    std::uint64_t state;
};

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// By one thread of the block, before the barrier (and cluster_arrive()) that tell the others. The fence shows the
// object to copies and to other blocks; bytes that come before they are expected do no harm.
__device__ __forceinline__ void expect_arrivals(Arrivals& arrivals, unsigned bytes) {
    if constexpr (kClusters) {
        const unsigned place = shared_address(&arrivals);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(bytes) : "memory");
    }
}

// All threads of the cluster call both. After cluster_wait() each block of it has begun and expects its arrivals.
__device__ __forceinline__ void cluster_arrive() {
    if constexpr (kClusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    if constexpr (kClusters) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies from global to this block's shared memory in the background, without its threads. Both addresses and `bytes`
// are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, Arrivals& arrivals) {
    if constexpr (kClusters) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(shared)),
                     "l"(global), "r"(bytes), "r"(shared_address(&arrivals))
                     : "memory");
    }
}

// Rows of global memory whose pieces can be copied: describe_rows() makes it, a kernel has it as a __grid_constant__.
struct RowPieces {
    CUtensorMap map;
};

// Asks for the description itself, so that the first copy need not wait for it.
__device__ __forceinline__ void prefetch_rows(const RowPieces& rows) {
    if constexpr (kClusters) asm volatile("prefetch.tensormap [%0];" ::"l"(&rows.map) : "memory");
}

// Copies piece `piece` of each round of row `row`, one behind the other, otherwise as copy_bulk(). `shared` is a
// multiple of 128. (With .shared::cluster ptxas 13.0 for sm_120 adds a check, a call and a stack.)
__device__ __forceinline__ void copy_row_pieces(void* shared, const RowPieces& rows, int row, int piece,
                                                Arrivals& arrivals) {
    if constexpr (kClusters) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, 0, %3}], "
            "[%4];" ::"r"(shared_address(shared)),
            "l"(&rows.map), "r"(piece), "r"(row), "r"(shared_address(&arrivals))
            : "memory");
    }
}

// Where `place` of this block's shared memory is in block `rank` of its cluster.
__device__ __forceinline__ unsigned address_in_block(const void* place, int rank) {
    unsigned address = 0;
    if constexpr (kClusters) {
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
    }
    return address;
}

// `value`, of 4, 8 or 16 bytes, goes to where `place` is in block `rank` of the cluster, which its `arrivals` count. In
// the background: the compiler may move other accesses of this block over it.
template <class T>
__device__ __forceinline__ void send(T* place, int rank, const T& value, Arrivals& arrivals) {
    if constexpr (kClusters) {
        std::uint32_t words[sizeof(T) / 4];
        memcpy(words, &value, sizeof value);
        const unsigned to = address_in_block(place, rank);
        const unsigned counted = address_in_block(&arrivals, rank);
        if constexpr (sizeof(T) == 4) {
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                         "r"(words[0]), "r"(counted));
        } else if constexpr (sizeof(T) == 8) {
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                         "r"(words[0]), "r"(words[1]), "r"(counted));
        } else {
            static_assert(sizeof(T) == 16);
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(counted));
        }
    }
}

// Whether all expected bytes have come, after waiting a while for them; what `scope` has written is then seen.
#define STRATA_TRY_WAIT(scope)                \
    "{\n"                                     \
    ".reg .pred here;\n"                      \
    "mbarrier.try_wait.parity.acquire." scope \
    ".shared::cta.b64 here, [%1], 0;\n"       \
    "selp.u32 %0, 1, 0, here;\n"              \
    "}"

// Waits until all expected bytes have come. This thread then sees them.
__device__ __forceinline__ void wait_arrivals(Arrivals& arrivals) {
    if constexpr (kClusters) {
        for (unsigned here = 0; here == 0;) {
            asm volatile(STRATA_TRY_WAIT("cluster") : "=r"(here) : "r"(shared_address(&arrivals)) : "memory");
        }
    }
}

// The same where this block's own copies bring all of them. What other blocks write is not looked for, so the
// first-level cache stays as it is.
__device__ __forceinline__ void wait_copies(Arrivals& arrivals) {
    if constexpr (kClusters) {
        for (unsigned here = 0; here == 0;) {
            asm volatile(STRATA_TRY_WAIT("cta") : "=r"(here) : "r"(shared_address(&arrivals)) : "memory");
        }
    }
}
#undef STRATA_TRY_WAIT

// A float4 as one vector value.
__device__ __forceinline__ Float4 load_float4(const Float4* address) { return *address; }
__device__ __forceinline__ void store_float4(Float4* address, Float4 value) { *address = value; }

// Four bf16 as one vector value.
__device__ __forceinline__ Bf16x4 load_bf16x4(const Bf16x4* address) { return *address; }

inline constexpr bool kBackgroundCopies = true;  // on some cards

// Copies a float4 from global to shared memory: in the background from sm_80 on, at once before.
__device__ __forceinline__ void copy_async(Float4* shared, const Float4* global) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
    *shared = *global;
#endif
}

// Closes a group of copies; copy_async_wait<n> returns when all but the n youngest groups have landed.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Whether a copy_async() leaves the thread to go on meanwhile.
__device__ __forceinline__ constexpr bool copies_in_background() {
#if __CUDA_ARCH__ >= 800
    return true;
#else
    return false;
#endif
}

// The block's dynamic shared memory, of which copy_row_pieces() asks most, and a statically sized piece (one for each
// type).
__device__ __forceinline__ Float4* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char strata_dynamic_shared[];
    return reinterpret_cast<Float4*>(strata_dynamic_shared);
}

template <class T>
__device__ __forceinline__ T& block_shared() {
    __shared__ __align__(16) unsigned char storage[sizeof(T)];
    return *reinterpret_cast<T*>(storage);
}

// ---------------------------------------------------------------------------------------------------------------
// Host side

using Stream = cudaStream_t;

inline const char* error_name(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
inline const char* error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// The calling thread's last error, left in place; and taken away.
inline int pending_error() { return cudaPeekAtLastError(); }
inline int take_error() { return cudaGetLastError(); }

inline int count_devices(int* count) { return cudaGetDeviceCount(count); }

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
    cudaDeviceProp properties;
    if (const int error = cudaGetDeviceProperties(&properties, device)) return error;
    std::snprintf(out->name, sizeof out->name, "%s", properties.name);
    std::snprintf(out->arch, sizeof out->arch, "sm_%d%d", properties.major, properties.minor);
    out->wave_width = properties.warpSize;
    out->compute_units = properties.multiProcessorCount;
    out->shared_bytes = properties.sharedMemPerBlockOptin;
    out->overlaps = properties.major >= 9;
    out->clusters = properties.major >= 9 && properties.clusterLaunch != 0;
    return 0;
}

// Lets `kernel` ask for up to `bytes` of dynamic shared memory, on the current device, and prefers shared memory to
// first-level cache for it.
template <class... Arguments>
int allow_shared(void (*kernel)(Arguments...), std::size_t bytes) {
    const auto function = reinterpret_cast<const void*>(kernel);
    if (const int error =
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))) {
        return error;
    }
    return cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

// Loads `kernel` onto the current device, which a capture must not be the first to do. `overlaps`, where asked for: its
// code was compiled for cards that have overlapping launches and clusters, and not made by the driver from older code.
template <class... Arguments>
int preload(void (*kernel)(Arguments...), bool* overlaps = nullptr) {
    cudaFuncAttributes attributes;
    const int error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (!error && overlaps != nullptr) *overlaps = attributes.ptxVersion >= 90;
    return error;
}

// What a launch asks for besides its kernel and arguments; `attributes` must outlive it.
template <std::size_t kCount>
cudaLaunchConfig_t launch_config(dim3 grid, int block, std::size_t shared_bytes,
                                 cudaLaunchAttribute (&attributes)[kCount]) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(block));
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = attributes;
    config.numAttrs = kCount;
    return config;
}

inline cudaLaunchAttribute overlapping() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}

// In clusters of `cluster` neighbouring blocks.
inline cudaLaunchAttribute clustered(int cluster) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

// The driver's function that describes memory to copies of pieces; null where it has none.
using RowEncoder = decltype(&cuTensorMapEncodeTiled);
inline int row_encoder(RowEncoder* encoder) {
    static std::atomic<RowEncoder> known{nullptr};
    *encoder = known;
    if (*encoder != nullptr) return 0;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kSince = 12000;
    if (const int error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince, cudaEnableDefault, &result)) {
        return error;
    }
    if (result == cudaDriverEntryPointSuccess) known = reinterpret_cast<RowEncoder>(found);
    *encoder = known;
    return 0;
}
inline int can_describe_rows(bool* can) {
    RowEncoder encode = nullptr;
    const int error = row_encoder(&encode);
    *can = encode != nullptr;
    return error;
}

// `count` rows of `rounds` rounds each, of `pieces` pieces of `piece_bytes` bytes, all without gaps from `memory` on.
inline int describe_rows(RowPieces* rows, const void* memory, int count, int rounds, int pieces, int piece_bytes) {
    RowEncoder encode = nullptr;
    if (const int error = row_encoder(&encode)) return error;
    if (encode == nullptr) return cudaErrorNotSupported;
    const auto values = static_cast<cuuint32_t>(piece_bytes / 2);  // of 16 bits
    const auto piece = static_cast<cuuint64_t>(piece_bytes);
    const auto round = piece * static_cast<cuuint64_t>(pieces);
    const cuuint64_t sizes[] = {values, static_cast<cuuint64_t>(pieces), static_cast<cuuint64_t>(rounds),
                                static_cast<cuuint64_t>(count)};
    const cuuint64_t strides[] = {piece, round, round * static_cast<cuuint64_t>(rounds)};
    const cuuint32_t copied[] = {values, 1, static_cast<cuuint32_t>(rounds), 1};
    const cuuint32_t steps[] = {1, 1, 1, 1};
    const auto describe = [&] {
        return encode(&rows->map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(memory), sizes, strides, copied,
                      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    int code = describe();
    if (code == CUDA_ERROR_INVALID_CONTEXT) {
        // A driver's function, unlike the runtime's, does not make the device's context current for a new thread.
        int device = 0;
        if (const int error = cudaGetDevice(&device)) return error;
        if (const int error = cudaSetDevice(device)) return error;
        code = describe();
    }
    return code;
}

// How many clusters of `cluster` such blocks the current device can run at once, with what else limits this process.
template <class Arguments>
int cluster_room(void (*kernel)(Arguments), int blocks, int block, std::size_t shared_bytes, int cluster, int* room) {
    cudaLaunchAttribute attributes[] = {clustered(cluster)};
    const cudaLaunchConfig_t config =
        launch_config(dim3(static_cast<unsigned>(blocks)), block, shared_bytes, attributes);
    return cudaOccupancyMaxActiveClusters(room, reinterpret_cast<const void*>(kernel), &config);
}

template <class Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
           Arguments arguments) {
    void* values[] = {&arguments};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(block)), values,
                            shared_bytes, stream);
}

template <class Arguments>
int launch_by(cudaLaunchConfig_t config, void (*kernel)(Arguments), Stream stream, Arguments arguments) {
    config.stream = stream;
    void* values[] = {&arguments};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), values);
}

// Begins as soon as the launch ahead of it lets it, on cards that have overlapping launches.
template <class Arguments>
int launch_overlapping(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
                       Arguments arguments) {
    cudaLaunchAttribute attributes[] = {overlapping()};
    return launch_by(launch_config(grid, block, shared_bytes, attributes), kernel, stream, arguments);
}

// The same for a kernel whose blocks are in clusters of `cluster` neighbours each. Code 912 or 9 where the card cannot.
template <class Arguments>
int launch_clusters(void (*kernel)(Arguments), dim3 grid, int block, std::size_t shared_bytes, Stream stream,
                    Arguments arguments, int cluster) {
    cudaLaunchAttribute attributes[] = {overlapping(), clustered(cluster)};
    return launch_by(launch_config(grid, block, shared_bytes, attributes), kernel, stream, arguments);
}

// A stream that does not wait for the legacy stream, nor it for this one.
inline int stream_create(Stream* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking); }
inline int stream_destroy(Stream stream) { return cudaStreamDestroy(stream); }
inline int stream_synchronize(Stream stream) { return cudaStreamSynchronize(stream); }

inline int stream_is_capturing(Stream stream, bool* capturing) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const int error = cudaStreamIsCapturing(stream, &status);
    *capturing = status != cudaStreamCaptureStatusNone;
    return error;
}

inline int device_allocate(void** memory, std::size_t bytes) { return cudaMalloc(memory, bytes); }
inline int device_free(void* memory) { return cudaFree(memory); }
inline int fill_bytes(void* memory, int value, std::size_t bytes, Stream stream) {
    return cudaMemsetAsync(memory, value, bytes, stream);
}
inline int copy_to_host(void* host, const void* memory, std::size_t bytes, Stream stream) {
    return cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, stream);
}

// While one lives, this thread may call what a capture elsewhere would forbid, and disturbs no capture.
class RelaxedCapture {
  public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes `device` current while it lives, where it is not.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        error_ = cudaGetDevice(&before_);
        if (!error_ && before_ != device) {
            error_ = cudaSetDevice(device);
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
        return cudaSetDevice(before_);
    }

  private:
    int before_ = 0;
    int error_ = 0;
    bool changed_ = false;
};

// ---------------------------------------------------------------------------------------------------------------
// The numbers of the policy's error table, as this header names them.

#define STRATA_CODE(number, name) static_assert(cuda##name == (number), "cuda" #name " was renumbered")
STRATA_CODE(0, Success);
STRATA_CODE(1, ErrorInvalidValue);
STRATA_CODE(2, ErrorMemoryAllocation);
STRATA_CODE(3, ErrorInitializationError);
STRATA_CODE(9, ErrorInvalidConfiguration);
STRATA_CODE(13, ErrorInvalidSymbol);
STRATA_CODE(17, ErrorInvalidDevicePointer);
STRATA_CODE(21, ErrorInvalidMemcpyDirection);
STRATA_CODE(35, ErrorInsufficientDriver);
STRATA_CODE(98, ErrorInvalidDeviceFunction);
STRATA_CODE(100, ErrorNoDevice);
STRATA_CODE(101, ErrorInvalidDevice);
STRATA_CODE(200, ErrorInvalidKernelImage);
STRATA_CODE(201, ErrorDeviceUninitialized);
STRATA_CODE(209, ErrorNoKernelImageForDevice);
STRATA_CODE(214, ErrorECCUncorrectable);
STRATA_CODE(215, ErrorUnsupportedLimit);
STRATA_CODE(218, ErrorInvalidPtx);
STRATA_CODE(226, ErrorContained);
STRATA_CODE(300, ErrorInvalidSource);
STRATA_CODE(301, ErrorFileNotFound);
STRATA_CODE(302, ErrorSharedObjectSymbolNotFound);
STRATA_CODE(303, ErrorSharedObjectInitFailed);
STRATA_CODE(400, ErrorInvalidResourceHandle);
STRATA_CODE(401, ErrorIllegalState);
STRATA_CODE(500, ErrorSymbolNotFound);
STRATA_CODE(600, ErrorNotReady);
STRATA_CODE(700, ErrorIllegalAddress);
STRATA_CODE(701, ErrorLaunchOutOfResources);
STRATA_CODE(702, ErrorLaunchTimeout);
STRATA_CODE(708, ErrorSetOnActiveProcess);
STRATA_CODE(709, ErrorContextIsDestroyed);
STRATA_CODE(710, ErrorAssert);
STRATA_CODE(714, ErrorHardwareStackError);
STRATA_CODE(715, ErrorIllegalInstruction);
STRATA_CODE(716, ErrorMisalignedAddress);
STRATA_CODE(717, ErrorInvalidAddressSpace);
STRATA_CODE(718, ErrorInvalidPc);
STRATA_CODE(719, ErrorLaunchFailure);
STRATA_CODE(720, ErrorCooperativeLaunchTooLarge);
STRATA_CODE(721, ErrorTensorMemoryLeak);
STRATA_CODE(801, ErrorNotSupported);
STRATA_CODE(810, ErrorMpsClientTerminated);
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
STRATA_CODE(911, ErrorExternalDevice);
STRATA_CODE(912, ErrorInvalidClusterSize);
STRATA_CODE(999, ErrorUnknown);
#undef STRATA_CODE

}  // namespace strata::gpu
