#include "cpu/panels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/workspace.h"
#include "torch_shim.h"

namespace nf4tensor::cpu {
namespace {

constexpr int64_t kPanelBytes = int64_t{4} << 20;
// Fewer inputs than this are limited by decoding.
constexpr int64_t kManyInputs = 16;

// What nf4tensor_use_panels was told: -1 for what is faster.
std::atomic<int> choice{-1};

bool MultipliesHalves(DType dtype) {
#if defined(__x86_64__)
  return dtype == kBFloat16 && __builtin_cpu_supports("avx512bf16") != 0;
#else
  return dtype != kFloat32;  // AArch64 has had both since its second version
#endif
}

bool HasTunedLibrary(DType dtype) {
#if defined(__x86_64__)
  // MKL is at half the speed of an AVX2 multiplication on AMD's processors.
  return dtype == kFloat32 && __builtin_cpu_is("intel") != 0;
#else
  return dtype == kFloat32;
#endif
}

// Elements of a panel's side, beside another of some length: even pieces, in whole cache lines.
int64_t PanelSide(const Weight& weight, int64_t side, int64_t other) {
  constexpr int64_t kStep = 64;
  const int64_t fitting = kPanelBytes / (other * weight.element_bytes) / kStep * kStep;
  return RoundUp(CeilDiv(side, CeilDiv(side, std::max(fitting, kStep))), kStep);
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

// Calls multiply(first, count, panel, product) for each panel and copies the product.
template <typename Multiply>
void ForEachPanel(const Weight& weight, int64_t num_inputs, int64_t side, int64_t other,
                  uint8_t* output, Multiply multiply) {
  const int64_t step = PanelSide(weight, side, other);
  const auto floats = [&](int64_t count) { return CeilDiv(count * weight.element_bytes, 4); };
  const int64_t panel_floats = floats(step * other);
  const int64_t product_floats = floats(step * num_inputs);
  Workspace workspace(Workspace::BytesFor(panel_floats) + Workspace::BytesFor(product_floats));
  uint8_t* const panel = reinterpret_cast<uint8_t*>(workspace.Take(panel_floats));
  uint8_t* const product = reinterpret_cast<uint8_t*>(workspace.Take(product_floats));
  for (int64_t first = 0; first < side; first += step) {
    const int64_t count = std::min(step, side - first);
    multiply(first, count, panel, product);
    CopyColumns(weight, num_inputs, count, product, first, side, output);
  }
}

}  // namespace

bool IsForPanels(const Weight& weight, int64_t num_inputs) {
  const int chosen = choice.load(std::memory_order_relaxed);
  if (chosen >= 0) return chosen == 1;
  return num_inputs > kManyInputs &&
         (MultipliesHalves(weight.dtype) || HasTunedLibrary(weight.dtype));
}

void MultiplyPanelsByTransposed(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                                const uint8_t* bias, uint8_t* output) {
  const int64_t num_columns = weight.spec.in_features;
  const Tensor inputs = MatrixAt(weight, input, num_inputs, num_columns);
  ForEachPanel(weight, num_inputs, weight.num_rows, num_columns, output,
               [&](int64_t first, int64_t count, uint8_t* panel, uint8_t* product) {
                 DecodePanel(weight, count, {0, num_columns, num_columns * weight.element_bytes},
                             weight.record + first * weight.spec.pitch(), panel);
                 const Tensor to = MatrixAt(weight, product, num_inputs, count);
                 const Tensor rows = MatrixAt(weight, panel, count, num_columns, true);
                 if (bias == nullptr) return inputs.MultiplyInto(rows, to);
                 const Tensor offset =
                     MatrixAt(weight, bias + first * weight.element_bytes, 1, count);
                 inputs.MultiplyInto(rows, to, offset);
               });
}

void MultiplyPanelsBy(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                      uint8_t* output) {
  const Tensor inputs = MatrixAt(weight, input, num_inputs, weight.num_rows);
  ForEachPanel(weight, num_inputs, weight.spec.in_features, weight.num_rows, output,
               [&](int64_t first, int64_t count, uint8_t* panel, uint8_t* product) {
                 DecodePanel(weight, weight.num_rows,
                             {first, first + count, count * weight.element_bytes}, weight.record,
                             panel);
                 inputs.MultiplyInto(MatrixAt(weight, panel, weight.num_rows, count),
                                     MatrixAt(weight, product, num_inputs, count));
               });
}

}  // namespace nf4tensor::cpu

// Whether products go by panels: 1, 0, or -1 for what is faster.
extern "C" __attribute__((visibility("default"))) void nf4tensor_use_panels(int use) {
  nf4tensor::cpu::choice.store(use, std::memory_order_relaxed);
}
