// The residual streams as kernels read and write them, four neighbours at a time: of fp32 (Float4) or bf16 (Bf16x4). A
// kernel that touches them is a template on that type, Four, and differs in nothing else:
//
//     Float4 value = load_stream(residual + f);               // `residual` is a const Four*
//     value = fold(load_stream(block_out + f), gain, value);  // where a write is pending
//     residual_out[f] = round_stream<Four>(value);            // from here on `value` is what all later steps read
#pragma once

#include "gpu/faults.hpp"
#include "gpu/vendor.hpp"

namespace strata::gpu {

__device__ __forceinline__ Float4 load_stream(const Float4* address) { return load_float4(address); }
__device__ __forceinline__ Float4 load_stream(const Bf16x4* address) { return widen(load_bf16x4(address)); }

// The same of what an earlier launch wrote, while this thread has not waited for the launch ahead: caches that are
// private to a multiprocessor may still hold what was there before.
__device__ __forceinline__ Float4 load_stream_early(const Float4* address) { return load_from_other_block(address); }
__device__ __forceinline__ Float4 load_stream_early(const Bf16x4* address) {
    return widen(load_from_other_block(address));
}

// Rounds R' to what the stream holds, and returns that for `residual_out`. Twice is as good as once. (The store is left
// to the caller: with it in here, nvcc 13 takes 50 registers instead of 48 for split's norm of fp32 streams.)
template <class Four>
__device__ __forceinline__ Four round_stream(Float4& value);

template <>
__device__ __forceinline__ Float4 round_stream<Float4>(Float4& value) {
    return canonical(value);
}

template <>
__device__ __forceinline__ Bf16x4 round_stream<Bf16x4>(Float4& value) {
    if (planted(Fault::kCutStream)) {
        const auto cut = [](float v) { return bits_float(float_bits(v) & 0xffff0000u); };
        value = {cut(value.x), cut(value.y), cut(value.z), cut(value.w)};
    }
    const Bf16x4 rounded = round_bf16(value);
    value = widen(rounded);
    return rounded;
}

}  // namespace strata::gpu
