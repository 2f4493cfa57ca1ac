// Records to weights on the CPU: threads, and the kernels of the instruction set in use.
#include <unistd.h>

#include <algorithm>

#include "cpu/backend.h"
#include "cpu/kernels.h"

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

void Backend::Dequantize(const RecordSpec& spec, DType dtype, int64_t num_rows,
                         const uint8_t* record, uint8_t* out) const {
  const DequantizeRows dequantize = CurrentKernels().dequantize[dtype];
  const int64_t out_pitch = spec.in_features * ElementBytes(dtype);
  const bool stream = IsLargerThanCaches(num_rows * out_pitch);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / spec.in_features);
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    dequantize(spec, end - begin, {0, spec.in_features, out_pitch}, record + begin * spec.pitch(),
               out + begin * out_pitch, stream);
  });
}

}  // namespace nf4tensor::cpu
