// Weights to records on the CPU.
#include <algorithm>
#include <cmath>
#include <limits>

#include "arguments.h"
#include "ops.h"

namespace nf4tensor::cpu {
namespace {

// Fewer elements cost less than another thread.
constexpr int64_t kGrainElements = 1 << 13;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr float kMaxSquare = 255.0f * 255.0f;

// The input dtypes; each is exact in float32.
struct Float32 {
  using Bits = uint32_t;
  static float Widen(Bits bits) { return FloatFromBits(bits); }
};

struct BFloat16 {
  using Bits = uint16_t;
  static float Widen(Bits bits) { return FloatFromBits(uint32_t{bits} << 16); }
};

struct Float16 {
  using Bits = uint16_t;
  static float Widen(Bits bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7FFFu;
    const uint32_t rebias = magnitude < 0x7C00u ? (127u - 15u) << 23 : (255u - 31u) << 23;
    const uint32_t normal = (magnitude << 13) + rebias;
    // 0.5 + magnitude * 2^-24 is exact: no float32 subnormal on the way.
    const uint32_t subnormal = BitsFromFloat(FloatFromBits(0x3F000000u + magnitude) - 0.5f);
    return FloatFromBits(sign | (magnitude < 0x0400u ? subnormal : normal));
  }
};

// The largest magnitude; NaN if any value is not finite.
float AbsMax(const float* values, int64_t count) {
  uint32_t largest = 0;  // magnitudes order like their bits
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, BitsFromFloat(values[i]) & 0x7FFFFFFFu);
  }
  return FloatFromBits(largest < kInfinityBits ? largest : kNanBits);
}

// Encodes one block of at most kMaxBlockSize weights and returns its absmax.
template <typename Format, QuantType kQuantType>
float QuantizeBlock(const uint8_t* weight, int64_t count, uint8_t* packed) {
  constexpr uint8_t kZero = ZeroCode(kQuantType);
  float values[kMaxBlockSize];
  uint8_t codes[kMaxBlockSize + 1];
  for (int64_t i = 0; i < count; ++i) {
    values[i] =
        Format::Widen(Load<typename Format::Bits>(weight + i * sizeof(typename Format::Bits)));
  }
  const float absmax = AbsMax(values, count);
  if (absmax > 0.0f) {
    for (int64_t i = 0; i < count; ++i) codes[i] = Encode<kQuantType>(values[i] / absmax);
  } else {  // zero or NaN
    std::fill_n(codes, count, kZero);
  }
  codes[count] = kZero;  // the unused nibble of an odd row
  for (int64_t i = 0; i < count; i += 2) {
    packed[i / 2] = static_cast<uint8_t>(codes[i] << 4 | codes[i + 1]);
  }
  return absmax;
}

// The square8 pair of a segment's absmax values; zero blocks have no say.
SegmentPair FitPair(const float* absmax, int64_t count) {
  float lowest = std::numeric_limits<float>::infinity();
  float highest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(absmax[i])) return {FloatFromBits(kNanBits), FloatFromBits(kNanBits)};
    if (absmax[i] == 0.0f) continue;
    lowest = std::min(lowest, absmax[i]);
    highest = std::max(highest, absmax[i]);
  }
  if (highest == 0.0f) return {0.0f, 0.0f};
  SegmentPair pair{(highest - lowest) / kMaxSquare, lowest};
  if (std::isinf(DecodeScale(kMaxSquare, pair))) pair.step = std::nextafter(pair.step, 0.0f);
  return pair;
}

uint8_t EncodeScale(float absmax, SegmentPair pair) {
  if (!(absmax > 0.0f && pair.step > 0.0f)) return 0;
  const float root = std::sqrt((absmax - pair.base) / pair.step);
  return static_cast<uint8_t>(std::lrint(std::min(root, 255.0f)));
}

// Writes the scales of a row and, where it has them, its pairs.
void WriteScales(const RecordSpec& spec, const float* absmax, int64_t phase, uint8_t* row) {
  uint8_t* scales = row + spec.scales_offset();
  if (!spec.has_segments()) {
    std::memcpy(scales, absmax, spec.num_blocks() * sizeof(float));
    return;
  }
  for (int64_t segment = 0; segment < spec.num_segments; ++segment) {
    const int64_t begin = FirstBlock(spec, phase, segment);
    const int64_t end = FirstBlock(spec, phase, segment + 1);
    const SegmentPair pair = FitPair(absmax + begin, end - begin);
    Store(row + spec.pair_offset(segment), pair);
    for (int64_t block = begin; block < end; ++block) {
      scales[block] = EncodeScale(absmax[block], pair);
    }
  }
}

// Writes every byte of a row. absmax: scratch for num_blocks.
template <typename Format, QuantType kQuantType>
void QuantizeRow(const RecordSpec& spec, const uint8_t* weight, int64_t phase, float* absmax,
                 uint8_t* row) {
  const int64_t gaps_begin = spec.codes_bytes();
  std::memset(row + gaps_begin, 0, spec.pitch() - gaps_begin);
  for (int64_t block = 0; block < spec.num_blocks(); ++block) {
    const int64_t begin = block * spec.block_size;
    const int64_t count = std::min(spec.block_size, spec.in_features - begin);
    absmax[block] = QuantizeBlock<Format, kQuantType>(
        weight + begin * sizeof(typename Format::Bits), count, row + begin / 2);
  }
  WriteScales(spec, absmax, phase, row);
  if (spec.has_segments()) Store(row + spec.segments_offset(), static_cast<uint32_t>(phase));
}

// A thread's part is a range of rows. keep_phase: the record has phases to keep, else they are 0.
template <typename Format, QuantType kQuantType>
void QuantizeRows(const RecordSpec& spec, int64_t num_rows, const uint8_t* weight, bool keep_phase,
                  uint8_t* record) {
  const int64_t weight_pitch =
      spec.in_features * static_cast<int64_t>(sizeof(typename Format::Bits));
  const int64_t grain = std::max<int64_t>(1, kGrainElements / spec.in_features);
  ParallelFor(num_rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> absmax(spec.num_blocks());
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* row = record + i * spec.pitch();
      const int64_t phase = keep_phase ? LoadPhase(spec, row) : 0;
      QuantizeRow<Format, kQuantType>(spec, weight + i * weight_pitch, phase, absmax.data(), row);
    }
  });
}

template <typename Format>
void QuantizeRows(const RecordSpec& spec, int64_t num_rows, const uint8_t* weight, bool keep_phase,
                  uint8_t* record) {
  const auto quantize = spec.quant_type == QuantType::kNf4 ? QuantizeRows<Format, QuantType::kNf4>
                                                           : QuantizeRows<Format, QuantType::kFp4>;
  quantize(spec, num_rows, weight, keep_phase, record);
}

void Launch(const Tensor& weight, const RecordSpec& spec, bool keep_phase, const Tensor& record) {
  const int64_t num_rows = weight.numel() / spec.in_features;
  if (num_rows == 0) return;
  const uint8_t* from = CheckedBytes(weight, "weight");
  uint8_t* to = CheckedBytes(record, "record");
  if (weight.dtype() == aoti_torch_dtype_float32()) {
    QuantizeRows<Float32>(spec, num_rows, from, keep_phase, to);
  } else if (weight.dtype() == aoti_torch_dtype_bfloat16()) {
    QuantizeRows<BFloat16>(spec, num_rows, from, keep_phase, to);
  } else {
    QuantizeRows<Float16>(spec, num_rows, from, keep_phase, to);
  }
}

std::vector<int64_t> CheckedWeight(const Tensor& weight, const RecordSpec& spec) {
  CheckFloatDtype(weight.dtype(), "weight");
  if (spec.scale_kind == ScaleKind::kDynamic8) {
    Refuse(
        "dynamic8 scales are only imported from bitsandbytes, never made: write "
        "to_nf4(q.dequantize() + delta) instead");
  }
  return CheckedLead(weight, "weight", spec.in_features);
}

}  // namespace

Tensor Quantize(const Tensor& weight, const RecordSpec& spec) {
  std::vector<int64_t> sizes = CheckedWeight(weight, spec);
  if (!weight.is_contiguous()) return Quantize(weight.Contiguous(), spec);
  sizes.push_back(spec.pitch());
  Tensor record = weight.NewEmpty(sizes, aoti_torch_dtype_uint8());
  Launch(weight, spec, /*keep_phase=*/false, record);
  return record;
}

void QuantizeInto(const Tensor& weight, const RecordSpec& spec, const Tensor& record) {
  const std::vector<int64_t> lead = CheckedLead(record, "record", spec.pitch());
  CheckRecordDtype(record);
  CheckSameLead(lead, CheckedWeight(weight, spec), "weight");
  if (!weight.is_contiguous()) return QuantizeInto(weight.Contiguous(), spec, record);
  if (!record.is_contiguous()) {
    const Tensor rows = record.Contiguous();
    QuantizeInto(weight, spec, rows);
    return record.CopyFrom(rows);
  }
  Launch(weight, spec, /*keep_phase=*/true, record);
}

}  // namespace nf4tensor::cpu
