// Weights to records on the CPU: threads, and the kernels of the instruction set in use.
#include <algorithm>

#include "cpu/backend.h"
#include "cpu/kernels.h"

namespace nf4tensor::cpu {
namespace {

// Fewer elements cost less than another thread.
constexpr int64_t kGrainElements = 1 << 13;

}  // namespace

void Backend::Quantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* weight,
                       bool keep_phase, uint8_t* record) const {
  const QuantizeRows quantize = CurrentKernels().quantize[dtype];
  const int64_t weight_pitch = spec.in_features * ElementBytes(dtype);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / spec.in_features);
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> absmax(spec.num_blocks());
    quantize(spec, end - begin, weight + begin * weight_pitch, keep_phase, absmax.data(),
             record + begin * spec.pitch());
  });
}

}  // namespace nf4tensor::cpu
