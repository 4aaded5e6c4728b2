// Faults that tests plant, to see the self-test catch them. In every other build planted() is false at compile time and
// nothing of this is left.
//
// The simulated card's fault build (STRATA_FAULTS) takes the fault at run time, for chosen variants: its launches are
// synchronous, so the variant that is being launched is known. A GPU's fault build names one of P4's at compile time,
// and the architecture that the gate takes a card for (STRATA_FAULT=kOutOfBounds, STRATA_FAULT_ARCHITECTURE=gfx1201,
// both variables of CMake's too), so that P4 is launched on a card at hand.
#pragma once

#if defined(STRATA_FAULTS)
#include <atomic>
#endif

#include "common/backend.hpp"
#include "common/fused_gr_policy.hpp"
#include "common/host_device.hpp"
#include "gpu/vendor.hpp"

namespace strata::gpu {

enum class Fault : int {
    kNone,
    // in the register-half kernel
    kWrongSwizzle,    // scattered as staged's rows, not its planes
    kHalfANotLoaded,  // tile 2's half A is not asked for before the loop
    kIdleSkipHalfB,   // the inject block's idle groups do not fetch their half B
    kTokenSkipped,    // the last token's tile is not scattered
    kHalfBWrongTile,  // half B comes from tile h + 1
    kMissingBarrier,  // tile h is overwritten while others still read it
    kOutOfBounds,     // a store far outside every buffer
    // in any kernel of the chosen variants
    kNarrowMask,       // every shuffle names the first 32 lanes of its wave
    kStaleCounter,     // q8_1 counters are not cleared
    kWrongArithmetic,  // a row's sum is off by its last bit
    kWritesNothing,    // nothing is launched
    kCutStream,        // R' of bf16 streams is cut off, not rounded
    kFlippedBit,       // one bit of one output, after the read
};

#if defined(STRATA_FAULTS)

struct Planted {
    Fault fault = Fault::kNone;
    unsigned variants = 0;  // bit v for variant v below kHcRuntimeGeometry
    int output = 0;         // of kFlippedBit, in the self-test's order
    int case_stride = 1;    // of the self-test
    // Of the last read that any thread made: the variant whose launches are under way, and of which streams.
    std::atomic<int> launching{0};
    std::atomic<StreamType> stream_type{StreamType::Float32};
    std::atomic<long> reads[kHcRuntimeGeometry] = {};  // made of each variant below that
};
inline Planted& planted_fault() {
    static Planted fault;
    return fault;
}

inline bool planted(Fault fault) {
    const Planted& p = planted_fault();
    return p.fault == fault && p.launching < kHcRuntimeGeometry && (p.variants >> p.launching & 1u) != 0;
}

// Notes which variant a read launches; true: it launches nothing.
inline bool fault_before_read(int variant, StreamType stream_type) {
    Planted& p = planted_fault();
    p.launching = variant;
    p.stream_type = stream_type;
    if (variant < kHcRuntimeGeometry) ++p.reads[variant];
    narrow_masks = planted(Fault::kNarrowMask);
    return planted(Fault::kWritesNothing);
}

struct FlipArgs {
    std::uint32_t* word;
};
inline constexpr std::uint32_t kFlip = 1u << 22;
__global__ inline void gr_fault_flip_kernel(FlipArgs args) {
    if (threadIdx.x == 0) *args.word ^= kFlip;
}

inline void fault_after_read(const ReadArgs& args, Stream stream) {
    if (!planted(Fault::kFlippedBit)) return;
    void* const outputs[] = {args.mixed, args.inject, args.residual_out, args.lo, args.rs, args.q8_1};
    auto* words = static_cast<std::uint32_t*>(outputs[planted_fault().output]);
    if (words != nullptr) launch(gr_fault_flip_kernel, dim3(1), kLanes, 0, stream, FlipArgs{words + args.tokens / 2});
}

inline int fault_case_stride() { return planted_fault().case_stride; }
constexpr const char* gate_architecture(const char* arch) { return arch; }

#else

inline bool fault_before_read(int, StreamType) { return false; }
inline void fault_after_read(const ReadArgs&, Stream) {}
constexpr int fault_case_stride() { return 1; }

#if defined(STRATA_FAULT_ARCHITECTURE)
constexpr const char* gate_architecture(const char*) { return STRATA_FAULT_ARCHITECTURE; }
#else
constexpr const char* gate_architecture(const char* arch) { return arch; }
#endif

#if defined(STRATA_FAULT)
STRATA_HOST_DEVICE constexpr bool planted(Fault fault) { return fault == Fault::STRATA_FAULT; }
#else
STRATA_HOST_DEVICE constexpr bool planted(Fault) { return false; }
#endif

#endif

}  // namespace strata::gpu
