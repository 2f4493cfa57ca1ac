// Weights to records on the CPU: checks, threads, and the kernels of the instruction set in use.
#include <algorithm>

#include "arguments.h"
#include "cpu/kernels.h"
#include "ops.h"

namespace nf4tensor::cpu {
namespace {

// Fewer elements cost less than another thread.
constexpr int64_t kGrainElements = 1 << 13;

void Launch(const Tensor& weight, const RecordSpec& spec, bool keep_phase, const Tensor& record) {
  const int64_t num_rows = weight.numel() / spec.in_features;
  if (num_rows == 0) return;
  CheckNoOverlap(record, "record", weight, "weight");
  const uint8_t* from = weight.bytes();
  uint8_t* to = record.bytes();
  const QuantizeRows quantize = CurrentKernels().quantize[DTypeOf(weight.dtype())];
  const int64_t weight_pitch = spec.in_features * weight.element_bytes();
  const int64_t grain = std::max<int64_t>(1, kGrainElements / spec.in_features);
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> absmax(spec.num_blocks());
    quantize(spec, end - begin, from + begin * weight_pitch, keep_phase, absmax.data(),
             to + begin * spec.pitch());
  });
}

std::vector<int64_t> CheckedWeight(const Tensor& weight, const RecordSpec& spec) {
  CheckFloatDtype(weight.dtype(), "weight");
  if (spec.scale_kind == ScaleKind::kDynamic8) {
    Refuse(
        "dynamic8 scales are only imported from bitsandbytes, never made: write "
        "to_nf4(q.dequantize() + delta) instead");
  }
  return CheckedLead(weight, "weight", spec.in_features);
}

}  // namespace

Tensor Quantize(const Tensor& weight, const RecordSpec& spec) {
  std::vector<int64_t> sizes = CheckedWeight(weight, spec);
  if (!weight.is_contiguous()) return Quantize(weight.Contiguous(), spec);
  sizes.push_back(spec.pitch());
  Tensor record = weight.NewEmpty(sizes, aoti_torch_dtype_uint8());
  Launch(weight, spec, /*keep_phase=*/false, record);
  return record;
}

void QuantizeInto(const Tensor& weight, const RecordSpec& spec, const Tensor& record) {
  const std::vector<int64_t> lead = CheckedLead(record, "record", spec.pitch());
  CheckRecordDtype(record);
  CheckSameLead(lead, CheckedWeight(weight, spec), "weight");
  if (!weight.is_contiguous()) return QuantizeInto(weight.Contiguous(), spec, record);
  if (!record.is_contiguous()) {
    const Tensor rows = record.Contiguous();
    QuantizeInto(weight, spec, rows);
    return record.CopyFrom(rows);
  }
  Launch(weight, spec, /*keep_phase=*/true, record);
}

}  // namespace nf4tensor::cpu
