// The kernels for NEON, which every AArch64 processor has.
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/formats.h"
#include "cpu/kernels.h"

namespace nf4tensor::cpu {
namespace {

#include "cpu/dequantize_rows.h"
#include "cpu/dots.h"
#include "cpu/quantize_rows.h"
#include "cpu/tiles.h"

// The 16 scaled levels. NaN has one form only, which the instructions do not know.
inline void ScaleLevels(const float* levels, float scale, float32x4_t (&scaled)[4]) {
  const float32x4_t nan = vreinterpretq_f32_u32(vdupq_n_u32(kNanBits));
  for (int i = 0; i < 4; ++i) {
    const float32x4_t product = vmulq_n_f32(vld1q_f32(levels + 4 * i), scale);
    scaled[i] = vbslq_f32(vceqq_f32(product, product), product, nan);
  }
}

// Eight scaled levels rounded to two bytes each.
inline uint16x8_t RoundLevels8(BFloat16, float32x4_t first, float32x4_t second) {
  const auto round = [](float32x4_t values) {
    const uint32x4_t bits = vreinterpretq_u32_f32(values);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7FFF));
    return vreinterpretq_u16_u32(vaddq_u32(bits, bias));
  };
  return vuzp2q_u16(round(first), round(second));
}

inline uint16x8_t RoundLevels8(Float16, float32x4_t first, float32x4_t second) {
  return vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(first), vcvt_f16_f32(second)));
}

// The low bytes of eight and eight 16-bit integers, and the high bytes.
inline uint8x16_t LowBytes(uint16x8_t first, uint16x8_t second) {
  return vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}
inline uint8x16_t HighBytes(uint16x8_t first, uint16x8_t second) {
  return vuzp2q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}

// 16 codes of eight bytes, in order.
inline uint8x16_t Unpack16(const uint8_t* packed) {
  const uint8x8_t bytes = vld1_u8(packed);
  const uint8x8_t even = vshr_n_u8(bytes, 4);
  const uint8x8_t odd = vand_u8(bytes, vdup_n_u8(15));
  return vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
}

// Decodes what lies behind the last 16 weights of a row, through a copy.
template <typename Decoder>
inline void DecodeRest(const Decoder& decoder, const uint8_t* packed, int64_t count, uint8_t* out) {
  if (count == 0) return;
  constexpr int64_t kBytes = sizeof(typename Decoder::Bits);
  uint8_t rest_packed[8] = {};
  uint8_t rest[16 * kBytes];
  memcpy(rest_packed, packed, (count + 1) / 2);
  decoder.Put16(Unpack16(rest_packed), rest);
  memcpy(out, rest, count * kBytes);
}

// 16-bit weights: the low and the high bytes of the table are looked up apart, 16 at a time.
template <typename Format>
class TwoByteDecoder {
 public:
  using Bits = uint16_t;

  explicit TwoByteDecoder(bool) {}

  void SetScale(const float* levels, float scale) {
    float32x4_t scaled[4];
    ScaleLevels(levels, scale, scaled);
    const uint16x8_t first = RoundLevels8(Format{}, scaled[0], scaled[1]);
    const uint16x8_t second = RoundLevels8(Format{}, scaled[2], scaled[3]);
    low_ = LowBytes(first, second);
    high_ = HighBytes(first, second);
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const uint8x16_t bytes = vld1q_u8(packed + i / 2);
      const uint8x16_t even = vshrq_n_u8(bytes, 4);
      const uint8x16_t odd = vandq_u8(bytes, vdupq_n_u8(15));
      Put16(vzip1q_u8(even, odd), out + 2 * i);
      Put16(vzip2q_u8(even, odd), out + 2 * i + 32);
    }
    for (; i + 16 <= count; i += 16) Put16(Unpack16(packed + i / 2), out + 2 * i);
    DecodeRest(*this, packed + i / 2, count - i, out + 2 * i);
  }

  void Put16(uint8x16_t codes, uint8_t* out) const {
    const uint8x16_t low = vqtbl1q_u8(low_, codes);
    const uint8x16_t high = vqtbl1q_u8(high_, codes);
    vst1q_u8(out, vzip1q_u8(low, high));
    vst1q_u8(out + 16, vzip2q_u8(low, high));
  }

 private:
  uint8x16_t low_;
  uint8x16_t high_;
};

// Four scaled levels, rounded to a format and widened again.
inline float32x4_t RoundThrough(Float32, float32x4_t values) { return values; }

inline float32x4_t RoundThrough(BFloat16, float32x4_t values) {
  const uint16x4_t words = vget_low_u16(RoundLevels8(BFloat16{}, values, values));
  return vreinterpretq_f32_u32(vshll_n_u16(words, 16));
}

inline float32x4_t RoundThrough(Float16, float32x4_t values) {
  return vcvt_f32_f16(vcvt_f16_f32(values));
}

// Weights as float32: the same with four tables.
template <typename Format>
class FloatDecoder {
 public:
  using Bits = uint32_t;

  explicit FloatDecoder(bool) {}

  void SetScale(const float* levels, float scale) {
    float32x4_t scaled[4];
    ScaleLevels(levels, scale, scaled);
    uint16x8_t halves[4];
    for (int i = 0; i < 4; ++i) {
      halves[i] = vreinterpretq_u16_f32(RoundThrough(Format{}, scaled[i]));
    }
    const uint16x8_t lower[2] = {vuzp1q_u16(halves[0], halves[1]),
                                 vuzp1q_u16(halves[2], halves[3])};
    const uint16x8_t upper[2] = {vuzp2q_u16(halves[0], halves[1]),
                                 vuzp2q_u16(halves[2], halves[3])};
    table_[0] = LowBytes(lower[0], lower[1]);
    table_[1] = HighBytes(lower[0], lower[1]);
    table_[2] = LowBytes(upper[0], upper[1]);
    table_[3] = HighBytes(upper[0], upper[1]);
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) Put16(Unpack16(packed + i / 2), out + 4 * i);
    DecodeRest(*this, packed + i / 2, count - i, out + 4 * i);
  }

  void DecodePanels(const uint8_t* packed, int64_t count, int64_t panel_pitch, float* to) const {
    for (; count >= kPanelWidth; count -= kPanelWidth, packed += 8, to += panel_pitch) {
      Put16(Unpack16(packed), reinterpret_cast<uint8_t*>(to));
    }
    if (count == 0) return;
    for (int64_t i = count; i < kPanelWidth; ++i) to[i] = 0.0f;
    DecodeRest(*this, packed, count, reinterpret_cast<uint8_t*>(to));
  }

  template <typename Body>
  void Decode64(const uint8_t* packed, Body body) const {
    Decode16At<0>(packed, body);
    Decode16At<4>(packed + 8, body);
    Decode16At<8>(packed + 16, body);
    Decode16At<12>(packed + 24, body);
  }

  static int Position(int v, int lane) { return 4 * v + lane; }

  void Put16(uint8x16_t codes, uint8_t* out) const {
    float32x4_t weights[4];
    Decode16(codes, weights);
    for (int v = 0; v < 4; ++v) vst1q_u8(out + 16 * v, vreinterpretq_u8_f32(weights[v]));
  }

 private:
  void Decode16(uint8x16_t codes, float32x4_t (&weights)[4]) const {
    uint8x16_t bytes[4];
    for (int i = 0; i < 4; ++i) bytes[i] = vqtbl1q_u8(table_[i], codes);
    const uint16x8_t low[2] = {vreinterpretq_u16_u8(vzip1q_u8(bytes[0], bytes[1])),
                               vreinterpretq_u16_u8(vzip2q_u8(bytes[0], bytes[1]))};
    const uint16x8_t high[2] = {vreinterpretq_u16_u8(vzip1q_u8(bytes[2], bytes[3])),
                                vreinterpretq_u16_u8(vzip2q_u8(bytes[2], bytes[3]))};
    weights[0] = vreinterpretq_f32_u16(vzip1q_u16(low[0], high[0]));
    weights[1] = vreinterpretq_f32_u16(vzip2q_u16(low[0], high[0]));
    weights[2] = vreinterpretq_f32_u16(vzip1q_u16(low[1], high[1]));
    weights[3] = vreinterpretq_f32_u16(vzip2q_u16(low[1], high[1]));
  }

  template <int kFirst, typename Body>
  void Decode16At(const uint8_t* packed, Body& body) const {
    float32x4_t weights[4];
    Decode16(Unpack16(packed), weights);
    body(Place<kFirst>(), weights[0]);
    body(Place<kFirst + 1>(), weights[1]);
    body(Place<kFirst + 2>(), weights[2]);
    body(Place<kFirst + 3>(), weights[3]);
  }

  uint8x16_t table_[4];
};

// Four weights.
inline float32x4_t LoadWeights(Float32, const uint8_t* weight) {
  return vreinterpretq_f32_u8(vld1q_u8(weight));
}

inline float32x4_t LoadWeights(BFloat16, const uint8_t* weight) {
  return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(weight)), 16));
}

inline float32x4_t LoadWeights(Float16, const uint8_t* weight) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(weight)));
}

// The largest bits of any weight without its sign, over all full registers: magnitudes order like
// their bits.
inline uint32_t LargestMagnitude(const uint8_t* weight, int64_t num_bytes, uint32_t) {
  uint32x4_t largest = vdupq_n_u32(0);
  for (int64_t i = 0; i + 16 <= num_bytes; i += 16) {
    const uint32x4_t bits = vreinterpretq_u32_u8(vld1q_u8(weight + i));
    largest = vmaxq_u32(largest, vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)));
  }
  return vmaxvq_u32(largest);
}

inline uint16_t LargestMagnitude(const uint8_t* weight, int64_t num_bytes, uint16_t) {
  uint16x8_t largest = vdupq_n_u16(0);
  for (int64_t i = 0; i + 16 <= num_bytes; i += 16) {
    const uint16x8_t bits = vreinterpretq_u16_u8(vld1q_u8(weight + i));
    largest = vmaxq_u16(largest, vandq_u16(bits, vdupq_n_u16(0x7FFF)));
  }
  return vmaxvq_u16(largest);
}

alignas(16) constexpr auto kNf4Tree = MakeSearchTree(kNf4Thresholds);
alignas(16) constexpr auto kFp4Tree = MakeSearchTree(kFp4Thresholds);
alignas(16) constexpr auto kFp4CodesBySign = MakeFp4CodesBySign<uint8_t>();

// The place in a search after `kStep` steps, from the one before. The thresholds of a step lie side
// by side, from place 2^kStep on: their four bytes each are looked up like any others.
template <int kStep>
inline uint32x4_t Descend(uint32x4_t place, float32x4_t values, const float* tree) {
  constexpr int kFirst = 1 << kStep;
  float32x4_t threshold;
  if constexpr (kStep == 0) {
    threshold = vdupq_n_f32(tree[1]);
  } else {
    const uint32x4_t first_byte = vdupq_n_u32(0x03020100u - 0x04040404u * kFirst);
    const uint8x16_t bytes = vreinterpretq_u8_u32(vmlaq_n_u32(first_byte, place, 0x04040404u));
    const uint8x16_t four = vreinterpretq_u8_f32(vld1q_f32(tree + kFirst));
    if constexpr (kStep < 3) {
      threshold = vreinterpretq_f32_u8(vqtbl1q_u8(four, bytes));
    } else {
      const uint8x16x2_t eight = {{four, vreinterpretq_u8_f32(vld1q_f32(tree + kFirst + 4))}};
      threshold = vreinterpretq_f32_u8(vqtbl2q_u8(eight, bytes));
    }
  }
  return vsubq_u32(vaddq_u32(place, place), vcgtq_f32(values, threshold));
}

// Four weights that were divided by their block's absmax to codes or, of FP4, to indices of
// kFp4CodesBySign. The lowest four bits count.
template <QuantType kQuantType>
inline uint32x4_t Encode4(float32x4_t normalized) {
  constexpr bool kIsNf4 = kQuantType == QuantType::kNf4;
  const float* const tree = kIsNf4 ? kNf4Tree.values : kFp4Tree.values;
  const float32x4_t values = kIsNf4 ? normalized : vabsq_f32(normalized);
  uint32x4_t place = Descend<0>(vdupq_n_u32(1), values, tree);
  place = Descend<1>(place, values, tree);
  place = Descend<2>(place, values, tree);
  if constexpr (kIsNf4) return Descend<3>(place, values, tree);
  // Bit 3 of the place is set: it stays where the weight is negative.
  const uint32x4_t bits = vreinterpretq_u32_f32(normalized);
  return vandq_u32(place, vorrq_u32(vshrq_n_u32(bits, 28), vdupq_n_u32(7)));
}

template <typename Format, QuantType kQuantType>
struct NeonEncoder {
  using Scalar = ScalarEncoder<Format, kQuantType>;
  using Bits = typename Format::Bits;
  static constexpr int64_t kBytes = sizeof(Bits);

  static float AbsMax(const uint8_t* weight, int64_t count) {
    const int64_t whole = count * kBytes / 16 * 16;
    const uint32_t first = BitsFromFloat(Format::Widen(LargestMagnitude(weight, whole, Bits{})));
    const uint32_t rest = BitsFromFloat(Scalar::AbsMax(weight + whole, count - whole / kBytes));
    const uint32_t largest = first > rest ? first : rest;
    return FloatFromBits(largest < kInfinityBits ? largest : kNanBits);
  }

  static void Codes(const uint8_t* weight, int64_t count, float absmax, uint8_t* packed) {
    const float32x4_t divisor = vdupq_n_f32(absmax);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      uint16x8_t codes[4];
      for (int part = 0; part < 4; ++part) {
        const float32x4_t values = LoadWeights(Format{}, weight + (i + 4 * part) * kBytes);
        codes[part] = vreinterpretq_u16_u32(Encode4<kQuantType>(vdivq_f32(values, divisor)));
      }
      vst1_u8(packed + i / 2,
              Pack(LowBytes(vuzp1q_u16(codes[0], codes[1]), vuzp1q_u16(codes[2], codes[3]))));
    }
    Scalar::Codes(weight + i * kBytes, count - i, absmax, packed + i / 2);
  }

 private:
  // 16 codes to eight bytes, the first of each two in the high nibble.
  static uint8x8_t Pack(uint8x16_t codes) {
    codes = vandq_u8(codes, vdupq_n_u8(15));
    if (kQuantType == QuantType::kFp4) codes = vqtbl1q_u8(vld1q_u8(kFp4CodesBySign.values), codes);
    const uint8x16_t pairs = vsliq_n_u8(vuzp2q_u8(codes, codes), vuzp1q_u8(codes, codes), 4);
    return vget_low_u8(pairs);
  }
};

struct NeonVector {
  using Register = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kDotRows = 6;
  static constexpr int kOuterRows = 6;
  static constexpr int kSums = 24;

  static Register Zero() { return vdupq_n_f32(0.0f); }
  static Register Load(const float* from) { return vld1q_f32(from); }
  static void Store(float* to, Register values) { vst1q_f32(to, values); }
  static Register Broadcast(float value) { return vdupq_n_f32(value); }
  static Register MultiplyAdd(Register a, Register b, Register c) { return vfmaq_f32(c, a, b); }
  static float Sum(Register values) { return vaddvq_f32(values); }
  static void AddSums(Register a, Register b, Register c, Register d, float* to) {
    const Register sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
    vst1q_f32(to, vaddq_f32(vld1q_f32(to), sums));
  }
};

template <typename Format>
void NeonWiden(int64_t count, const uint8_t* from, float* to) {
  constexpr int64_t kBytes = sizeof(typename Format::Bits);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) vst1q_f32(to + i, LoadWeights(Format{}, from + i * kBytes));
  WidenEach<Format>(count - i, from + i * kBytes, to + i);
}

}  // namespace

const Kernels kNeonKernels = {
    "neon",
    {DequantizeRowsWith<OneTable<FloatDecoder<Float32>>>,
     DequantizeRowsWith<OneTable<TwoByteDecoder<BFloat16>>>,
     DequantizeRowsWith<OneTable<TwoByteDecoder<Float16>>>},
    {QuantizeRowsWith<NeonEncoder, Float32>, QuantizeRowsWith<NeonEncoder, BFloat16>,
     QuantizeRowsWith<NeonEncoder, Float16>},
    {DecodeTileWith<OneTable<FloatDecoder<Float32>>>,
     DecodeTileWith<OneTable<FloatDecoder<BFloat16>>>,
     DecodeTileWith<OneTable<FloatDecoder<Float16>>>},
    {NeonWiden<Float32>, NeonWiden<BFloat16>, NeonWiden<Float16>},
    {NarrowEach<Float32>, NarrowEach<BFloat16>, NarrowEach<Float16>},
    MultiplyTransposedWith<NeonVector>,
    MultiplyWith<NeonVector>,
    /*max_dot_inputs=*/4,
    {ArrangeWith<NeonVector, OneTable<FloatDecoder<Float32>>>,
     ArrangeWith<NeonVector, OneTable<FloatDecoder<BFloat16>>>,
     ArrangeWith<NeonVector, OneTable<FloatDecoder<Float16>>>},
    {DotRowsWith<NeonVector, OneTable<FloatDecoder<Float32>>>,
     DotRowsWith<NeonVector, OneTable<FloatDecoder<BFloat16>>>,
     DotRowsWith<NeonVector, OneTable<FloatDecoder<Float16>>>},
};

}  // namespace nf4tensor::cpu
