// Torch's C handles with owners, and what a tensor's handle says of it as plain facts.
//
// torch::stable::Tensor would do for the first; its shared pointers cost a heap block an argument and an output.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <utility>

#include "common/argument_checks.hpp"

namespace strata {

class TensorHandle {
  public:
    TensorHandle() = default;
    explicit TensorHandle(AtenTensorHandle handle) : handle_(handle) {}
    TensorHandle(TensorHandle&& other) noexcept : handle_(other.release()) {}
    TensorHandle& operator=(TensorHandle&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~TensorHandle() {
        if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
    }

    explicit operator bool() const { return handle_ != nullptr; }
    AtenTensorHandle get() const { return handle_; }
    AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  private:
    AtenTensorHandle handle_ = nullptr;
};

// `written`: copy-on-write memory is made the tensor's own. The facts point into the tensor.
TensorFacts describe(const TensorHandle& tensor, bool written);

// Contiguous and uninitialised, on `home`'s device. Where there is no memory it throws, naming bytes, device, `name`
// and `note`.
TensorHandle allocate(const char* name, int dtype, const Shape& shape, const TensorFacts& home, const char* note = "");

// A contiguous copy of an input.
TensorHandle copy_of(Argument input, const TensorHandle& tensor, const TensorFacts& facts);

// Of the first element; for a tensor that was allocated here.
void* data_of(const TensorHandle& tensor);

}  // namespace strata
