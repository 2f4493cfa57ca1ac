// The CPU as a backend of the ops (see ops.h). Each op's kernels are in the file of its name.
#pragma once

#include "arguments.h"

namespace nf4tensor::cpu {

class Backend {
 public:
  static constexpr int64_t kRecordAlignment = 1;

  Backend(const Tensor& tensor, const char* name) { CheckDevice(tensor, name, device()); }

  static Device device() { return {aoti_torch_device_type_cpu(), 0}; }

  void Quantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* weight,
                bool keep_phase, uint8_t* record) const;
  void Dequantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* record,
                  uint8_t* out) const;

  // input: [*lead, in_features]; record: uint8 [*lead, out_features, pitch]; bias: [out_features]
  // of the input's dtype, or null. Returns input @ W.T + bias, summed in float32.
  static Tensor Linear(const Tensor& input, const Tensor& record, const RecordSpec& spec,
                       const Tensor* bias);
  // input: [*lead, out_features]. Returns input @ W, summed in float32.
  static Tensor Matmul(const Tensor& input, const Tensor& record, const RecordSpec& spec);
};

}  // namespace nf4tensor::cpu
