// The kernels for any processor.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/formats.h"
#include "cpu/kernels.h"

namespace nf4tensor::cpu {
namespace {

#include "cpu/dequantize_rows.h"
#include "cpu/quantize_rows.h"
#include "cpu/tiles.h"

template <typename Format>
class TableDecoder {
 public:
  using Bits = typename Format::Bits;

  explicit TableDecoder(bool) {}

  void SetScale(const float* levels, float scale) { RoundLevels<Format>(levels, scale, table_); }

  void Decode(const uint8_t* __restrict__ packed, int64_t count, uint8_t* __restrict__ out) const {
    for (int64_t i = 0; i + 2 <= count; i += 2) {
      const uint8_t byte = packed[i / 2];
      const Bits pair[2] = {table_[byte >> 4], table_[byte & 15]};
      memcpy(out + i * sizeof(Bits), pair, sizeof(pair));
    }
    if (count % 2 != 0) Store(out + (count - 1) * sizeof(Bits), table_[packed[count / 2] >> 4]);
  }

 private:
  Bits table_[kNumCodes];
};

template <typename Format>
class FloatDecoder {
 public:
  explicit FloatDecoder(bool) {}

  void SetScale(const float* levels, float scale) {
    for (int code = 0; code < kNumCodes; ++code) {
      table_[code] = Format::Widen(Format::Round(levels[code] * scale));
    }
  }

  void DecodePanels(const uint8_t* __restrict__ packed, int64_t count, int64_t panel_pitch,
                    float* __restrict__ to) const {
    for (int64_t begin = 0; begin < count; begin += kPanelWidth, to += panel_pitch) {
      for (int64_t i = 0; i < kPanelWidth; ++i) {
        const int64_t at = begin + i;
        to[i] = at < count ? table_[packed[at / 2] >> (at % 2 == 0 ? 4 : 0) & 15] : 0.0f;
      }
    }
  }

 private:
  float table_[kNumCodes];
};

// Four floats in whatever registers the compiler has for them.
struct FourFloats {
  typedef float Register __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kDotRows = 2;
  static constexpr int kOuterRows = 3;
  static constexpr int kSums = 12;

  static Register Zero() { return Register{}; }
  static Register Load(const float* from) { return nf4tensor::Load<Register>(from); }
  static void Store(float* to, Register values) { nf4tensor::Store(to, values); }
  static Register Broadcast(float value) { return Register{value, value, value, value}; }
  static Register MultiplyAdd(Register a, Register b, Register c) { return a * b + c; }
  static void AddSums(Register a, Register b, Register c, Register d, float* to) {
    to[0] += a[0] + a[1] + a[2] + a[3];
    to[1] += b[0] + b[1] + b[2] + b[3];
    to[2] += c[0] + c[1] + c[2] + c[3];
    to[3] += d[0] + d[1] + d[2] + d[3];
  }
};

}  // namespace

const Kernels kScalarKernels = {
    "scalar",
    {DequantizeRowsWith<OneTable<TableDecoder<Float32>>>,
     DequantizeRowsWith<OneTable<TableDecoder<BFloat16>>>,
     DequantizeRowsWith<OneTable<TableDecoder<Float16>>>},
    {QuantizeRowsWith<ScalarEncoder, Float32>, QuantizeRowsWith<ScalarEncoder, BFloat16>,
     QuantizeRowsWith<ScalarEncoder, Float16>},
    {DecodeTileWith<OneTable<FloatDecoder<Float32>>>,
     DecodeTileWith<OneTable<FloatDecoder<BFloat16>>>,
     DecodeTileWith<OneTable<FloatDecoder<Float16>>>},
    {WidenEach<Float32>, WidenEach<BFloat16>, WidenEach<Float16>},
    {NarrowEach<Float32>, NarrowEach<BFloat16>, NarrowEach<Float16>},
    MultiplyTransposedWith<FourFloats>,
    MultiplyWith<FourFloats>,
    /*max_dot_inputs=*/0,
    {},
    {},
};

}  // namespace nf4tensor::cpu
