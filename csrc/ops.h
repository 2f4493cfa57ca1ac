// The ops that convert between weights and records, each once for every backend: checks, copies of
// what a kernel cannot read, and the call of its kernel.
//
// A backend is made of a tensor on its kind of device, and refuses others. It computes there, on
// rows that lie in contiguous memory, a record's at a multiple of kRecordAlignment:
//   Device device() const
//   void Quantize(spec, dtype, num_rows, weight, keep_phase, record) const
//   void Dequantize(spec, dtype, num_rows, record, out) const
// and it has the ops linear and matmul to itself:
//   static Tensor Linear(input, record, spec, bias), static Tensor Matmul(input, record, spec)
#pragma once

#include "arguments.h"

namespace nf4tensor {

// Whether a kernel can read, or write, a record where it is.
template <typename Backend>
bool IsInPlace(const Tensor& record) {
  const auto address = reinterpret_cast<uintptr_t>(record.bytes());
  return record.is_contiguous() && address % Backend::kRecordAlignment == 0;
}

// record: uint8 [*lead, pitch]; out: [*lead, in_features] of a float dtype.
template <typename Backend>
void DequantizeInto(const Backend& backend, const Tensor& record, const RecordSpec& spec,
                    const Tensor& out);

// record: uint8 [*lead, pitch]. Returns a weight [*lead, in_features] of the dtype.
template <typename Backend>
Tensor Dequantize(const Backend& backend, const Tensor& record, const RecordSpec& spec,
                  int32_t dtype) {
  CheckFloatDtype(dtype, "out");
  std::vector<int64_t> sizes = CheckedLead(record, "record", spec.pitch(), backend.device());
  sizes.push_back(spec.in_features);
  Tensor out = record.NewEmpty(sizes, dtype);
  DequantizeInto(backend, record, spec, out);
  return out;
}

template <typename Backend>
void DequantizeInto(const Backend& backend, const Tensor& record, const RecordSpec& spec,
                    const Tensor& out) {
  const std::vector<int64_t> lead = CheckedLead(record, "record", spec.pitch(), backend.device());
  CheckRecordDtype(record);
  CheckFloatDtype(out.dtype(), "out");
  CheckSameLead(lead, CheckedLead(out, "out", spec.in_features, backend.device()), "out");
  if (record.numel() == 0) return;
  CheckWritable(out, "out");
  if (!IsInPlace<Backend>(record)) return DequantizeInto(backend, record.Clone(), spec, out);
  if (!out.is_contiguous()) return out.CopyFrom(Dequantize(backend, record, spec, out.dtype()));
  CheckNoOverlap(out, "out", record, "record");
  backend.Dequantize(spec, DTypeOf(out.dtype()), record.numel() / spec.pitch(), record.bytes(),
                     out.bytes());
}

// The leading sizes of a weight that can be encoded.
inline std::vector<int64_t> CheckedWeight(const Tensor& weight, const RecordSpec& spec,
                                          const Device& device) {
  CheckFloatDtype(weight.dtype(), "weight");
  if (spec.scale_kind == ScaleKind::kDynamic8) {
    Refuse(
        "dynamic8 scales are only imported from bitsandbytes, never made: write "
        "to_nf4(q.dequantize() + delta) instead");
  }
  return CheckedLead(weight, "weight", spec.in_features, device);
}

// weight: [*lead, in_features] of a float dtype. Returns a record [*lead, pitch].
template <typename Backend>
Tensor Quantize(const Backend& backend, const Tensor& weight, const RecordSpec& spec) {
  std::vector<int64_t> sizes = CheckedWeight(weight, spec, backend.device());
  if (!weight.is_contiguous()) return Quantize(backend, weight.Clone(), spec);
  sizes.push_back(spec.pitch());
  Tensor record = weight.NewEmpty(sizes, aoti_torch_dtype_uint8());
  if (record.numel() > 0) {
    backend.Quantize(spec, DTypeOf(weight.dtype()), weight.numel() / spec.in_features,
                     weight.bytes(), /*keep_phase=*/false, record.bytes());
  }
  return record;
}

// record: uint8 [*lead, pitch]; every byte of it but the phases is written.
template <typename Backend>
void QuantizeInto(const Backend& backend, const Tensor& weight, const RecordSpec& spec,
                  const Tensor& record) {
  const std::vector<int64_t> lead = CheckedLead(record, "record", spec.pitch(), backend.device());
  CheckRecordDtype(record);
  CheckSameLead(lead, CheckedWeight(weight, spec, backend.device()), "weight");
  if (record.numel() == 0) return;
  CheckWritable(record, "record");
  if (!weight.is_contiguous()) return QuantizeInto(backend, weight.Clone(), spec, record);
  if (!IsInPlace<Backend>(record)) {
    const Tensor rows = record.Clone();
    QuantizeInto(backend, weight, spec, rows);
    return record.CopyFrom(rows);
  }
  CheckNoOverlap(record, "record", weight, "weight");
  backend.Quantize(spec, DTypeOf(weight.dtype()), weight.numel() / spec.in_features, weight.bytes(),
                   /*keep_phase=*/true, record.bytes());
}

}  // namespace nf4tensor
