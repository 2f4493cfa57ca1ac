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

}  // namespace

const Kernels kScalarKernels = {
    "scalar",
    {DequantizeRowsWith<TableDecoder<Float32>>, DequantizeRowsWith<TableDecoder<BFloat16>>,
     DequantizeRowsWith<TableDecoder<Float16>>},
    {QuantizeRowsWith<ScalarEncoder, Float32>, QuantizeRowsWith<ScalarEncoder, BFloat16>,
     QuantizeRowsWith<ScalarEncoder, Float16>},
};

}  // namespace nf4tensor::cpu
