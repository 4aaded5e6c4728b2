// What a read refuses, and in which words: one home for the kernels and for the fake kernels that torch traces with.
//
// A tensor is described by plain facts, so the checks need neither torch nor Python and their texts are the same
// wherever they run. A text is one line: the argument in quotes, what was expected, what was given, a remedy.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "common/geometry.hpp"

namespace strata {

// A size or stride that is not known while tracing. It matches anything.
inline constexpr std::int64_t kUnknown = -1;

// Most dimensions of an argument, so that shapes need no heap.
inline constexpr int kMaxDimensions = 16;

// Torch's names. The last one of each list stands for all that the list does not have.
inline constexpr const char* kDtypes[] = {"torch.float32",        "torch.bfloat16",
                                          "torch.uint8",          "torch.float16",
                                          "torch.float64",        "torch.int8",
                                          "torch.int16",          "torch.int32",
                                          "torch.int64",          "torch.uint16",
                                          "torch.uint32",         "torch.uint64",
                                          "torch.bool",           "torch.complex32",
                                          "torch.complex64",      "torch.complex128",
                                          "torch.float8_e5m2",    "torch.float8_e5m2fnuz",
                                          "torch.float8_e4m3fn",  "torch.float8_e4m3fnuz",
                                          "torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2",
                                          "of another dtype"};
inline constexpr int kDtypeCount = static_cast<int>(sizeof kDtypes / sizeof *kDtypes);
inline constexpr int kOtherDtype = kDtypeCount - 1;
inline constexpr int kFloat32 = 0, kBFloat16 = 1, kUInt8 = 2;
// Of the streams and of what is written into them: float32 or bfloat16, as `residual` is.
inline constexpr int kStreamDtype = -1;
constexpr int stream_dtype(StreamType type) { return type == StreamType::BFloat16 ? kBFloat16 : kFloat32; }

inline constexpr const char* kDeviceTypes[] = {"cpu", "meta", "cuda", "xpu", "mps", "another device"};
inline constexpr int kDeviceTypeCount = static_cast<int>(sizeof kDeviceTypes / sizeof *kDeviceTypes);
inline constexpr int kOtherDeviceType = kDeviceTypeCount - 1;
inline constexpr int kFirstCounted = 2;  // from here on a machine may have several, told apart by an index

struct TensorFacts {
    bool present = false;
    int dtype = kOtherDtype;             // of kDtypes
    int device_type = kOtherDeviceType;  // of kDeviceTypes
    int device_index = 0;
    int ndim = 0;
    const std::int64_t* sizes = nullptr;
    const std::int64_t* strides = nullptr;  // in elements
    // Of the first element. While tracing, any number that is right modulo kAlignment and in the distances between
    // tensors that share memory. 0: not known.
    std::uint64_t address = 0;
};

// The tensors of a read, in the order of its schema.
enum Argument {
    kResidual,
    kWNorm,
    kWDown,
    kWUp,
    kWInject,
    kBlockOut,
    kInjectPrev,
    kInputCount,
    kMixed = kInputCount,
    kInject,
    kResidualOut,
    kLo,
    kRs,
    kQ8,
    kArgumentCount
};

struct ArgumentRow {
    const char* name;
    int dtype;
    const char* symbols;  // its shape, in the contract's letters
};

inline constexpr ArgumentRow kArguments[kArgumentCount] = {
    {"residual", kStreamDtype, "(..., HC, N)"},
    {"w_norm", kFloat32, "(HC, N)"},
    {"w_down", kBFloat16, "(LR, HC*N)"},
    {"w_up", kBFloat16, "(HC*N, LR)"},
    {"w_inject", kBFloat16, "(HC, HC*N)"},
    {"block_out", kStreamDtype, "(..., N)"},
    {"inject_prev", kFloat32, "(..., HC)"},
    {"mixed", kFloat32, "(..., N)"},
    {"inject", kFloat32, "(..., HC)"},
    {"residual_out", kStreamDtype, "(..., HC, N)"},
    {"lo", kFloat32, "(..., LR)"},
    {"rs", kFloat32, "(..., HC)"},
    {"q8_1_out", kUInt8, "(..., N/32, 36)"},
};

constexpr int dtype_bytes(int dtype) { return dtype == kUInt8 ? 1 : dtype == kBFloat16 ? 2 : 4; }

enum class ReadForm {
    Functional,
    InPlace,  // `residual` is written
    Out       // the caller brings the outputs
};

struct ReadFacts {
    ReadForm form = ReadForm::Functional;
    TensorFacts tensor[kArgumentCount];  // the outputs only in the Out form
    double eps = 0.0;
    bool q8_1 = false;

    const TensorFacts& operator[](Argument a) const { return tensor[a]; }
    StreamType stream_type() const {
        return tensor[kResidual].dtype == kBFloat16 ? StreamType::BFloat16 : StreamType::Float32;
    }
    bool pending_write() const { return tensor[kBlockOut].present; }
    int leading() const { return tensor[kResidual].ndim - 2; }  // dimensions before (HC, N)
};

// ---------------------------------------------------------------------------------------------------------------
// Dtypes and shapes. They follow from the dtype and the last two sizes of `residual` and from the first of `w_down`.

inline int expected_dtype(Argument a, const ReadFacts& facts) {
    return kArguments[a].dtype == kStreamDtype ? stream_dtype(facts.stream_type()) : kArguments[a].dtype;
}

constexpr std::int64_t known_product(std::int64_t a, std::int64_t b) {
    return a == kUnknown || b == kUnknown ? kUnknown : a * b;
}

// Of a residual with at least two dimensions and a w_down with at least one.
inline Geometry read_geometry(const ReadFacts& facts) {
    const TensorFacts& residual = facts[kResidual];
    return {residual.sizes[residual.ndim - 1], residual.sizes[residual.ndim - 2], facts[kWDown].sizes[0]};
}

inline std::int64_t read_tokens(const ReadFacts& facts) {
    std::int64_t tokens = 1;
    for (int d = 0; d < facts.leading(); ++d) tokens = known_product(tokens, facts[kResidual].sizes[d]);
    return tokens;
}

// Whether an output has values. One that was not asked for has its last size 0.
inline bool asked_for(Argument output, const ReadFacts& facts) {
    switch (output) {
        case kInject:
            return facts[kWInject].present;
        case kResidualOut:
            return facts.pending_write();
        case kQ8:
            return facts.q8_1;
        default:
            return true;
    }
}

struct Shape {
    int ndim = 0;
    std::int64_t sizes[kMaxDimensions];

    void add(std::int64_t size) { sizes[ndim++] = size; }
};

inline Shape expected_shape(Argument a, const ReadFacts& facts, const Geometry& g) {
    Shape shape;
    const std::int64_t depth = known_product(g.streams, g.width);
    const bool weight = a == kWNorm || a == kWDown || a == kWUp || a == kWInject;
    for (int d = 0; !weight && d < facts.leading(); ++d) shape.add(facts[kResidual].sizes[d]);
    switch (a) {
        case kWDown:
            shape.add(g.rank), shape.add(depth);
            break;
        case kWUp:
            shape.add(depth), shape.add(g.rank);
            break;
        case kWInject:
            shape.add(g.streams), shape.add(depth);
            break;
        case kBlockOut:
        case kMixed:
            shape.add(g.width);
            break;
        case kInjectPrev:
        case kInject:
        case kRs:
            shape.add(g.streams);
            break;
        case kLo:
            shape.add(g.rank);
            break;
        case kQ8:
            shape.add(g.width == kUnknown ? kUnknown : g.width / kQ8Block), shape.add(kQ8Bytes);
            break;
        default:  // residual, w_norm, residual_out
            shape.add(g.streams), shape.add(g.width);
    }
    if (!asked_for(a, facts)) shape.sizes[shape.ndim - 1] = 0;
    return shape;
}

// ---------------------------------------------------------------------------------------------------------------
// Memory.

// As torch has it: sizes of 1 have any stride, and a tensor without elements is contiguous.
inline bool is_contiguous(const TensorFacts& t) {
    bool in_order = true;
    std::int64_t expected = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
        const std::int64_t size = t.sizes[d], stride = t.strides[d];
        if (size == 0) return true;
        if (size == 1) continue;
        if (stride != kUnknown && expected != kUnknown && stride != expected) in_order = false;
        expected = known_product(expected, size);
    }
    return in_order;
}

constexpr int bytes_after_boundary(const TensorFacts& t) { return static_cast<int>(t.address % kAlignment); }

// From the first byte to one past the last. Empty where there are no elements, or where that is not known.
struct Extent {
    std::uint64_t begin = 0, end = 0;

    bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
};

inline Extent extent(const TensorFacts& t, int element_bytes) {
    if (!t.present || t.address == 0) return {};
    std::int64_t last = 0;
    for (int d = 0; d < t.ndim; ++d) {
        if (t.sizes[d] == 0 || t.sizes[d] == kUnknown || t.strides[d] == kUnknown) return {};
        last += (t.sizes[d] - 1) * t.strides[d];
    }
    return {t.address, t.address + static_cast<std::uint64_t>(last + 1) * static_cast<std::uint64_t>(element_bytes)};
}

// ---------------------------------------------------------------------------------------------------------------
// Texts.

// One line that grows; what does not fit is cut off.
class Message {
  public:
    const char* text() const { return text_; }

    // Always false, for `return refusal.say(...)`.
    __attribute__((format(printf, 2, 3))) bool say(const char* format, ...) {
        va_list values;
        va_start(values, format);
        const int room = static_cast<int>(sizeof text_) - length_;
        const int wanted = std::vsnprintf(text_ + length_, static_cast<std::size_t>(room), format, values);
        va_end(values);
        if (wanted > 0) length_ += wanted < room ? wanted : room - 1;
        return false;
    }

    void say_shape(int ndim, const std::int64_t* sizes) {
        say("(");
        for (int d = 0; d < ndim; ++d) {
            if (d > 0) say(", ");
            if (sizes[d] == kUnknown) {
                say("?");
            } else {
                say("%lld", static_cast<long long>(sizes[d]));
            }
        }
        say(ndim == 1 ? ",)" : ")");
    }

    void say_device(const TensorFacts& t) {
        say("%s", kDeviceTypes[t.device_type]);
        if (t.device_type >= kFirstCounted && t.device_type != kOtherDeviceType) say(":%d", t.device_index);
    }

  private:
    int length_ = 0;
    char text_[1024] = "";
};

// ---------------------------------------------------------------------------------------------------------------
// The checks, in the order in which check_read makes them. Each is false, with a text, where it refuses.

namespace checks {

inline constexpr const char* kPrefix = "fused_gr_read: ";

inline bool written(Argument a, const ReadFacts& facts) {
    return a >= kInputCount || (a == kResidual && facts.form == ReadForm::InPlace);
}

inline bool presence(const ReadFacts& facts, Message& refusal) {
    const bool block_out = facts[kBlockOut].present;
    if (block_out == facts[kInjectPrev].present) return true;
    return refusal.say(
        "%s'block_out' and 'inject_prev' must be given together, but '%s' is missing; pass both for a "
        "pending write, or neither",
        kPrefix, block_out ? "inject_prev" : "block_out");
}

inline bool dtype(Argument a, const ReadFacts& facts, Message& refusal) {
    const ArgumentRow& row = kArguments[a];
    const TensorFacts& t = facts[a];
    if (t.dtype == expected_dtype(a, facts)) return true;
    const char* wanted = kDtypes[expected_dtype(a, facts)];
    refusal.say("%s'%s' must be %s%s, but is %s; ", kPrefix, row.name, wanted,
                a == kResidual              ? " or torch.bfloat16"
                : row.dtype == kStreamDtype ? " like 'residual'"
                                            : "",
                kDtypes[t.dtype]);
    if (a == kBlockOut) return refusal.say("give both one dtype, %s or %s", kDtypes[kFloat32], kDtypes[kBFloat16]);
    return a >= kInputCount ? refusal.say("allocate it with dtype=%s", wanted)
                            : refusal.say("convert it once with .to(%s)", wanted);
}

inline bool device(Argument a, const ReadFacts& facts, Message& refusal) {
    const TensorFacts& t = facts[a];
    const TensorFacts& home = facts[kResidual];
    if (t.device_type == home.device_type && (t.device_type < kFirstCounted || t.device_index == home.device_index)) {
        return true;
    }
    refusal.say("%s'%s' must be on ", kPrefix, kArguments[a].name);
    refusal.say_device(home);
    refusal.say(" like 'residual', but is on ");
    refusal.say_device(t);
    refusal.say("; move it there with .to('");
    refusal.say_device(home);
    return refusal.say("')");
}

// What the sizes of all other arguments follow from.
inline bool geometry(const ReadFacts& facts, Message& refusal) {
    const TensorFacts& residual = facts[kResidual];
    if (residual.ndim < 2 || residual.ndim > kMaxDimensions) {
        return refusal.say(
            "%s'residual' must have 2 to %d dimensions (..., HC, N), but has %d; give the tokens one "
            "leading dimension, or none for a single token",
            kPrefix, kMaxDimensions, residual.ndim);
    }
    const std::int64_t width = residual.sizes[residual.ndim - 1], streams = residual.sizes[residual.ndim - 2];
    const bool width_ok = width == kUnknown || (width > 0 && width % kWidthMultiple == 0);
    const bool streams_ok = streams == kUnknown || (streams >= 1 && streams <= kMaxStreams);
    if (!width_ok || !streams_ok) {
        refusal.say("%s'residual' must be (..., HC, N) with HC from 1 to %d and N a multiple of %d, but is ", kPrefix,
                    static_cast<int>(kMaxStreams), static_cast<int>(kWidthMultiple));
        refusal.say_shape(residual.ndim, residual.sizes);
        return refusal.say("; use plain PyTorch for another geometry");
    }
    const TensorFacts& down = facts[kWDown];
    const bool rank_ok =
        down.ndim == 2 && (down.sizes[0] == kUnknown || (down.sizes[0] > 0 && down.sizes[0] % kRankMultiple == 0));
    if (rank_ok) return true;
    refusal.say("%s'w_down' must be (LR, HC*N) with LR a multiple of %d, but is ", kPrefix,
                static_cast<int>(kRankMultiple));
    refusal.say_shape(down.ndim, down.sizes);
    return refusal.say("; pass input_mix_weight_down.weight of the checkpoint");
}

inline bool shape(Argument a, const ReadFacts& facts, const Geometry& g, Message& refusal) {
    const TensorFacts& t = facts[a];
    const Shape expected = expected_shape(a, facts, g);
    bool same = t.ndim == expected.ndim;
    for (int d = 0; same && d < t.ndim; ++d) {
        same = t.sizes[d] == expected.sizes[d] || t.sizes[d] == kUnknown || expected.sizes[d] == kUnknown;
    }
    if (same) return true;
    refusal.say("%s'%s' must be %s = ", kPrefix, kArguments[a].name,
                asked_for(a, facts) ? kArguments[a].symbols : "empty");
    refusal.say_shape(expected.ndim, expected.sizes);
    refusal.say(", but is ");
    refusal.say_shape(t.ndim, t.sizes);
    if (!asked_for(a, facts)) {
        return refusal.say("; give what was not asked for a last size of 0, or ask for it with '%s'",
                           a == kInject ? "w_inject"
                           : a == kQ8   ? "q8_1=True"
                                        : "block_out");
    }
    if (a >= kInputCount) return refusal.say("; allocate it with that shape");
    return refusal.say("; '...', HC and N are the sizes of 'residual', LR the first of 'w_down': check these too");
}

// Weights, and what the op writes. Other activations are copied where they need it.
inline bool memory(Argument a, const ReadFacts& facts, Message& refusal) {
    const TensorFacts& t = facts[a];
    const char* purpose = a == kResidual ? " to be updated in place" : "";
    const char* remedy = a >= kInputCount ? "allocate it with torch.empty"
                         : a == kResidual ? "call fused_gr_read instead, or copy it before"
                                          : "copy it once with .clone(memory_format=torch.contiguous_format)";
    if (!is_contiguous(t)) {
        refusal.say("%s'%s' must be contiguous%s, but has strides ", kPrefix, kArguments[a].name, purpose);
        refusal.say_shape(t.ndim, t.strides);
        return refusal.say("; %s", remedy);
    }
    if (bytes_after_boundary(t) == 0) return true;
    return refusal.say("%s'%s' must start on a %d-byte boundary%s, but starts %d bytes after one; %s", kPrefix,
                       kArguments[a].name, kAlignment, purpose, bytes_after_boundary(t), remedy);
}

// What is written shares no byte with anything else. Inputs may share among themselves.
inline bool overlap(const ReadFacts& facts, Message& refusal) {
    const int first = facts.form == ReadForm::Out ? static_cast<int>(kInputCount) : static_cast<int>(kResidual);
    const int last = facts.form == ReadForm::Out ? static_cast<int>(kArgumentCount) : static_cast<int>(kResidual) + 1;
    Extent extents[kArgumentCount];
    for (int a = 0; a < kArgumentCount; ++a)
        extents[a] = extent(facts.tensor[a], dtype_bytes(expected_dtype(static_cast<Argument>(a), facts)));
    for (int a = first; a < last; ++a) {
        for (int b = 0; b < kArgumentCount; ++b) {
            if (a == b || !extents[a].overlaps(extents[b])) continue;
            return refusal.say("%s'%s' must share no memory with '%s', but overlaps it; %s", kPrefix,
                               kArguments[a].name, kArguments[b].name,
                               a == kResidualOut && b == kResidual ? "use fused_gr_read_ to update 'residual' in place"
                                                                   : "give it memory of its own");
        }
    }
    return true;
}

}  // namespace checks

// Whether the read can be made. Where not, `refusal` has the text.
inline bool check_read(const ReadFacts& facts, Message& refusal) {
    if (!checks::presence(facts, refusal)) return false;
    const int count = facts.form == ReadForm::Out ? static_cast<int>(kArgumentCount) : static_cast<int>(kInputCount);
    for (int a = 0; a < count; ++a) {
        if (facts.tensor[a].present && !checks::dtype(static_cast<Argument>(a), facts, refusal)) return false;
    }
    for (int a = 0; a < count; ++a) {
        if (facts.tensor[a].present && !checks::device(static_cast<Argument>(a), facts, refusal)) return false;
    }
    if (!checks::geometry(facts, refusal)) return false;
    const Geometry g = read_geometry(facts);
    for (int a = 0; a < count; ++a) {
        if (facts.tensor[a].present && !checks::shape(static_cast<Argument>(a), facts, g, refusal)) return false;
    }
    for (int a = 0; a < count; ++a) {
        const bool needed = (a >= kWNorm && a <= kWInject) || checks::written(static_cast<Argument>(a), facts);
        if (needed && facts.tensor[a].present && !checks::memory(static_cast<Argument>(a), facts, refusal))
            return false;
    }
    if (facts.eps != facts.eps || facts.eps < 0.0) {
        refusal.say("%s'eps' must be at least 0, but is ", checks::kPrefix);
        facts.eps < 0.0 ? refusal.say("%g", facts.eps) : refusal.say("nan");
        return refusal.say("; the model's own is 1e-6");
    }
    return facts.form == ReadForm::Functional || checks::overlap(facts, refusal);
}

}  // namespace strata
