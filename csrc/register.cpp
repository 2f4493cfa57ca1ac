// The boxed kernels, and the exported functions that register them. Loading the library registers
// nothing: Python defines the ops and nf4tensor/kernels/select.py decides which backend computes
// them.
#include <optional>

#include "arguments.h"
#include "ops.h"

namespace nf4tensor {
namespace {

// Every op takes one or two tensors, then a spec, then at most one more argument. A boxed kernel
// owns the tensors on its stack and leaves its result in the first place.
constexpr int kSpecArgument = 1;
constexpr int kLastArgument = kSpecArgument + kNumSpecArguments;

void Quantize(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor weight(stack[0]);
  stack[0] = cpu::Quantize(weight, CheckedSpec(stack + kSpecArgument)).Release();
}

void QuantizeInto(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor weight(stack[0]);
  const Tensor record(stack[kLastArgument]);
  cpu::QuantizeInto(weight, CheckedSpec(stack + kSpecArgument), record);
}

void Dequantize(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor record(stack[0]);
  const int32_t dtype = static_cast<int32_t>(stack[kLastArgument]);
  stack[0] = cpu::Dequantize(record, CheckedSpec(stack + kSpecArgument), dtype).Release();
}

void DequantizeInto(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor record(stack[0]);
  const Tensor out(stack[kLastArgument]);
  cpu::DequantizeInto(record, CheckedSpec(stack + kSpecArgument), out);
}

// An optional tensor is null, or a value on the heap that the kernel owns as well.
std::optional<Tensor> TakeOptional(StableIValue argument) {
  StableIValue* value = nullptr;
  std::memcpy(&value, &argument, sizeof(value));
  if (value == nullptr) return std::nullopt;
  std::optional<Tensor> tensor(*value);
  delete value;
  return tensor;
}

void Linear(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor input(stack[0]);
  const Tensor record(stack[1]);
  const std::optional<Tensor> bias = TakeOptional(stack[kLastArgument + 1]);
  const RecordSpec spec = CheckedSpec(stack + kSpecArgument + 1);
  stack[0] = cpu::Linear(input, record, spec, bias ? &*bias : nullptr).Release();
}

void Matmul(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor input(stack[0]);
  const Tensor record(stack[1]);
  stack[0] = cpu::Matmul(input, record, CheckedSpec(stack + kSpecArgument + 1)).Release();
}

AOTITorchError RegisterCpu() {
  TorchLibraryHandle library = nullptr;  // torch unregisters what is deleted: it lives on
  AOTITorchError error =
      aoti_torch_library_init_impl("nf4tensor", "CPU", __FILE__, __LINE__, &library);
  const auto add = [&](const char* op, StableKernel kernel) {
    if (error == 0) error = torch_library_impl(library, op, kernel, kTorchAbiVersion);
  };
  add("quantize", &Quantize);
  add("quantize_into", &QuantizeInto);
  add("dequantize", &Dequantize);
  add("dequantize_into", &DequantizeInto);
  add("linear", &Linear);
  add("matmul", &Matmul);
  return error;
}

}  // namespace
}  // namespace nf4tensor

// Returns 0, or libtorch's error after it printed the cause. Registers at the first call only.
extern "C" __attribute__((visibility("default"))) int nf4tensor_register_cpu() {
  static const int error = nf4tensor::RegisterCpu();
  return error;
}
