#include "cpu/panels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "arguments.h"
#include "cpu/workspace.h"

namespace nf4tensor::cpu {
namespace {

constexpr int64_t kPanelBytes = int64_t{4} << 20;
// No fewer inputs: those are limited by decoding.
constexpr int64_t kManyInputs = 16;
// As many pay for the copies that MKL makes on AMD's processors: measured on one with AVX2, it
// gains 0 to 30 % there, and loses as much at half of them.
constexpr int64_t kManyInputsUntuned = 512;

// What nf4tensor_use_panels was told: -1 for what is faster.
std::atomic<int> choice{-1};

bool MultipliesHalves(DType dtype) {
#if defined(__x86_64__)
  return dtype == kBFloat16 && __builtin_cpu_supports("avx512bf16") != 0;
#else
  return dtype != kFloat32;  // AArch64 has had both since its second version
#endif
}

// From how many inputs on torch's own float32 product is faster than our tiles.
int64_t ManyFloat32Inputs() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0 ? kManyInputs : kManyInputsUntuned;
#else
  return kManyInputs;
#endif
}

// Elements of a panel's side, beside another of some length: even pieces of what fits, in whole
// cache lines where they do.
int64_t PanelSide(const Weight& weight, int64_t side, int64_t other) {
  constexpr int64_t kLine = 64;
  const int64_t fitting = kPanelBytes / (other * weight.element_bytes);
  const int64_t step = fitting < kLine ? kPanelWidth : kLine;
  const int64_t num_panels = CeilDiv(side, std::max(fitting / step * step, step));
  return RoundUp(CeilDiv(side, num_panels), step);
}

// Decodes some columns of all rows of a panel.
void DecodePanel(const Weight& weight, int64_t num_rows, Columns columns, const uint8_t* record,
                 uint8_t* panel) {
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / (columns.end - columns.begin));
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    weight.kernels.dequantize[weight.dtype](weight.spec, end - begin, columns,
                                            record + begin * weight.spec.pitch(),
                                            panel + begin * columns.out_pitch, /*stream=*/false);
  });
}

// A matrix [num_rows, num_columns] in memory that outlives it.
Tensor MatrixAt(const Weight& weight, const void* data, int64_t num_rows, int64_t num_columns,
                bool is_transposed = false) {
  if (is_transposed) {
    return Tensor::FromMemory(data, {num_columns, num_rows}, {1, num_columns},
                              TorchDTypeOf(weight.dtype));
  }
  return Tensor::FromMemory(data, {num_rows, num_columns}, {num_columns, 1},
                            TorchDTypeOf(weight.dtype));
}

// Copies a product [num_inputs, count] into columns of the output.
void CopyColumns(const Weight& weight, int64_t num_inputs, int64_t count, const uint8_t* product,
                 int64_t first, int64_t out_columns, uint8_t* output) {
  const int64_t num_bytes = count * weight.element_bytes;
  for (int64_t m = 0; m < num_inputs; ++m) {
    std::memcpy(output + (m * out_columns + first) * weight.element_bytes, product + m * num_bytes,
                num_bytes);
  }
}

// output = input @ panels, side by side. input: [num_inputs, length]; side: all columns of output.
// decode(first, count, panel) makes a panel: [count, length] to be transposed, or [length, count].
template <typename Decode>
void ForEachPanel(const Weight& weight, int64_t num_inputs, int64_t length, int64_t side,
                  bool is_transposed, const uint8_t* input, const uint8_t* bias, uint8_t* output,
                  Decode decode) {
  const int64_t bytes = weight.element_bytes;
  const int64_t step = PanelSide(weight, side, length);
  // As many inputs at once as have a product no larger than a panel.
  const int64_t block = std::clamp<int64_t>(kPanelBytes / (step * bytes), 1, num_inputs);
  const int64_t panel_floats = CeilDiv(step * length * bytes, 4);
  const int64_t product_floats = CeilDiv(step * block * bytes, 4);
  Workspace workspace({panel_floats, product_floats});
  uint8_t* const panel = reinterpret_cast<uint8_t*>(workspace.Take(panel_floats));
  uint8_t* const product = reinterpret_cast<uint8_t*>(workspace.Take(product_floats));
  for (int64_t first = 0; first < side; first += step) {
    const int64_t count = std::min(step, side - first);
    decode(first, count, panel);
    const Tensor factor = is_transposed ? MatrixAt(weight, panel, count, length, true)
                                        : MatrixAt(weight, panel, length, count);
    for (int64_t m = 0; m < num_inputs; m += block) {
      const int64_t num = std::min(block, num_inputs - m);
      const Tensor from = MatrixAt(weight, input + m * length * bytes, num, length);
      const Tensor to = MatrixAt(weight, product, num, count);
      if (bias == nullptr) {
        from.MultiplyInto(factor, to);
      } else {
        from.MultiplyInto(factor, to, MatrixAt(weight, bias + first * bytes, 1, count));
      }
      CopyColumns(weight, num, count, product, first, side, output + m * side * bytes);
    }
  }
}

}  // namespace

bool IsForPanels(const Weight& weight, int64_t num_inputs) {
  const int chosen = choice.load(std::memory_order_relaxed);
  if (chosen >= 0) return chosen == 1;
  if (weight.dtype == kFloat32) return num_inputs >= ManyFloat32Inputs();
  return num_inputs >= kManyInputs && MultipliesHalves(weight.dtype);
}

void MultiplyPanelsByTransposed(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                                const uint8_t* bias, uint8_t* output) {
  const int64_t num_columns = weight.spec.in_features;
  ForEachPanel(weight, num_inputs, num_columns, weight.num_rows, /*is_transposed=*/true, input,
               bias, output, [&](int64_t first, int64_t count, uint8_t* panel) {
                 DecodePanel(weight, count, {0, num_columns, num_columns * weight.element_bytes},
                             weight.record + first * weight.spec.pitch(), panel);
               });
}

void MultiplyPanelsBy(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                      uint8_t* output) {
  ForEachPanel(weight, num_inputs, weight.num_rows, weight.spec.in_features,
               /*is_transposed=*/false, input, nullptr, output,
               [&](int64_t first, int64_t count, uint8_t* panel) {
                 const Columns columns{first, first + count, count * weight.element_bytes};
                 DecodePanel(weight, weight.num_rows, columns, weight.record, panel);
               });
}

}  // namespace nf4tensor::cpu

// Whether products go by panels: 1, 0, or -1 for what is faster.
extern "C" __attribute__((visibility("default"))) void nf4tensor_use_panels(int use) {
  nf4tensor::cpu::choice.store(use, std::memory_order_relaxed);
}
