// Runs LaunchQuantize over a grid of geometries, values and addresses under the CUDA emulator, and
// compares it with the CPU's scalar kernels bit for bit; and tries its quotients with every absmax.
// Knows no torch.
//
//   cuda_grid_quantize [STRIDE [SEED]]     STRIDE: only every so many widths and absmax values; 1
//                                          for all. SEED: of the order of threads
//
// Prints the number of comparisons. Exit status: 0; 1 at the first difference, which it describes;
// 2 where it cannot run.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/encode.h"
#include "cuda/kernels.h"
#include "native_grid_compare.h"
#include "native_grid_memory.h"
#include "native_grid_values.h"

namespace nf4tensor {
namespace {

constexpr DType kDTypes[] = {kFloat32, kBFloat16, kFloat16};
constexpr QuantType kQuantTypes[] = {QuantType::kNf4, QuantType::kFp4};
constexpr int64_t kMaxBytes = int64_t{1} << 20;

class Grid {
 public:
  // All there is to test at one width.
  void TestWidth(int64_t in_features) {
    for (int64_t block_size = kMinBlockSize; block_size <= kMaxBlockSize; block_size *= 2) {
      for (const QuantType quant_type : kQuantTypes) {
        for (const ScaleKind scale_kind : {ScaleKind::kFloat32, ScaleKind::kSquare8}) {
          TestSpec(MakeSpec(in_features, block_size, scale_kind, quant_type), 3);
        }
      }
    }
  }

  // One dtype and one place for each of a weight's specs, all of them in turn.
  void TestSpec(const RecordSpec& spec, int64_t num_rows) {
    spec_ = spec;
    random_ = Random(static_cast<uint64_t>(num_comparisons() + 1));
    const DType dtype = kDTypes[random_.Below(kNumDTypes)];
    const int64_t element_bytes = ElementBytes(dtype);
    const int64_t in_shifts[] = {0, element_bytes, 16, kAtEnd};
    const int64_t out_shifts[] = {0, 16, 32, kAtEnd};
    const Placement placement{in_shifts[random_.Below(4)], out_shifts[random_.Below(4)], false};
    const Bytes weights = MakeWeights(spec_, dtype, num_rows, random_);
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
  RecordSpec spec_{};
  Random random_{0};
  Buffer in_{kMaxBytes};
  Buffer out_{kMaxBytes};
  Comparer comparer_{"cuda"};
};

// Rows whose absmax values do not fit into shared memory: in windows of many short segments, of
// few, of one that does not fit either; with segments that no block uses before and behind them.
void TestLongRows(Grid& grid) {
  for (const QuantType quant_type : kQuantTypes) {
    for (const int64_t segment_length : {1, 3, 256, 500, 700, 1200, 5000}) {
      for (const int64_t unused : {0, 1, 5}) {
        RecordSpec spec{16 * 1200 - 9 * unused, 16, ScaleKind::kSquare8,
                        segment_length,         0,  quant_type};
        spec.num_segments = CeilDiv(spec.num_blocks(), segment_length) + unused;
        grid.TestSpec(spec, 2);
      }
    }
    grid.TestSpec({16 * 1200, 16, ScaleKind::kFloat32, 0, 0, quant_type}, 2);
  }
}

// More rows than the blocks of threads of a launch have, short and long ones.
void TestManyRows(Grid& grid) {
  for (const QuantType quant_type : kQuantTypes) {
    for (const ScaleKind scale_kind : {ScaleKind::kFloat32, ScaleKind::kSquare8}) {
      grid.TestSpec(MakeSpec(16, 16, scale_kind, quant_type), 1500);
      grid.TestSpec(MakeSpec(99, 32, scale_kind, quant_type), 333);
      grid.TestSpec(MakeSpec(2112, 64, scale_kind, quant_type), 20);
      grid.TestSpec(MakeSpec(4096, 1024, scale_kind, quant_type), 10);
    }
  }
}

// Whether Normalize is above a threshold where the rounded quotient is, for the weights around
// threshold * absmax: both rise with the weight.
template <QuantType kQuantType>
int64_t TestQuotients(int64_t stride) {
  int64_t num_comparisons = 0;
  for (int64_t mantissa = 0; mantissa < 1 << 23; mantissa += stride) {
    const float absmax = FloatFromBits(0x3F800000u | static_cast<uint32_t>(mantissa));
    for (const int off_by : {-2, -1, 0, 1, 2}) {
      const float guess =
          FloatFromBits(BitsFromFloat(1.0f / absmax) + static_cast<uint32_t>(off_by));
      const cuda::Reciprocal reciprocal = cuda::RefineReciprocal(absmax, guess);
      for (const float threshold : cuda::Curve<kQuantType>::kThresholds.values) {
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
  Grid grid;
  for (int64_t in_features = 1; in_features <= 300; in_features += stride) {
    grid.TestWidth(in_features);
  }
  for (const int64_t in_features : {576, 4096, 4304, 9000}) grid.TestWidth(in_features);
  TestLongRows(grid);
  TestManyRows(grid);
  const int64_t num_quotients =
      TestQuotients<QuantType::kNf4>(stride) + TestQuotients<QuantType::kFp4>(stride);
  std::printf("quantize: %" PRId64 " comparisons, %" PRId64 " quotients\n", grid.num_comparisons(),
              num_quotients);
  return 0;
}

}  // namespace
}  // namespace nf4tensor

int main(int num_arguments, char** arguments) {
  const long stride = num_arguments > 1 ? std::strtol(arguments[1], nullptr, 10) : 1;
  const long seed = num_arguments > 2 ? std::strtol(arguments[2], nullptr, 10) : 0;
  if (num_arguments > 3 || stride < 1) {
    std::fprintf(stderr, "usage: cuda_grid_quantize [STRIDE [SEED]]\n");
    return 2;
  }
  return nf4tensor::Run(stride, static_cast<uint32_t>(seed));
}
