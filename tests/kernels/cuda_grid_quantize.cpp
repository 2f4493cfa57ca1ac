// Runs LaunchQuantize over a grid of geometries, values and addresses under the CUDA emulator, and
// compares it with the CPU's scalar kernels bit for bit; and tries its quotients with every absmax.
// Knows no torch.
//
//   cuda_grid_quantize [STRIDE [SEED]]     STRIDE: only every so many widths and absmax values; 1
//                                          for all. SEED: of all that is random
//
// Prints the number of comparisons. Exit status: 0; 1 at the first difference, which it describes;
// 2 where it cannot run.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/encode.h"
#include "cuda/kernels.h"
#include "cuda_grid_arguments.h"
#include "native_grid_compare.h"
#include "native_grid_memory.h"
#include "native_grid_values.h"

namespace nf4tensor {
namespace {

constexpr DType kDTypes[] = {kFloat32, kBFloat16, kFloat16};
constexpr QuantType kQuantTypes[] = {QuantType::kNf4, QuantType::kFp4};
constexpr int64_t kMaxBytes = int64_t{1} << 20;

// Without NaN and infinities, one of which is enough to spoil a long segment.
void MakeFinite(DType dtype, Bytes& weights) {
  const int64_t element_bytes = ElementBytes(dtype);
  const uint32_t exponent = dtype == kFloat32 ? 0x7F800000 : dtype == kBFloat16 ? 0x7F80 : 0x7C00;
  for (size_t i = 0; i < weights.size(); i += element_bytes) {
    uint32_t bits = 0;
    std::memcpy(&bits, weights.data() + i, element_bytes);
    if ((bits & exponent) == exponent) bits ^= exponent & exponent << 1;
    std::memcpy(weights.data() + i, &bits, element_bytes);
  }
}

// Up to the largest number of the dtype, which float16's are not far from as they are.
void Enlarge(DType dtype, Bytes& weights) {
  const int64_t element_bytes = ElementBytes(dtype);
  const float largest = FloatFromBits(dtype == kFloat32 ? 0x7F7FFFFF : 0x7F7F0000);
  for (size_t i = 0; i < weights.size(); i += element_bytes) {
    uint32_t bits = 0;
    std::memcpy(&bits, weights.data() + i, element_bytes);
    const float value = FloatFromBits(dtype == kFloat32 ? bits : bits << 16);
    if (!std::isfinite(value)) continue;
    bits = RoundTo(dtype, std::clamp(value * 0x1p127f, -largest, largest));
    std::memcpy(weights.data() + i, &bits, element_bytes);
  }
}

class Grid {
 public:
  explicit Grid(uint32_t seed) : seed_(seed) {}

  // All there is to test at one width.
  void TestWidth(int64_t in_features, int64_t num_rows) {
    for (int64_t block_size = kMinBlockSize; block_size <= kMaxBlockSize; block_size *= 2) {
      for (const QuantType quant_type : kQuantTypes) {
        for (const ScaleKind scale_kind : {ScaleKind::kFloat32, ScaleKind::kSquare8}) {
          TestSpec(MakeSpec(in_features, block_size, scale_kind, quant_type), num_rows);
        }
      }
    }
  }

  // One of the dtypes and of the places.
  void TestSpec(const RecordSpec& spec, int64_t num_rows) {
    spec_ = spec;
    random_ = Random(uint64_t{seed_} << 32 | static_cast<uint64_t>(num_comparisons()));
    const DType dtype = kDTypes[random_.Below(kNumDTypes)];
    const int64_t element_bytes = ElementBytes(dtype);
    const int64_t in_shifts[] = {0, element_bytes, 16, kAtEnd};
    const int64_t out_shifts[] = {0, 16, 32, kAtEnd};
    const Placement placement{in_shifts[random_.Below(4)], out_shifts[random_.Below(4)], false};
    Bytes weights = MakeWeights(spec_, dtype, num_rows, random_);
    if (random_.Below(3) > 0) MakeFinite(dtype, weights);
    if (dtype != kFloat16 && random_.Below(4) == 0) Enlarge(dtype, weights);
    const Bytes before = MakeRecords(spec_, num_rows, random_);
    for (const bool keep_phase : {false, true}) {
      std::vector<float> absmax(spec_.num_blocks());
      Bytes expected = before;
      cpu::kScalarKernels.quantize[dtype](spec_, num_rows, weights.data(), keep_phase,
                                          absmax.data(), expected.data());
      const uint8_t* const weight = in_.Place(weights.data(), weights.size(), placement.in_shift);
      uint8_t* const record = out_.Place(before.data(), before.size(), placement.out_shift);
      cuda::LaunchQuantize(spec_, dtype, 0, weight, keep_phase, record, nullptr);
      cuda::LaunchQuantize(spec_, dtype, num_rows, weight, keep_phase, record, nullptr);
      comparer_.Compare("quantize", spec_, dtype, placement, {&in_, &out_}, record, expected);
    }
  }

  int64_t num_comparisons() const { return comparer_.num_comparisons(); }

 private:
  const uint32_t seed_;
  RecordSpec spec_{};
  Random random_{0};
  Buffer in_{kMaxBytes};
  Buffer out_{kMaxBytes};
  Comparer comparer_{"cuda"};
};

// Rows whose absmax values do not fit into shared memory: in windows of many short segments, of
// few, of one that does not fit either; with segments that no block uses before and behind them.
void TestLongRows(Grid& grid) {
  for (const int64_t segment_length : {1, 100, 300, 550, 5000}) {
    for (const int64_t unused : {0, 5}) {
      const int64_t num_segments = CeilDiv(600, segment_length) + unused;
      const QuantType quant_type = kQuantTypes[segment_length % 3 % 2];
      grid.TestSpec({16 * 600 - 9 * unused, 16, ScaleKind::kSquare8, segment_length, num_segments,
                     quant_type},
                    1);
    }
  }
  grid.TestSpec({16 * 1100, 16, ScaleKind::kSquare8, 5000, 1, QuantType::kNf4}, 1);
  grid.TestSpec({16 * 1100, 16, ScaleKind::kFloat32, 0, 0, QuantType::kNf4}, 1);
}

// More rows than the blocks of threads of a launch take at once, short and long ones.
void TestManyRows(Grid& grid) {
  grid.TestSpec(MakeSpec(16, 16, ScaleKind::kSquare8, QuantType::kNf4), 1100);
  grid.TestSpec(MakeSpec(99, 32, ScaleKind::kFloat32, QuantType::kFp4), 200);
  grid.TestSpec(MakeSpec(99, 32, ScaleKind::kSquare8, QuantType::kFp4), 200);
  grid.TestSpec(MakeSpec(2112, 64, ScaleKind::kSquare8, QuantType::kNf4), 17);
  grid.TestSpec(MakeSpec(4096, 1024, ScaleKind::kSquare8, QuantType::kFp4), 9);
}

// Whether Normalize is above a threshold where the rounded quotient is, for the weights around
// threshold * absmax: both rise with the weight.
template <int kSize>
int64_t TestQuotients(const Table<float, kSize>& thresholds, int64_t stride) {
  int64_t num_comparisons = 0;
  for (int64_t mantissa = 0; mantissa < 1 << 23; mantissa += stride * stride) {
    const float absmax = FloatFromBits(0x3F800000u | static_cast<uint32_t>(mantissa));
    for (const int off_by : {-2, -1, 0, 1, 2}) {
      const float guess =
          FloatFromBits(BitsFromFloat(1.0f / absmax) + static_cast<uint32_t>(off_by));
      const cuda::Reciprocal reciprocal = cuda::RefineReciprocal(absmax, guess);
      for (const float threshold : thresholds.values) {
        const uint32_t nearest = BitsFromFloat(threshold * absmax);
        for (const int offset : {-2, -1, 0, 1, 2}) {
          const float weight = FloatFromBits(nearest + static_cast<uint32_t>(offset));
          const bool is_above = cuda::Normalize(weight, reciprocal) > threshold;
          ++num_comparisons;
          if (is_above == (weight / absmax > threshold)) continue;
          std::fprintf(stderr, "cuda_grid_quantize: %a / %a is on the wrong side of %a\n", weight,
                       absmax, threshold);
          std::exit(1);
        }
      }
    }
  }
  return num_comparisons;
}

int Run(int64_t stride, uint32_t seed) {
  emulator::state.seed = seed;
  emulator::state.num_processors = 1;
  Grid grid(seed);
  for (int64_t in_features = 1; in_features <= 300; in_features += stride) {
    grid.TestWidth(in_features, 3);
  }
  grid.TestWidth(576, 3);
  for (const int64_t in_features : {4096, 4303}) grid.TestWidth(in_features, 1);
  TestLongRows(grid);
  TestManyRows(grid);
  const int64_t num_quotients =
      TestQuotients(kNf4Thresholds, stride) + TestQuotients(kFp4Thresholds, stride);
  std::printf("quantize: %" PRId64 " comparisons, %" PRId64 " quotients\n", grid.num_comparisons(),
              num_quotients);
  return 0;
}

}  // namespace
}  // namespace nf4tensor

int main(int num_arguments, char** arguments) {
  return nf4tensor::RunWithArguments("quantize", num_arguments, arguments, nf4tensor::Run);
}
