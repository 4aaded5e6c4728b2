#include "torch/handles.hpp"

#include <stdexcept>

namespace strata {
namespace {

// Torch hands out dtypes and device types as numbers whose values only it knows: both tables are asked for once.
constexpr int kCodes = 64;

struct Codes {
    std::int32_t dtype[kDtypeCount];  // torch's number of each row of kDtypes
    signed char dtype_row[kCodes];
    std::int32_t device_type[kDeviceTypeCount];
    signed char device_row[kCodes];

    Codes() {
        const std::int32_t dtypes[] = {
            aoti_torch_dtype_float32(),       aoti_torch_dtype_bfloat16(),        aoti_torch_dtype_uint8(),
            aoti_torch_dtype_float16(),       aoti_torch_dtype_float64(),         aoti_torch_dtype_int8(),
            aoti_torch_dtype_int16(),         aoti_torch_dtype_int32(),           aoti_torch_dtype_int64(),
            aoti_torch_dtype_uint16(),        aoti_torch_dtype_uint32(),          aoti_torch_dtype_uint64(),
            aoti_torch_dtype_bool(),          aoti_torch_dtype_complex32(),       aoti_torch_dtype_complex64(),
            aoti_torch_dtype_complex128(),    aoti_torch_dtype_float8_e5m2(),     aoti_torch_dtype_float8_e5m2fnuz(),
            aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e4m3fnuz(), torch_dtype_float8_e8m0fnu(),
            torch_dtype_float4_e2m1fn_x2()};
        const std::int32_t device_types[] = {aoti_torch_device_type_cpu(), aoti_torch_device_type_meta(),
                                             aoti_torch_device_type_cuda(), aoti_torch_device_type_xpu(),
                                             aoti_torch_device_type_mps()};
        static_assert(sizeof dtypes / sizeof *dtypes == kOtherDtype);
        static_assert(sizeof device_types / sizeof *device_types == kOtherDeviceType);
        fill(dtypes, kOtherDtype, dtype, dtype_row);
        fill(device_types, kOtherDeviceType, device_type, device_row);
    }

    static void fill(const std::int32_t* codes, int other, std::int32_t* code_of, signed char* row_of) {
        for (int code = 0; code < kCodes; ++code) row_of[code] = static_cast<signed char>(other);
        code_of[other] = -1;
        for (int row = 0; row < other; ++row) {
            code_of[row] = codes[row];
            if (codes[row] >= 0 && codes[row] < kCodes) row_of[codes[row]] = static_cast<signed char>(row);
        }
    }

    static int row(const signed char* rows, std::int32_t code, int other) {
        return code >= 0 && code < kCodes ? rows[code] : other;
    }
};

const Codes& codes() {
    static const Codes kTable;
    return kTable;
}

[[noreturn]] void out_of_memory(const char* name, const char* note, std::int64_t bytes, const TensorFacts& home) {
    Message text;
    text.say("%sout of memory: '%s'%s needs %lld bytes on ", checks::kPrefix, name, note,
             static_cast<long long>(bytes));
    text.say_device(home);
    text.say(", which torch could not give; free memory there, or pass fewer tokens in a call");
    throw std::runtime_error(text.text());
}

void require(AOTITorchError failed, const char* what) {
    if (failed == 0) return;
    Message text;
    text.say("%storch failed to %s; its own message is on the standard error output", checks::kPrefix, what);
    throw std::runtime_error(text.text());
}

}  // namespace

TensorFacts describe(const TensorHandle& tensor, bool written) {
    const AtenTensorHandle handle = tensor.get();
    std::int64_t ndim = 0, *sizes = nullptr, *strides = nullptr;
    std::int32_t dtype = -1, device_type = -1, device_index = 0;
    const void* address = nullptr;
    AOTITorchError failed = aoti_torch_get_dim(handle, &ndim);
    failed |= aoti_torch_get_sizes(handle, &sizes);
    failed |= aoti_torch_get_strides(handle, &strides);
    failed |= aoti_torch_get_dtype(handle, &dtype);
    failed |= aoti_torch_get_device_type(handle, &device_type);
    failed |= aoti_torch_get_device_index(handle, &device_index);
    if (written) {
        void* own = nullptr;
        failed |= torch_get_mutable_data_ptr(handle, &own);
        address = own;
    } else {
        failed |= torch_get_const_data_ptr(handle, &address);
    }
    require(failed, "describe an argument");

    const Codes& table = codes();
    TensorFacts facts;
    facts.present = true;
    facts.dtype = Codes::row(table.dtype_row, dtype, kOtherDtype);
    facts.device_type = Codes::row(table.device_row, device_type, kOtherDeviceType);
    facts.device_index = device_index;
    facts.ndim = static_cast<int>(ndim);
    facts.sizes = sizes;
    facts.strides = strides;
    facts.address = reinterpret_cast<std::uintptr_t>(address);
    return facts;
}

TensorHandle allocate(const char* name, int dtype, const Shape& shape, const TensorFacts& home, const char* note) {
    std::int64_t strides[kMaxDimensions], stride = 1, bytes = dtype_bytes(dtype);
    for (int d = shape.ndim - 1; d >= 0; --d) {
        strides[d] = stride;
        stride *= shape.sizes[d] > 0 ? shape.sizes[d] : 1;
        bytes *= shape.sizes[d];
    }
    AtenTensorHandle handle = nullptr;
    const Codes& table = codes();
    if (aoti_torch_empty_strided(shape.ndim, shape.sizes, strides, table.dtype[dtype],
                                 table.device_type[home.device_type], home.device_index, &handle) != 0) {
        out_of_memory(name, note, bytes, home);
    }
    return TensorHandle(handle);
}

TensorHandle copy_of(Argument input, const TensorHandle& tensor, const TensorFacts& facts) {
    Shape shape;
    for (int d = 0; d < facts.ndim; ++d) shape.add(facts.sizes[d]);
    TensorHandle copy = allocate(kArguments[input].name, facts.dtype, shape, facts, " as a contiguous copy");
    require(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy a strided or misaligned argument");
    return copy;
}

void* data_of(const TensorHandle& tensor) {
    void* data = nullptr;
    require(torch_get_mutable_data_ptr(tensor.get(), &data), "name the memory of an output");
    return data;
}

}  // namespace strata
