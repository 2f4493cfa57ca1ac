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
#include "native_grid_memory.h"
#include "native_grid_values.h"

extern "C" int nf4tensor_use_isa(const char* isa);

namespace nf4tensor {
namespace {

using cpu::DType;
using cpu::Kernels;

constexpr int64_t kNumRows = 3;
constexpr int64_t kMaxFeatures = 4304;
constexpr int64_t kMaxBytes = kNumRows * 4 * kMaxFeatures + 4096;
constexpr ScaleKind kScaleKinds[] = {ScaleKind::kFloat32, ScaleKind::kSquare8,
                                     ScaleKind::kDynamic8};
constexpr QuantType kQuantTypes[] = {QuantType::kNf4, QuantType::kFp4};
constexpr DType kDTypes[] = {cpu::kFloat32, cpu::kBFloat16, cpu::kFloat16};

// Where a kernel's arguments lie (see Buffer::Place).
struct Placement {
  int64_t in_shift;
  int64_t out_shift;
  bool stream;
};
constexpr Placement kPlacements[] = {
    {0, 0, false}, {0, 0, true}, {32, 32, true}, {kAtEnd, kAtEnd, true}, {3, 1, false},
};

class Grid {
 public:
  explicit Grid(const Kernels& kernels) : kernels_(kernels) {}

  // All there is to test at one width.
  void TestWidth(int64_t in_features) {
    for (int64_t block_size = kMinBlockSize; block_size <= kMaxBlockSize; block_size *= 2) {
      for (const QuantType quant_type : kQuantTypes) {
        for (const ScaleKind scale_kind : kScaleKinds) {
          spec_ = MakeSpec(in_features, block_size, scale_kind, quant_type);
          random_ = Random(in_features << 20 | block_size << 4 | static_cast<int>(scale_kind) << 1 |
                           static_cast<int>(quant_type));
          TestDequantize();
          if (scale_kind != ScaleKind::kDynamic8) TestQuantize();  // these are never made
        }
      }
    }
  }

  int64_t num_comparisons() const { return num_comparisons_; }
  uint64_t checksum() const { return checksum_; }

 private:
  void TestDequantize() {
    const std::vector<uint8_t> records = MakeRecords(spec_, kNumRows, random_);
    for (const DType dtype : kDTypes) {
      std::vector<uint8_t> expected(kNumRows * spec_.in_features * ElementBytes(dtype));
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
      AddToChecksum(expected);
    }
  }

  void TestQuantize() {
    // Records that are written over, with phases to keep.
    const std::vector<uint8_t> before = MakeRecords(spec_, kNumRows, random_);
    for (const DType dtype : kDTypes) {
      const std::vector<uint8_t> weights = MakeWeights(spec_, dtype, kNumRows, random_);
      for (const bool keep_phase : {false, true}) {
        std::vector<float> absmax(spec_.num_blocks());
        std::vector<uint8_t> expected = before;
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
        AddToChecksum(expected);
      }
    }
  }

  void QuantizeAt(const Placement& placement, DType dtype, const std::vector<uint8_t>& weights,
                  bool keep_phase, const std::vector<uint8_t>& before) {
    const uint8_t* const weight = in_.Place(weights.data(), weights.size(), placement.in_shift);
    uint8_t* const absmax = scratch_.Place(4 * spec_.num_blocks(), 0);
    record_ = out_.Place(before.data(), before.size(), placement.out_shift);
    float* const floats = reinterpret_cast<float*>(absmax);
    kernels_.quantize[dtype](spec_, 0, weight, keep_phase, floats, record_);
    kernels_.quantize[dtype](spec_, kNumRows, weight, keep_phase, floats, record_);
  }

  // Ends the program at a difference.
  void Compare(const char* op, DType dtype, const Placement& placement, const uint8_t* actual,
               const std::vector<uint8_t>& expected) {
    ++num_comparisons_;
    const bool guards_hold = in_.GuardsHold() && out_.GuardsHold() && scratch_.GuardsHold();
    if (guards_hold && std::memcmp(actual, expected.data(), expected.size()) == 0) return;
    std::fprintf(stderr,
                 "native_grid: %s %s: in_features %" PRId64 ", block_size %" PRId64
                 ", scale_kind %d, segment_length %" PRId64 ", num_segments %" PRId64
                 ", quant_type %d, dtype %d, in at %" PRId64 ", out at %" PRId64 ", stream %d: ",
                 kernels_.isa, op, spec_.in_features, spec_.block_size,
                 static_cast<int>(spec_.scale_kind), spec_.segment_length, spec_.num_segments,
                 static_cast<int>(spec_.quant_type), dtype, placement.in_shift, placement.out_shift,
                 placement.stream);
    if (!guards_hold) {
      std::fprintf(stderr, "wrote outside of its output\n");
      std::exit(1);
    }
    size_t i = 0;
    while (actual[i] == expected[i]) ++i;
    std::fprintf(stderr, "byte %zu of %zu is 0x%02x, expected 0x%02x\n", i, expected.size(),
                 actual[i], expected[i]);
    std::exit(1);
  }

  void AddToChecksum(const std::vector<uint8_t>& bytes) {
    for (size_t i = 0; i < bytes.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i, bytes.size() - i < 8 ? bytes.size() - i : 8);
      checksum_ = (checksum_ ^ word) * 0x9E3779B97F4A7C15u;
      checksum_ ^= checksum_ >> 32;
    }
  }

  const Kernels& kernels_;
  RecordSpec spec_{};
  Random random_{0};
  Buffer in_{kMaxBytes};
  Buffer out_{kMaxBytes};
  Buffer scratch_{4 * kMaxFeatures / kMinBlockSize};
  uint8_t* record_ = nullptr;
  int64_t num_comparisons_ = 0;
  uint64_t checksum_ = 0;
};

int Run(const char* isa, int64_t stride) {
  if (nf4tensor_use_isa(isa) != 0) {
    std::fprintf(stderr, "native_grid: %s: this build or this processor does not have it\n", isa);
    return 2;
  }
  Grid grid(cpu::CurrentKernels());
  for (int64_t in_features = 1; in_features <= 300; in_features += stride) {
    grid.TestWidth(in_features);
  }
  for (const int64_t in_features : {int64_t{576}, int64_t{4096}, kMaxFeatures}) {
    grid.TestWidth(in_features);
  }
  std::printf("%s: %" PRId64 " comparisons, checksum %016" PRIx64 "\n", isa, grid.num_comparisons(),
              grid.checksum());
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
