// Runs csrc/cuda/linear.cu on the host (see emulation/cuda_emulator.h), over a grid of geometries,
// values and numbers of inputs.
//
//   cuda_grid_linear [STRIDE [SEED]]     STRIDE: only every so many cases; SEED: of everything
//   random
//
// Inputs that are 1 in one column and 0 elsewhere give the weights that the kernel multiplies with,
// which must equal those of the scalar kernels bit for bit; sums of random inputs must lie as near
// to float64 as float32 sums in any order do. Prints the number of comparisons. Exit status: 0; 1
// at the first difference, which it describes.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/device.h"
#include "cuda_grid_arguments.h"
#include "native_grid_compare.h"
#include "native_grid_memory.h"
#include "native_grid_values.h"

namespace nf4tensor {
namespace {

constexpr DType kDTypes[] = {kBFloat16, kFloat16};
constexpr ScaleKind kScaleKinds[] = {ScaleKind::kFloat32, ScaleKind::kSquare8,
                                     ScaleKind::kDynamic8};
constexpr QuantType kQuantTypes[] = {QuantType::kNf4, QuantType::kFp4};
constexpr int64_t kBlockSizes[] = {16, 32, 64, 128, 4096};
// A few pieces, a part of a tail, whole chunks and slabs of every shape, and a little more or less.
constexpr int64_t kWidths[] = {8,   16,  24,  56,  64,  72,   120,  128,  136, 200,
                               256, 264, 328, 512, 576, 1032, 1280, 2048, 2120};
// One, two, four and eight tiles of inputs, and more than one group of them.
constexpr int64_t kNumInputs[] = {1, 64, 8, 9, 63, 3, 33, 16, 5, 40, 17, 7, 32, 2, 61, 27, 71, 131};
constexpr int64_t kMaxRows = 70;
constexpr Placement kPlacement = {kAtEnd, kAtEnd, false};

float Widen(DType dtype, uint16_t bits) {
  return dtype == kBFloat16 ? cpu::BFloat16::Widen(bits) : cpu::Float16::Widen(bits);
}

class Grid {
 public:
  Grid(int64_t stride, uint32_t seed) : stride_(stride), seed_(seed) {}

  void TestAll() {
    TestWhatTheKernelTakes();
    for (const int64_t width : kWidths) {
      for (const int64_t block_size : kBlockSizes) {
        for (const ScaleKind scale_kind : kScaleKinds) {
          for (const QuantType quant_type : kQuantTypes) {
            for (const DType dtype : kDTypes) {
              if (++num_cases_ % stride_ != 0) continue;
              spec_ = MakeSpec(width, block_size, scale_kind, quant_type);
              dtype_ = dtype;
              TestCase();
            }
          }
        }
      }
    }
  }

  int64_t num_comparisons() const { return num_comparisons_; }

 private:
  void TestCase() {
    const int64_t case_number = num_cases_ / stride_;
    random_ = Random(uint64_t{seed_} << 32 | static_cast<uint64_t>(num_cases_));
    emulator::state.seed = seed_ + static_cast<uint32_t>(num_cases_);
    // With few processors, a block takes 64 inputs; else 32.
    emulator::state.num_processors = case_number % 3 == 0 ? 132 : 1;
    num_rows_ = 1 + random_.Below(case_number % 2 == 0 ? 20 : kMaxRows);
    num_inputs_ = kNumInputs[(case_number + seed_) % std::size(kNumInputs)];
    TestSums();
    // So that a wide weight does not take a launch for each column.
    if (num_inputs_ < 32 && spec_.in_features > 16 * num_inputs_) num_inputs_ = 64;
    TestWeights();
  }

  // The weights that inputs of 1 and 0 give. All are finite: 0 times any other is not 0.
  void TestWeights() {
    Bytes records = MakeRecords(spec_, num_rows_, random_);
    MakeFinite(records);
    const std::vector<uint16_t> weights = Decode(records);
    const int64_t num_windows = CeilDiv(spec_.in_features, num_inputs_);
    for (int64_t window = 0; window < num_windows; ++window) {
      // Of a wide weight the last, and some others.
      if (window + 1 < num_windows && random_.Below(num_windows) >= 2) continue;
      const int64_t first = window * num_inputs_;
      std::vector<uint16_t> input(num_inputs_ * spec_.in_features);
      std::vector<uint16_t> expected(num_inputs_ * num_rows_);
      for (int64_t n = 0; n < num_inputs_ && first + n < spec_.in_features; ++n) {
        input[n * spec_.in_features + first + n] = static_cast<uint16_t>(RoundTo(dtype_, 1.0f));
        for (int64_t row = 0; row < num_rows_; ++row) {
          const uint16_t weight = weights[row * spec_.in_features + first + n];
          // The sum of -0 and of zeros is +0.
          expected[n * num_rows_ + row] = weight == 0x8000 ? 0 : weight;
        }
      }
      const uint8_t* const output = Multiply(records, input, nullptr);
      comparer_.Compare("weights", spec_, dtype_, kPlacement, {&record_, &input_, &output_}, output,
                        BytesOf(expected));
      num_comparisons_ += num_inputs_ * num_rows_;
    }
  }

  // Sums, twice: threads in another order give the same bits.
  void TestSums() {
    const Bytes records = MakeRecords(spec_, num_rows_, random_);
    std::vector<uint16_t> input(num_inputs_ * spec_.in_features);
    for (uint16_t& value : input) value = RandomInput(random_.Below(2000) == 0);
    std::vector<uint16_t> bias(num_rows_);
    for (uint16_t& value : bias) value = RandomInput(random_.Below(40) == 0);
    const bool has_bias = random_.Below(2) == 0;
    const int64_t output_bytes = 2 * num_inputs_ * num_rows_;
    const uint8_t* const first = Multiply(records, input, has_bias ? &bias : nullptr);
    const Bytes output(first, first + output_bytes);
    const uint8_t* const again = Multiply(records, input, has_bias ? &bias : nullptr);
    comparer_.Compare("sums again", spec_, dtype_, kPlacement,
                      {&record_, &input_, &bias_, &output_}, again, output);

    const std::vector<uint16_t> weights = Decode(records);
    for (int64_t n = 0; n < num_inputs_; ++n) {
      for (int64_t row = 0; row < num_rows_; ++row) {
        const float found = Widen(dtype_, Load<uint16_t>(again + 2 * (n * num_rows_ + row)));
        CheckSum(found, &input[n * spec_.in_features], &weights[row * spec_.in_features],
                 has_bias ? double{Widen(dtype_, bias[row])} : 0.0);
        ++num_comparisons_;
      }
    }
  }

  void CheckSum(float found, const uint16_t* input, const uint16_t* weights, double bias) {
    double exact = bias;
    double magnitudes = std::isfinite(bias) ? std::fabs(bias) : 0.0;
    for (int64_t k = 0; k < spec_.in_features; ++k) {
      const double product = double{Widen(dtype_, input[k])} * double{Widen(dtype_, weights[k])};
      exact += product;
      if (std::isfinite(product)) magnitudes += std::fabs(product);
    }
    // A sum that leaves the range on its way may end anywhere.
    if (magnitudes >= 0x1p127) return;
    if (!std::isfinite(exact)) {
      if (std::isnan(exact) ? std::isnan(found) : found == static_cast<float>(exact)) return;
      comparer_.CheckWithin("sums", spec_, dtype_, kPlacement, output_, found, exact, -1.0);
      return;
    }
    // As matmul_bound in bounds.py, and half the smallest number for products and output.
    const double length = static_cast<double>(spec_.in_features) + 1;
    const double gamma = length * 0x1p-24 / (1 - length * 0x1p-24);
    const double roundoff = dtype_ == kBFloat16 ? 0x1p-8 : 0x1p-11;
    const double largest = dtype_ == kBFloat16 ? 0x1.FEp127 : 65504.0;
    const double smallest = dtype_ == kBFloat16 ? 0x1p-134 : 0x1p-25;
    const double bound = gamma * magnitudes + roundoff * (std::fabs(exact) + gamma * magnitudes) +
                         smallest + length * 0x1p-150;
    if (std::fabs(exact) + bound > largest && (std::isinf(found) || std::isfinite(found))) return;
    comparer_.CheckWithin("sums", spec_, dtype_, kPlacement, output_, found, exact, bound);
  }

  // The last byte of each argument is the last that may be touched.
  const uint8_t* Multiply(const Bytes& records, const std::vector<uint16_t>& input,
                          const std::vector<uint16_t>* bias) {
    const int64_t output_bytes = 2 * num_inputs_ * num_rows_;
    uint8_t* const output = output_.Place(output_bytes, kAtEnd);
    const cuda::LinearCall call{
        spec_,
        dtype_,
        num_rows_,
        num_inputs_,
        record_.Place(records.data(), records.size(), kAtEnd),
        input_.Place(input.data(), 2 * input.size(), kAtEnd),
        bias == nullptr ? nullptr : bias_.Place(bias->data(), 2 * bias->size(), kAtEnd),
        output};
    Expect(cuda::CanFuse(call), "CanFuse refuses what the kernel takes");
    cuda::LaunchLinear(call, nullptr);
    return output;
  }

  std::vector<uint16_t> Decode(const Bytes& records) const {
    std::vector<uint16_t> weights(num_rows_ * spec_.in_features);
    cpu::kScalarKernels.dequantize[dtype_](
        spec_, num_rows_, {0, spec_.in_features, 2 * spec_.in_features}, records.data(),
        reinterpret_cast<uint8_t*>(weights.data()), false);
    return weights;
  }

  uint16_t RandomInput(bool is_extreme) {
    if (is_extreme) return static_cast<uint16_t>(RoundTo(dtype_, AnyScale(random_)));
    return random_.Below(8) == 0 ? 0
                                 : static_cast<uint16_t>(RoundTo(dtype_, random_.Normal(-3, 3)));
  }

  // Scales that no dtype rounds to infinity, some of them zero or subnormal.
  float FiniteScale() {
    const float scale = AnyScale(random_);
    return std::fabs(scale) <= 30000.0f ? scale : random_.Normal(-26, 2);
  }

  void MakeFinite(Bytes& records) {
    for (int64_t i = 0; i < num_rows_; ++i) {
      uint8_t* const row = records.data() + i * spec_.pitch();
      for (int64_t j = 0; j < spec_.num_segments; ++j) {
        // square8 multiplies the step by up to 65025.
        const float step =
            spec_.scale_kind == ScaleKind::kSquare8 ? FiniteScale() / 65536.0f : FiniteScale();
        Store(row + spec_.pair_offset(j), SegmentPair{step, FiniteScale()});
      }
      for (int64_t j = 0; j < spec_.num_blocks() && !spec_.has_segments(); ++j) {
        Store(row + spec_.scales_offset() + 4 * j, FiniteScale());
      }
    }
  }

  void TestWhatTheKernelTakes() {
    spec_ = MakeSpec(64, 64, ScaleKind::kSquare8, QuantType::kNf4);
    dtype_ = kBFloat16;
    uint8_t* const at = input_.Place(4096, 0);
    const cuda::LinearCall good{spec_, dtype_, 16, 4, at, at, nullptr, at};
    Expect(cuda::CanFuse(good), "CanFuse refuses an ordinary call");
    const auto refuses = [&](auto change) {
      cuda::LinearCall call = good;
      change(call);
      Expect(!cuda::CanFuse(call), "CanFuse takes a call that it should not");
    };
    refuses([](cuda::LinearCall& call) { call.dtype = kFloat32; });
    refuses([](cuda::LinearCall& call) { call.spec.in_features = 68; });
    refuses([](cuda::LinearCall& call) { call.spec.in_features = (1 << 24) + 8; });
    refuses([](cuda::LinearCall& call) { call.spec.num_segments = int64_t{1} << 23; });
    refuses([](cuda::LinearCall& call) { call.num_rows = int64_t{1} << 29; });
    refuses([](cuda::LinearCall& call) { call.input += 8; });
    refuses([](cuda::LinearCall& call) { call.record += 16; });
    for (int64_t cuda::LinearCall::* size :
         {&cuda::LinearCall::num_rows, &cuda::LinearCall::num_inputs}) {
      cuda::LinearCall call = good;
      call.*size = 0;
      cuda::LaunchLinear(call, nullptr);  // a launch of no blocks ends the program
    }
    const auto most = [&](int64_t num_rows, int compute_capability) {
      emulator::state.compute_capability = compute_capability;
      return cuda::MaxFusedInputs(spec_, num_rows);
    };
    Expect(most(4096, 75) == 0, "no tensor cores for bfloat16 before sm_80");
    Expect(most(64 * 132 * 3, 90) == 64, "three waves on sm_90");
    Expect(most(64 * 132 * 3 - 64, 90) == 48, "two waves on sm_90");
    Expect(most(1, 121) == 8, "few rows on a successor of sm_120");
  }

  void Expect(bool holds, const char* what) {
    ++num_comparisons_;
    if (holds) return;
    std::fprintf(stderr, "cuda_grid_linear: %s\n", what);
    std::exit(1);
  }

  static Bytes BytesOf(const std::vector<uint16_t>& values) {
    Bytes bytes(2 * values.size());
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  const int64_t stride_;
  const uint32_t seed_;
  int64_t num_cases_ = 0;
  int64_t num_comparisons_ = 0;
  RecordSpec spec_{};
  DType dtype_ = kBFloat16;
  int64_t num_rows_ = 0;
  int64_t num_inputs_ = 0;
  Random random_{0};
  Comparer comparer_{"cuda"};
  Buffer record_{1 << 20};
  Buffer input_{1 << 20};
  Buffer bias_{1 << 10};
  Buffer output_{1 << 16};
};

}  // namespace
}  // namespace nf4tensor

int main(int num_arguments, char** arguments) {
  const auto run = [](int64_t stride, uint32_t seed) {
    nf4tensor::Grid grid(stride, seed);
    grid.TestAll();
    std::printf("linear: %" PRId64 " comparisons\n", grid.num_comparisons());
    return 0;
  };
  return nf4tensor::RunWithArguments("linear", num_arguments, arguments, run);
}
