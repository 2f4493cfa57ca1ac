// A CUDA device as a backend of the ops (see ops.h).
#pragma once

#include "arguments.h"
#include "cuda/kernels.h"

namespace nf4tensor::cuda {

// Makes a tensor's device the current one, as long as it lives, and launches on its current stream.
class Backend {
 public:
#ifdef NF4TENSOR_EMULATE
  static constexpr const char* kDispatchKey = "CPU";
#else
  static constexpr const char* kDispatchKey = "CUDA";
#endif
  static constexpr int64_t kRecordAlignment = cuda::kRecordAlignment;

  Backend(const Tensor& tensor, const char* name);
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  ~Backend();

  Device device() const { return device_; }

  void Quantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* weight,
                bool keep_phase, uint8_t* record) const {
    LaunchQuantize(spec, dtype, num_rows, weight, keep_phase, record, stream_);
  }
  void Dequantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* record,
                  uint8_t* out) const {
    LaunchDequantize(spec, dtype, num_rows, record, out, stream_);
  }

  // As on the CPU. Few inputs are multiplied without a decoded weight; for more, the weight is
  // decoded into memory that torch's allocator keeps for the next one, and torch multiplies.
  static Tensor Linear(const Tensor& input, const Tensor& record, const RecordSpec& spec,
                       const Tensor* bias);
  static Tensor Matmul(const Tensor& input, const Tensor& record, const RecordSpec& spec);

 private:
  Device device_;
  DeviceGuardHandle guard_ = nullptr;
  Stream stream_ = nullptr;
};

}  // namespace nf4tensor::cuda
