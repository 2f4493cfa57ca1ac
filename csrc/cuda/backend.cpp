// The ops on a CUDA device as torch sees them: device, stream, and who computes a product.
#include "cuda/backend.h"

#include <dlfcn.h>

#include "operands.h"
#include "ops.h"

namespace nf4tensor::cuda {
namespace {

#ifdef NF4TENSOR_EMULATE

int32_t DeviceType() { return aoti_torch_device_type_cpu(); }
DeviceGuardHandle MakeCurrent(int32_t) { return nullptr; }
Stream CurrentStream(int32_t) { return nullptr; }

#else

int32_t DeviceType() { return aoti_torch_device_type_cuda(); }

DeviceGuardHandle MakeCurrent(int32_t index) {
  DeviceGuardHandle guard = nullptr;
  Check(aoti_torch_create_device_guard(index, &guard), "switch to a device");
  return guard;
}

// A torch without CUDA lacks this function, so it is looked up where a CUDA tensor proves that it
// is there. torch loads its library in a scope of its own: only by its name is it found.
Stream CurrentStream(int32_t index) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter get = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const symbol =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Getter>(symbol);
  }();
  if (get == nullptr) throw std::runtime_error("nf4tensor: this torch has no CUDA streams");
  Stream stream = nullptr;
  Check(get(index, &stream), "tell the current stream");
  return stream;
}

#endif

StableIValue Optional(const Tensor* tensor) {
  if (tensor == nullptr) return 0;
  const auto* const value = new StableIValue(tensor->Alias().Release());  // torch deletes it
  StableIValue argument = 0;
  std::memcpy(&argument, &value, sizeof(value));
  return argument;
}

// input @ W.T + bias for a weight or a stack of them.
Tensor MultiplyByTransposed(const Tensor& input, Tensor weight, const Tensor* bias) {
  const NoGrad no_grad;
  if (weight.dim() == 2) {
    return Call("aten::linear", "", {input.Alias().Release(), weight.Release(), Optional(bias)});
  }
  const auto dim = [](int64_t index) { return static_cast<StableIValue>(index); };
  Tensor transposed = Call("aten::transpose", "int", {weight.Release(), dim(-2), dim(-1)});
  Tensor product = Call("aten::matmul", "", {input.Alias().Release(), transposed.Release()});
  return bias == nullptr ? std::move(product) : product.Plus(*bias);
}

}  // namespace

Backend::Backend(const Tensor& tensor, const char* name)
    : device_{DeviceType(), tensor.device_index()} {
  CheckDevice(tensor, name, device_);
  guard_ = MakeCurrent(device_.index);
  stream_ = CurrentStream(device_.index);
}

Backend::~Backend() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
}

Tensor Backend::Linear(const Tensor& input, const Tensor& record, const RecordSpec& spec,
                       const Tensor* bias) {
  const Backend backend(record, "record");
  const Operands operands =
      CheckedOperands(input, record, spec, backend.device(), /*is_transposed=*/true);
  if (bias != nullptr) CheckBias(*bias, operands.num_rows, input, backend.device());

  const bool is_readable =
      input.is_contiguous() && record.is_contiguous() && (bias == nullptr || bias->is_contiguous());
  if (operands.record_lead.empty() && operands.num_inputs > 0 && operands.num_rows > 0 &&
      is_readable && operands.num_inputs <= MaxFusedInputs(spec, operands.num_rows)) {
    Tensor output = input.NewEmpty(operands.output_sizes, input.dtype());
    const LinearCall call{spec,
                          DTypeOf(input.dtype()),
                          operands.num_rows,
                          operands.num_inputs,
                          record.bytes(),
                          input.bytes(),
                          bias == nullptr ? nullptr : bias->bytes(),
                          output.bytes()};
    if (CanFuse(call)) {
      LaunchLinear(call, backend.stream_);
      return output;
    }
  }
  return MultiplyByTransposed(input, nf4tensor::Dequantize(backend, record, spec, input.dtype()),
                              bias);
}

Tensor Backend::Matmul(const Tensor& input, const Tensor& record, const RecordSpec& spec) {
  const Backend backend(record, "record");
  CheckedOperands(input, record, spec, backend.device(), /*is_transposed=*/false);
  const NoGrad no_grad;
  Tensor weight = nf4tensor::Dequantize(backend, record, spec, input.dtype());
  return Call("aten::matmul", "", {input.Alias().Release(), weight.Release()});
}

}  // namespace nf4tensor::cuda
