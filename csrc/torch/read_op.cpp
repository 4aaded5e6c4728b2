#include "torch/read_op.hpp"

#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <utility>

#include "common/argument_checks.hpp"
#include "torch/handles.hpp"

// The kernels are boxed by hand: a call gets its arguments as a stack of 64-bit values, owns the handles in it, and
// leaves its results there in new handles. (TORCH_BOX takes stable::Tensor; measured, it costs more.)

namespace strata {
namespace {

using torch::stable::detail::to;

// Room for a variant's name; a longer one is unknown, cut off or not.
constexpr std::size_t kMaxName = 64;

class ReadCall {
  public:
    // Takes over what the stack holds, so that it is freed however the call ends.
    ReadCall(ReadForm form, const StableIValue* stack) {
        facts_.form = form;
        for (int a = 0; a < kInputCount; ++a) {
            if (a < kWInject) {
                tensors_[a] = TensorHandle(to<AtenTensorHandle>(stack[a]));
            } else if (const auto given = to<std::optional<AtenTensorHandle>>(stack[a])) {
                tensors_[a] = TensorHandle(*given);
            }
        }
        facts_.eps = to<double>(stack[kInputCount]);
        facts_.q8_1 = to<bool>(stack[kInputCount + 1]);
        for (int a = kInputCount; form == ReadForm::Out && a < kArgumentCount; ++a) {
            tensors_[a] = TensorHandle(to<AtenTensorHandle>(stack[a + 2]));
        }
    }

    // Checks, computes, and leaves the outputs in tensors_.
    void run(const ReadChoice& choice) {
        for (int a = 0; a < kArgumentCount; ++a) {
            const bool written = checks::written(static_cast<Argument>(a), facts_);
            if (tensors_[a]) facts_.tensor[a] = describe(tensors_[a], written);
        }
        Message refusal;
        if (!check_read(facts_, refusal)) throw std::runtime_error(refusal.text());

        const TensorFacts& home = facts_[kResidual];
        const DeviceScope scope(home.device_index);
        copy_awkward_activations();
        const Geometry geometry = read_geometry(facts_);
        if (facts_.form != ReadForm::Out) allocate_outputs(geometry);
        const std::int64_t tokens = read_tokens(facts_);
        if (tokens > 0) read(geometry, tokens, choice, scope.stream());
    }

    StableIValue give(Argument output) { return torch::stable::detail::from(tensors_[output].release()); }

  private:
    void copy_awkward_activations() {
        for (const Argument a : {kResidual, kBlockOut, kInjectPrev}) {
            const TensorFacts& facts = facts_[a];
            if (!facts.present || (is_contiguous(facts) && bytes_after_boundary(facts) == 0)) continue;
            TensorHandle copy = copy_of(a, tensors_[a], facts);
            facts_.tensor[a].address = reinterpret_cast<std::uintptr_t>(data_of(copy));
            copies_[a] = std::move(copy);
        }
    }

    void allocate_outputs(const Geometry& geometry) {
        for (int a = kMixed; a < kArgumentCount; ++a) {
            const auto output = static_cast<Argument>(a);
            if (output == kResidualOut && facts_.form == ReadForm::InPlace) continue;
            tensors_[a] = allocate(kArguments[a].name, expected_dtype(output, facts_),
                                   expected_shape(output, facts_, geometry), facts_[kResidual]);
            if (asked_for(output, facts_)) {
                facts_.tensor[a].address = reinterpret_cast<std::uintptr_t>(data_of(tensors_[a]));
            }
        }
    }

    template <class T>
    T* pointer(Argument a) const {
        return reinterpret_cast<T*>(static_cast<std::uintptr_t>(facts_[a].address));
    }

    template <class T>
    T* asked_pointer(Argument a) const {
        return asked_for(a, facts_) ? pointer<T>(a) : nullptr;
    }

    void read(const Geometry& geometry, std::int64_t tokens, const ReadChoice& choice, void* stream) {
        ReadArgs args{};
        args.geometry = geometry;
        args.tokens = tokens;
        args.eps = static_cast<float>(facts_.eps);
        args.stream_type = facts_.stream_type();
        args.residual = pointer<const void>(kResidual);
        args.w_norm = pointer<const float>(kWNorm);
        args.w_down = pointer<const std::uint16_t>(kWDown);
        args.w_up = pointer<const std::uint16_t>(kWUp);
        args.w_inject = pointer<const std::uint16_t>(kWInject);
        args.block_out = pointer<const void>(kBlockOut);
        args.inject_prev = pointer<const float>(kInjectPrev);
        args.mixed = pointer<float>(kMixed);
        args.inject = asked_pointer<float>(kInject);
        args.residual_out = facts_.form != ReadForm::InPlace ? asked_pointer<void>(kResidualOut)
                            : facts_.pending_write()         ? pointer<void>(kResidual)
                                                             : nullptr;
        args.lo = pointer<float>(kLo);
        args.rs = pointer<float>(kRs);
        args.q8_1 = asked_pointer<std::uint8_t>(kQ8);

        // Freed on return: on a GPU torch's allocator then keeps it for work that this stream queues later.
        TensorHandle scratch;
        const TensorFacts& home = facts_[kResidual];
        const std::int64_t bytes = backend().scratch_size(&geometry, tokens);
        if (bytes > 0) {
            Shape shape;
            shape.add(bytes);
            scratch = allocate("scratch", kUInt8, shape, home);
            args.scratch = data_of(scratch);
        }
        Report report;
        if (backend().read(&args, &choice, home.device_index, stream, &report)) return;
        Message text;
        text.say("%s%s", checks::kPrefix, report.text);
        throw std::runtime_error(text.text());
    }

    ReadFacts facts_;
    TensorHandle tensors_[kArgumentCount];
    TensorHandle copies_[kInputCount];
};

// ---------------------------------------------------------------------------------------------------------------
// The boxed kernels. `inputs` and `outputs` are the schema's, which the CPU library defines.

void expect(bool as_built) {
    if (as_built) return;
    throw std::runtime_error(
        "fused_gr_read: the backend libraries are of different builds of strata_ops; build and install it anew");
}

void leave(ReadCall& call, StableIValue* stack, std::initializer_list<Argument> outputs) {
    for (const Argument output : outputs) *stack++ = call.give(output);
}

void read_functional(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
    expect(inputs == kInputCount + 2 && outputs == 6);
    ReadCall call(ReadForm::Functional, stack);
    call.run({});
    leave(call, stack, {kMixed, kInject, kResidualOut, kLo, kRs, kQ8});
}

void read_in_place(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
    expect(inputs == kInputCount + 2 && outputs == 5);
    ReadCall call(ReadForm::InPlace, stack);
    call.run({});
    leave(call, stack, {kMixed, kInject, kLo, kRs, kQ8});
}

void read_out(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
    expect(inputs == kArgumentCount + 2 && outputs == 0);
    ReadCall(ReadForm::Out, stack).run({});
}

void read_variant(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
    expect(inputs == kInputCount + 4 && outputs == 6);
    ReadCall call(ReadForm::Functional, stack);
    char name[kMaxName] = "";
    const auto text = to<StringHandle>(stack[kInputCount + 2]);
    const char* characters = nullptr;
    if (torch_string_c_str(text, &characters) == 0) std::strncpy(name, characters, kMaxName - 1);
    torch_delete_string(text);
    const auto q8_columns = to<std::int64_t>(stack[kInputCount + 3]);
    if (q8_columns != 0 && q8_columns != 16 && q8_columns != 32) {
        throw std::runtime_error("fused_gr_read: 'q8_columns' must be 16, 32 or 0 (the environment's choice)");
    }
    call.run({name, static_cast<int>(q8_columns)});
    leave(call, stack, {kMixed, kInject, kResidualOut, kLo, kRs, kQ8});
}

}  // namespace

void register_reads(torch::stable::detail::StableLibrary& library) {
    library.impl("fused_gr_read", read_functional);
    library.impl("fused_gr_read_", read_in_place);
    library.impl("fused_gr_read.out", read_out);
    library.impl("_fused_gr_read_variant", read_variant);
}

}  // namespace strata
