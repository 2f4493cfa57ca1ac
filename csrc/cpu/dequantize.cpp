// Records to weights on the CPU.
#include <algorithm>

#include "arguments.h"
#include "ops.h"

namespace nf4tensor::cpu {
namespace {

// Fewer elements cost less than another thread.
constexpr int64_t kGrainElements = 1 << 15;

// The output dtypes: Round gives the bits of the nearest value, ties to even. A NaN becomes the
// positive quiet one without payload, whatever the processor makes of it.
struct Float32 {
  using Bits = uint32_t;
  static Bits Round(float value) { return value == value ? BitsFromFloat(value) : kNanBits; }
};

struct BFloat16 {
  using Bits = uint16_t;
  static Bits Round(float value) {
    const uint32_t bits = Float32::Round(value);
    return static_cast<Bits>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  static Bits Round(float value) {
    const uint32_t bits = Float32::Round(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    return static_cast<Bits>(sign | RoundMagnitude(bits & 0x7FFFFFFFu));
  }

 private:
  static uint32_t RoundMagnitude(uint32_t bits) {
    constexpr uint32_t kInfinity = 0x7F800000u;
    constexpr uint32_t kTwoTo16 = 0x47800000u;         // rounds to infinity, as all above 65520 do
    constexpr uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    constexpr uint32_t kRebias = (127u - 15u) << 23;
    if (bits > kInfinity) return 0x7E00u;
    if (bits >= kTwoTo16) return 0x7C00u;
    // The spacing of float32 at 0.5 is that of float16's subnormals: the addition rounds.
    if (bits < kSmallestNormal) return BitsFromFloat(FloatFromBits(bits) + 0.5f) - 0x3F000000u;
    return (bits - kRebias + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
  }
};

// Decodes one row: the 16 levels are scaled and rounded once a block, then looked up.
template <typename Format>
void DequantizeRow(const RecordSpec& spec, const uint8_t* __restrict__ row,
                   uint8_t* __restrict__ out) {
  using Bits = typename Format::Bits;
  const float* levels = Levels(spec.quant_type);
  ScaleReader scales(spec, row);
  for (int64_t begin = 0; begin < spec.in_features; begin += spec.block_size) {
    const float scale = scales.Next();
    Bits table[kNumCodes];
    for (int code = 0; code < kNumCodes; ++code) table[code] = Format::Round(levels[code] * scale);

    const int64_t end = std::min(begin + spec.block_size, spec.in_features);
    const int64_t even_end = end & ~int64_t{1};
    for (int64_t i = begin; i < even_end; i += 2) {
      const uint8_t packed = row[i / 2];
      const Bits pair[2] = {table[packed >> 4], table[packed & 15]};
      std::memcpy(out + i * sizeof(Bits), pair, sizeof(pair));
    }
    if (even_end < end) Store(out + even_end * sizeof(Bits), table[row[even_end / 2] >> 4]);
  }
}

template <typename Format>
void DequantizeRows(const RecordSpec& spec, int64_t num_rows, const uint8_t* record, uint8_t* out) {
  const int64_t out_pitch = spec.in_features * static_cast<int64_t>(sizeof(typename Format::Bits));
  const int64_t grain = std::max<int64_t>(1, kGrainElements / spec.in_features);
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      DequantizeRow<Format>(spec, record + i * spec.pitch(), out + i * out_pitch);
    }
  });
}

}  // namespace

void DequantizeInto(const Tensor& record, const RecordSpec& spec, const Tensor& out) {
  const std::vector<int64_t> lead = CheckedLead(record, "record", spec.pitch());
  CheckRecordDtype(record);
  CheckFloatDtype(out.dtype(), "out");
  CheckSameLead(lead, CheckedLead(out, "out", spec.in_features), "out");
  if (!record.is_contiguous()) return DequantizeInto(record.Contiguous(), spec, out);
  if (!out.is_contiguous()) return out.CopyFrom(Dequantize(record, spec, out.dtype()));

  const int64_t num_rows = record.numel() / spec.pitch();
  if (num_rows == 0) return;
  const uint8_t* from = CheckedBytes(record, "record");
  uint8_t* to = CheckedBytes(out, "out");
  if (out.dtype() == aoti_torch_dtype_float32()) {
    DequantizeRows<Float32>(spec, num_rows, from, to);
  } else if (out.dtype() == aoti_torch_dtype_bfloat16()) {
    DequantizeRows<BFloat16>(spec, num_rows, from, to);
  } else {
    DequantizeRows<Float16>(spec, num_rows, from, to);
  }
}

Tensor Dequantize(const Tensor& record, const RecordSpec& spec, int32_t dtype) {
  CheckFloatDtype(dtype, "out");
  std::vector<int64_t> sizes = CheckedLead(record, "record", spec.pitch());
  sizes.push_back(spec.in_features);
  Tensor out = record.NewEmpty(sizes, dtype);
  DequantizeInto(record, spec, out);
  return out;
}

}  // namespace nf4tensor::cpu
