// The checks that every backend makes: no argument that Python can pass may crash the process or
// write outside a tensor. Python checks the same in nf4tensor/kernels/schema.py, with better
// classes of errors, before a graph is traced.
#pragma once

#include <vector>

#include "common/dtype.h"
#include "common/record.h"
#include "torch_shim.h"

namespace nf4tensor {

inline constexpr int kNumSpecArguments = 6;
// Far above any weight, far below what overflows when sizes are multiplied.
inline constexpr int64_t kMaxSpecInteger = int64_t{1} << 40;

inline void CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    Refuse(name, " is ", value, ", expected ", low, " to ", high);
  }
}

// The spec in an op's arguments, from in_features to quant_type.
inline RecordSpec CheckedSpec(const StableIValue* arguments) {
  const auto integer = [&](int i) { return static_cast<int64_t>(arguments[i]); };
  CheckRange("in_features", integer(0), 1, kMaxSpecInteger);
  CheckRange("block_size", integer(1), kMinBlockSize, kMaxBlockSize);
  CheckRange("scale_kind", integer(2), 0, static_cast<int64_t>(ScaleKind::kDynamic8));
  CheckRange("quant_type", integer(5), 0, static_cast<int64_t>(QuantType::kFp4));
  const RecordSpec spec{integer(0), integer(1), static_cast<ScaleKind>(integer(2)),
                        integer(3), integer(4), static_cast<QuantType>(integer(5))};
  if ((spec.block_size & (spec.block_size - 1)) != 0) {
    Refuse("block_size is ", spec.block_size, ", expected a power of two");
  }
  const int64_t min_segments = spec.has_segments() ? 1 : 0;
  const int64_t max_segments = spec.has_segments() ? kMaxSpecInteger : 0;
  CheckRange("segment_length", spec.segment_length, min_segments, max_segments);
  CheckRange("num_segments", spec.num_segments, min_segments, max_segments);
  if (spec.has_segments() && CeilDiv(spec.num_blocks(), spec.segment_length) > spec.num_segments) {
    Refuse(spec.num_blocks(), " blocks do not fit in ", spec.num_segments, " segments of ",
           spec.segment_length, " blocks");
  }
  return spec;
}

// Refuses a tensor that reaches past its storage: FSDP frees one so.
inline void CheckStorage(const Tensor& tensor, const char* name) {
  if (tensor.numel() == 0) return;
  const std::vector<int64_t> sizes = tensor.sizes();
  const std::vector<int64_t> strides = tensor.strides();
  int64_t last = tensor.storage_offset();
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  const int64_t needed = (last + 1) * tensor.element_bytes();
  if (needed > tensor.storage_bytes()) {
    Refuse(name, " has ", needed, " bytes, its storage only ", tensor.storage_bytes(),
           ": it was freed");
  }
}

struct Device {
  int32_t type;
  int32_t index;  // of the CPU's it does not matter which
};

inline void CheckDevice(const Tensor& tensor, const char* name, const Device& device) {
  const bool is_cpu = device.type == aoti_torch_device_type_cpu();
  if (tensor.device_type() != device.type) {
    Refuse(name, " is not on ", is_cpu ? "the CPU" : "a CUDA device");
  }
  if (!is_cpu && tensor.device_index() != device.index) {
    Refuse(name, " is on CUDA device ", tensor.device_index(), ", expected device ", device.index);
  }
}

// The leading sizes of a tensor whose last size must be `last`, and that has its storage.
inline std::vector<int64_t> CheckedLead(const Tensor& tensor, const char* name, int64_t last,
                                        const Device& device) {
  CheckDevice(tensor, name, device);
  std::vector<int64_t> sizes = tensor.sizes();
  if (sizes.empty()) Refuse(name, " has no dimensions, expected a last one of size ", last);
  if (sizes.back() != last) {
    Refuse(name, " has the last size ", sizes.back(), ", expected ", last);
  }
  CheckStorage(tensor, name);
  sizes.pop_back();
  return sizes;
}

inline void CheckSameLead(const std::vector<int64_t>& record, const std::vector<int64_t>& other,
                          const char* name) {
  const auto text = [](const std::vector<int64_t>& sizes) {
    std::string joined;
    for (const int64_t size : sizes) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
    return "[" + joined + "]";
  };
  if (record != other) {
    Refuse("record has the leading sizes ", text(record), ", ", name, " has ", text(other));
  }
}

// Refuses what an expanded tensor is: several elements in one place, of which only one can be
// written.
inline void CheckWritable(const Tensor& tensor, const char* name) {
  const std::vector<int64_t> sizes = tensor.sizes();
  const std::vector<int64_t> strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] == 0) {
      Refuse(name, " has rows or columns that share memory: give each its own, with .clone()");
    }
  }
}

// Two contiguous tensors of which one is written.
inline void CheckNoOverlap(const Tensor& written, const char* name, const Tensor& read,
                           const char* read_name) {
  const uint8_t* const first = written.bytes();
  const uint8_t* const second = read.bytes();
  if (first < second + read.numel() * read.element_bytes() &&
      second < first + written.numel() * written.element_bytes()) {
    Refuse(name, " lies in the memory of ", read_name, ": give it memory of its own");
  }
}

inline void CheckRecordDtype(const Tensor& record) {
  if (record.dtype() != aoti_torch_dtype_uint8()) {
    Refuse("record has elements of dtype code ", record.dtype(), ", expected uint8");
  }
}

inline void CheckFloatDtype(int32_t dtype, const char* name) {
  if (dtype != aoti_torch_dtype_float32() && dtype != aoti_torch_dtype_bfloat16() &&
      dtype != aoti_torch_dtype_float16()) {
    Refuse(name, " has elements of dtype code ", dtype, ", expected float32, bfloat16 or float16");
  }
}

// Of torch's dtype, which has been checked, and the other way round.
inline DType DTypeOf(int32_t torch_dtype) {
  if (torch_dtype == aoti_torch_dtype_float32()) return kFloat32;
  return torch_dtype == aoti_torch_dtype_bfloat16() ? kBFloat16 : kFloat16;
}

inline int32_t TorchDTypeOf(DType dtype) {
  if (dtype == kFloat32) return aoti_torch_dtype_float32();
  return dtype == kBFloat16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float16();
}

}  // namespace nf4tensor
