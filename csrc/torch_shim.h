// The part of libtorch's stable C ABI that this package uses, declared by hand, and the little C++
// on top of it. Declaring it here means that a build needs no torch, and that one binary loads on
// every torch since 2.11. Each function is exported by libtorch_cpu.so since torch 2.10; a new one
// belongs here only if torch 2.11 has it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

extern "C" {

using StableIValue = uint64_t;  // an int64, a dtype code, or an owned tensor handle
using AOTITorchError = int32_t;
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;
using StableKernel = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);

AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* dispatch_key,
                                            const char* file, uint32_t line,
                                            TorchLibraryHandle* library);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* op, StableKernel kernel,
                                  uint64_t abi_version);

AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack,
                                     uint64_t abi_version);
AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* guard);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* other);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* offset);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t* num_bytes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* is_contiguous);

AOTITorchError aoti_torch_aten_subtract_Tensor(AtenTensorHandle self, AtenTensorHandle other,
                                               double alpha, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                        AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,
                                        double alpha);
AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self,
                                     AtenTensorHandle mat2);
AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t dim, const int64_t* sizes,
                                                  const int64_t* strides, int64_t offset,
                                                  int32_t dtype, int32_t device_type,
                                                  int32_t device_index, AtenTensorHandle* tensor);
AOTITorchError aoti_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* tensor);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                  void (*body)(int64_t begin, int64_t end, void* context),
                                  void* context);
AOTITorchError torch_get_num_threads(uint32_t* num_threads);

bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool enabled);

size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();

}  // extern "C"

namespace nf4tensor {

// The ABI that the declarations above follow: torch 2.10.
inline constexpr uint64_t kTorchAbiVersion = (uint64_t{2} << 56) | (uint64_t{10} << 48);

// Raises in Python as a ValueError with the parts as its text.
template <typename... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// libtorch prints the cause on standard error before it returns an error.
inline void Check(AOTITorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("nf4tensor: torch failed to ") + what);
}

// Keeps a copy between tensors out of the autograd graph.
class NoGrad {
 public:
  NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) {
    aoti_torch_grad_mode_set_enabled(false);
  }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(was_enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool was_enabled_;
};

// Owns one handle of a tensor.
class Tensor {
 public:
  explicit Tensor(StableIValue value) { std::memcpy(&handle_, &value, sizeof(handle_)); }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  // A fresh contiguous tensor beside this one.
  Tensor NewEmpty(const std::vector<int64_t>& sizes, int32_t dtype) const {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) {
      strides[i - 1] = strides[i] * (sizes[i] > 0 ? sizes[i] : 1);
    }
    Tensor tensor;
    const int64_t dim = static_cast<int64_t>(sizes.size());
    Check(aoti_torch_empty_strided(dim, sizes.data(), strides.data(), dtype, device_type(),
                                   device_index(), &tensor.handle_),
          "allocate a tensor");
    return tensor;
  }

  // A CPU tensor in memory that outlives it.
  static Tensor FromMemory(const void* data, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& strides, int32_t dtype) {
    Tensor tensor;
    Check(aoti_torch_create_tensor_from_blob(
              const_cast<void*>(data), static_cast<int64_t>(sizes.size()), sizes.data(),
              strides.data(), 0, dtype, aoti_torch_device_type_cpu(), 0, &tensor.handle_),
          "make a tensor");
    return tensor;
  }

  // The product of two matrices on the CPU, or that and an offset.
  void MultiplyInto(const Tensor& other, const Tensor& out) const {
    Check(aoti_torch_cpu_mm_out(out.handle_, handle_, other.handle_), "multiply");
  }
  void MultiplyInto(const Tensor& other, const Tensor& out, const Tensor& offset) const {
    Check(aoti_torch_cpu_addmm_out(out.handle_, offset.handle_, handle_, other.handle_, 1.0, 1.0),
          "multiply and add");
  }

  // There is no addition in this ABI.
  Tensor Plus(const Tensor& other) const {
    Tensor sum;
    Check(aoti_torch_aten_subtract_Tensor(handle_, other.handle_, -1.0, &sum.handle_), "add");
    return sum;
  }

  // A contiguous copy, in memory of its own.
  Tensor Clone() const {
    Tensor copy = NewEmpty(sizes(), dtype());
    copy.CopyFrom(*this);
    return copy;
  }

  void CopyFrom(const Tensor& other) const {
    const NoGrad no_grad;
    Check(aoti_torch_copy_(handle_, other.handle_, 0), "copy a tensor");
  }

  // Another handle of the same tensor.
  Tensor Alias() const {
    Tensor other;
    Check(aoti_torch_new_tensor_handle(handle_, &other.handle_), "share a tensor");
    return other;
  }

  // Gives the handle to torch.
  StableIValue Release() {
    StableIValue value = 0;
    std::memcpy(&value, &handle_, sizeof(handle_));
    handle_ = nullptr;
    return value;
  }

  int32_t dtype() const { return Get(aoti_torch_get_dtype, "read a dtype"); }
  int32_t device_type() const { return Get(aoti_torch_get_device_type, "read a device"); }
  int32_t device_index() const { return Get(aoti_torch_get_device_index, "read a device index"); }
  int64_t dim() const { return Get(aoti_torch_get_dim, "count dimensions"); }
  int64_t numel() const { return Get(aoti_torch_get_numel, "count elements"); }
  int64_t storage_offset() const { return Get(aoti_torch_get_storage_offset, "read an offset"); }
  int64_t storage_bytes() const { return Get(aoti_torch_get_storage_size, "read a storage"); }
  bool is_contiguous() const { return Get(aoti_torch_is_contiguous, "read strides"); }
  uint8_t* bytes() const {
    return static_cast<uint8_t*>(Get(aoti_torch_get_data_ptr, "reach data"));
  }
  int64_t element_bytes() const {
    return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype()));
  }
  std::vector<int64_t> sizes() const {
    const int64_t* sizes = Get(aoti_torch_get_sizes, "read sizes");
    return {sizes, sizes + dim()};
  }
  std::vector<int64_t> strides() const {
    const int64_t* strides = Get(aoti_torch_get_strides, "read strides");
    return {strides, strides + dim()};
  }

 private:
  Tensor() = default;

  template <typename T>
  T Get(AOTITorchError (*getter)(AtenTensorHandle, T*), const char* what) const {
    T value{};
    Check(getter(handle_, &value), what);
    return value;
  }

  AtenTensorHandle handle_ = nullptr;
};

// Calls an op of torch with values that it takes over, and returns its one result.
inline Tensor Call(const char* op, const char* overload, std::vector<StableIValue> stack) {
  Check(torch_call_dispatcher(op, overload, stack.data(), kTorchAbiVersion), op);
  return Tensor(stack[0]);
}

inline int64_t NumThreads() {
  uint32_t num_threads = 1;
  Check(torch_get_num_threads(&num_threads), "count threads");
  return num_threads;
}

// Runs body(begin, end) over parts of [0, count), none smaller than the grain, on torch's threads.
template <typename Body>
void ParallelFor(int64_t count, int64_t grain, Body body) {
  const auto call = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<Body*>(context))(begin, end);
  };
  Check(torch_parallel_for(0, count, grain, call, &body), "run threads");
}

}  // namespace nf4tensor
