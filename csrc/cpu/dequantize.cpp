// Records to weights on the CPU: checks, threads, and the kernels of the instruction set in use.
#include <unistd.h>

#include <algorithm>

#include "arguments.h"
#include "cpu/kernels.h"
#include "ops.h"

namespace nf4tensor::cpu {
namespace {

// Fewer elements cost less than another thread.
constexpr int64_t kGrainElements = 1 << 15;

// Outputs that no cache holds are stored past them.
bool IsLargerThanCaches(int64_t num_bytes) {
  static const int64_t cache_bytes = [] {
    const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return reported > 0 ? int64_t{reported} : int64_t{32} << 20;
  }();
  return num_bytes > cache_bytes;
}

}  // namespace

void DequantizeInto(const Tensor& record, const RecordSpec& spec, const Tensor& out) {
  const std::vector<int64_t> lead = CheckedLead(record, "record", spec.pitch());
  CheckRecordDtype(record);
  CheckFloatDtype(out.dtype(), "out");
  CheckSameLead(lead, CheckedLead(out, "out", spec.in_features), "out");
  if (!record.is_contiguous()) return DequantizeInto(record.Contiguous(), spec, out);
  if (!out.is_contiguous()) return out.CopyFrom(Dequantize(record, spec, out.dtype()));

  const int64_t num_rows = record.numel() / spec.pitch();
  if (num_rows == 0) return;
  CheckNoOverlap(out, "out", record, "record");
  const uint8_t* from = record.bytes();
  uint8_t* to = out.bytes();
  const DequantizeRows dequantize = CurrentKernels().dequantize[DTypeOf(out.dtype())];
  const int64_t out_pitch = spec.in_features * out.element_bytes();
  const bool stream = IsLargerThanCaches(num_rows * out_pitch);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / spec.in_features);
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    dequantize(spec, end - begin, {0, spec.in_features, out_pitch}, from + begin * spec.pitch(),
               to + begin * out_pitch, stream);
  });
}

Tensor Dequantize(const Tensor& record, const RecordSpec& spec, int32_t dtype) {
  CheckFloatDtype(dtype, "out");
  std::vector<int64_t> sizes = CheckedLead(record, "record", spec.pitch());
  sizes.push_back(spec.in_features);
  Tensor out = record.NewEmpty(sizes, dtype);
  DequantizeInto(record, spec, out);
  return out;
}

}  // namespace nf4tensor::cpu
