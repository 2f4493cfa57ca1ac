// Runs every kernel of an instruction set over a grid of geometries, values and addresses, and
// compares it with the scalar kernels bit for bit. Knows no torch: it runs wherever a compiler or
// an emulator does.
//
//   native_grid ISA [STRIDE]     STRIDE: only every so many widths; 1 for all
//
// Prints the number of comparisons and a checksum of what was computed, which is the same on every
// processor. Exit status: 0; 1 at the first difference, which it describes; 2 where it cannot run.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "native_grid_compare.h"
#include "native_grid_memory.h"
#include "native_grid_products.h"
#include "native_grid_values.h"

extern "C" int nf4tensor_use_isa(const char* isa);

namespace nf4tensor {
namespace {

using cpu::Kernels;

constexpr int64_t kNumRows = 3;
constexpr int64_t kMaxFeatures = 4304;
constexpr int64_t kMaxBytes = kNumRows * 4 * kMaxFeatures + 4096;
constexpr ScaleKind kScaleKinds[] = {ScaleKind::kFloat32, ScaleKind::kSquare8,
                                     ScaleKind::kDynamic8};
constexpr QuantType kQuantTypes[] = {QuantType::kNf4, QuantType::kFp4};

constexpr Placement kPlacements[] = {
    {0, 0, false}, {0, 0, true}, {32, 32, true}, {kAtEnd, kAtEnd, true}, {3, 1, false},
};

class Grid {
 public:
  explicit Grid(const Kernels& kernels)
      : kernels_(kernels), comparer_(kernels.isa), products_(kernels, comparer_) {}

  // All there is to test at one width.
  void TestWidth(int64_t in_features) {
    for (int64_t block_size = kMinBlockSize; block_size <= kMaxBlockSize; block_size *= 2) {
      for (const QuantType quant_type : kQuantTypes) {
        for (const ScaleKind scale_kind : kScaleKinds) {
          spec_ = MakeSpec(in_features, block_size, scale_kind, quant_type);
          random_ = Random(in_features << 20 | block_size << 4 | static_cast<int>(scale_kind) << 1 |
                           static_cast<int>(quant_type));
          TestDequantize();
          TestDequantizeColumns();
          if (scale_kind != ScaleKind::kDynamic8) TestQuantize();  // these are never made
          products_.TestSpec(spec_, random_);
        }
      }
    }
  }

  // All that does not depend on a record.
  void TestFloats() { products_.TestFloats(); }

  const Comparer& comparer() const { return comparer_; }

 private:
  void TestDequantize() {
    const Bytes records = MakeRecords(spec_, kNumRows, random_);
    for (const DType dtype : kDTypes) {
      Bytes expected(kNumRows * spec_.in_features * ElementBytes(dtype));
      const cpu::Columns all{0, spec_.in_features, spec_.in_features * ElementBytes(dtype)};
      cpu::kScalarKernels.dequantize[dtype](spec_, kNumRows, all, records.data(), expected.data(),
                                            false);
      for (const Placement& placement : kPlacements) {
        const uint8_t* const record = in_.Place(records.data(), records.size(), placement.in_shift);
        uint8_t* const out = out_.Place(expected.size(), placement.out_shift);
        kernels_.dequantize[dtype](spec_, 0, all, record, out, placement.stream);
        kernels_.dequantize[dtype](spec_, kNumRows, all, record, out, placement.stream);
        Compare("dequantize", dtype, placement, out, expected);
      }
      comparer_.AddToChecksum(expected);
    }
  }

  // Some columns, with gaps between rows that must stay as they are.
  void TestDequantizeColumns() {
    const Bytes records = MakeRecords(spec_, kNumRows, random_);
    const int64_t begin = random_.Below(CeilDiv(spec_.in_features, cpu::kPanelWidth)) * 16;
    const int64_t end = begin + 1 + random_.Below(spec_.in_features - begin);
    for (const DType dtype : kDTypes) {
      const int64_t pitch = spec_.in_features * ElementBytes(dtype);
      const int64_t row_bytes = (end - begin) * ElementBytes(dtype);
      Bytes whole(kNumRows * pitch);
      cpu::kScalarKernels.dequantize[dtype](spec_, kNumRows, {0, spec_.in_features, pitch},
                                            records.data(), whole.data(), false);
      for (const Placement& placement : kPlacements) {
        const int64_t gap = ElementBytes(dtype) * random_.Below(40);
        Bytes expected((kNumRows - 1) * (row_bytes + gap) + row_bytes, kFill);
        for (int64_t row = 0; row < kNumRows; ++row) {
          std::memcpy(expected.data() + row * (row_bytes + gap),
                      whole.data() + row * pitch + begin * ElementBytes(dtype), row_bytes);
        }
        const uint8_t* const record = in_.Place(records.data(), records.size(), placement.in_shift);
        uint8_t* const out = out_.Place(expected.size(), placement.out_shift);
        kernels_.dequantize[dtype](spec_, kNumRows, {begin, end, row_bytes + gap}, record, out,
                                   placement.stream);
        Compare("dequantize columns", dtype, placement, out, expected);
        comparer_.AddToChecksum(expected);
      }
    }
  }

  void TestQuantize() {
    // Records that are written over, with phases to keep.
    const Bytes before = MakeRecords(spec_, kNumRows, random_);
    for (const DType dtype : kDTypes) {
      const Bytes weights = MakeWeights(spec_, dtype, kNumRows, random_);
      for (const bool keep_phase : {false, true}) {
        std::vector<float> absmax(spec_.num_blocks());
        Bytes expected = before;
        cpu::kScalarKernels.quantize[dtype](spec_, kNumRows, weights.data(), keep_phase,
                                            absmax.data(), expected.data());
        for (const Placement& placement : kPlacements) {
          if (placement.stream) continue;
          QuantizeAt(placement, dtype, weights, keep_phase, before);
          Compare("quantize", dtype, placement, record_, expected);
        }
        const Placement at_end{kAtEnd, kAtEnd, false};
        QuantizeAt(at_end, dtype, weights, keep_phase, before);
        Compare("quantize", dtype, at_end, record_, expected);
        comparer_.AddToChecksum(expected);
      }
    }
  }

  void QuantizeAt(const Placement& placement, DType dtype, const Bytes& weights, bool keep_phase,
                  const Bytes& before) {
    const uint8_t* const weight = in_.Place(weights.data(), weights.size(), placement.in_shift);
    uint8_t* const absmax = scratch_.Place(4 * spec_.num_blocks(), 0);
    record_ = out_.Place(before.data(), before.size(), placement.out_shift);
    float* const floats = reinterpret_cast<float*>(absmax);
    kernels_.quantize[dtype](spec_, 0, weight, keep_phase, floats, record_);
    kernels_.quantize[dtype](spec_, kNumRows, weight, keep_phase, floats, record_);
  }

  void Compare(const char* op, DType dtype, const Placement& placement, const uint8_t* actual,
               const Bytes& expected) {
    comparer_.Compare(op, spec_, dtype, placement, {&in_, &out_, &scratch_}, actual, expected);
  }

  const Kernels& kernels_;
  RecordSpec spec_{};
  Random random_{0};
  Buffer in_{kMaxBytes};
  Buffer out_{kMaxBytes};
  Buffer scratch_{4 * kMaxFeatures / kMinBlockSize};
  uint8_t* record_ = nullptr;
  Comparer comparer_;
  ProductTests products_;
};

int Run(const char* isa, int64_t stride) {
  if (nf4tensor_use_isa(isa) != 0) {
    std::fprintf(stderr, "native_grid: %s: this build or this processor does not have it\n", isa);
    return 2;
  }
  Grid grid(cpu::CurrentKernels());
  grid.TestFloats();
  for (int64_t in_features = 1; in_features <= 300; in_features += stride) {
    grid.TestWidth(in_features);
  }
  for (const int64_t in_features : {int64_t{576}, int64_t{4096}, kMaxFeatures}) {
    grid.TestWidth(in_features);
  }
  std::printf("%s: %" PRId64 " comparisons, checksum %016" PRIx64 "\n", isa,
              grid.comparer().num_comparisons(), grid.comparer().checksum());
  return 0;
}

}  // namespace
}  // namespace nf4tensor

int main(int num_arguments, char** arguments) {
  const long stride = num_arguments == 3 ? std::strtol(arguments[2], nullptr, 10) : 1;
  if (num_arguments < 2 || num_arguments > 3 || stride < 1) {
    std::fprintf(stderr, "usage: native_grid ISA [STRIDE]\n");
    return 2;
  }
  return nf4tensor::Run(arguments[1], stride);
}
