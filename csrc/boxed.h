// The kernels as torch calls them, with their arguments on a stack, and how a backend registers
// them. Loading the library registers nothing: Python defines the ops and
// nf4tensor/kernels/select.py decides which backend computes them.
#pragma once

#include <optional>

#include "ops.h"

namespace nf4tensor {

// Every op takes one or two tensors, then a spec, then at most one more argument. A boxed kernel
// owns the tensors on its stack and leaves its result in the first place.
inline constexpr int kSpecArgument = 1;
inline constexpr int kLastArgument = kSpecArgument + kNumSpecArguments;

// An optional tensor is null, or a value on the heap that the kernel owns as well.
inline std::optional<Tensor> TakeOptional(StableIValue argument) {
  StableIValue* value = nullptr;
  std::memcpy(&value, &argument, sizeof(value));
  if (value == nullptr) return std::nullopt;
  std::optional<Tensor> tensor(*value);
  delete value;
  return tensor;
}

template <typename Backend>
struct Boxed {
  static void Quantize(StableIValue* stack, uint64_t, uint64_t) {
    const Tensor weight(stack[0]);
    stack[0] =
        nf4tensor::Quantize(Backend(weight, "weight"), weight, CheckedSpec(stack + kSpecArgument))
            .Release();
  }

  static void QuantizeInto(StableIValue* stack, uint64_t, uint64_t) {
    const Tensor weight(stack[0]);
    const Tensor record(stack[kLastArgument]);
    nf4tensor::QuantizeInto(Backend(record, "record"), weight, CheckedSpec(stack + kSpecArgument),
                            record);
  }

  static void Dequantize(StableIValue* stack, uint64_t, uint64_t) {
    const Tensor record(stack[0]);
    const int32_t dtype = static_cast<int32_t>(stack[kLastArgument]);
    const RecordSpec spec = CheckedSpec(stack + kSpecArgument);
    stack[0] = nf4tensor::Dequantize(Backend(record, "record"), record, spec, dtype).Release();
  }

  static void DequantizeInto(StableIValue* stack, uint64_t, uint64_t) {
    const Tensor record(stack[0]);
    const Tensor out(stack[kLastArgument]);
    nf4tensor::DequantizeInto(Backend(record, "record"), record, CheckedSpec(stack + kSpecArgument),
                              out);
  }

  static void Linear(StableIValue* stack, uint64_t, uint64_t) {
    const Tensor input(stack[0]);
    const Tensor record(stack[1]);
    const std::optional<Tensor> bias = TakeOptional(stack[kLastArgument + 1]);
    const RecordSpec spec = CheckedSpec(stack + kSpecArgument + 1);
    stack[0] = Backend::Linear(input, record, spec, bias ? &*bias : nullptr).Release();
  }

  static void Matmul(StableIValue* stack, uint64_t, uint64_t) {
    const Tensor input(stack[0]);
    const Tensor record(stack[1]);
    const RecordSpec spec = CheckedSpec(stack + kSpecArgument + 1);
    stack[0] = Backend::Matmul(input, record, spec).Release();
  }
};

// Returns 0, or libtorch's error after it printed the cause.
template <typename Backend>
AOTITorchError Register(const char* dispatch_key) {
  TorchLibraryHandle library = nullptr;  // torch unregisters what is deleted: it lives on
  AOTITorchError error =
      aoti_torch_library_init_impl("nf4tensor", dispatch_key, __FILE__, __LINE__, &library);
  const auto add = [&](const char* op, StableKernel kernel) {
    if (error == 0) error = torch_library_impl(library, op, kernel, kTorchAbiVersion);
  };
  add("quantize", &Boxed<Backend>::Quantize);
  add("quantize_into", &Boxed<Backend>::QuantizeInto);
  add("dequantize", &Boxed<Backend>::Dequantize);
  add("dequantize_into", &Boxed<Backend>::DequantizeInto);
  add("linear", &Boxed<Backend>::Linear);
  add("matmul", &Boxed<Backend>::Matmul);
  return error;
}

}  // namespace nf4tensor
