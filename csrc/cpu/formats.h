// The float dtypes of weights, bit by bit. Everything here has internal linkage, since each
// instruction set compiles its own copy.
#pragma once

#include "common/record.h"

namespace nf4tensor::cpu {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000u;

// Round gives the bits of the nearest value, ties to even; a NaN becomes the positive quiet one
// without payload, whatever the processor makes of it. Widen is exact.
struct Float32 {
  using Bits = uint32_t;
  static Bits Round(float value) { return value == value ? BitsFromFloat(value) : kNanBits; }
  static float Widen(Bits bits) { return FloatFromBits(bits); }
};

struct BFloat16 {
  using Bits = uint16_t;
  static Bits Round(float value) {
    const uint32_t bits = Float32::Round(value);
    return static_cast<Bits>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  static float Widen(Bits bits) { return FloatFromBits(uint32_t{bits} << 16); }
};

struct Float16 {
  using Bits = uint16_t;
  static Bits Round(float value) {
    const uint32_t bits = Float32::Round(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    return static_cast<Bits>(sign | RoundMagnitude(bits & 0x7FFFFFFFu));
  }

  static float Widen(Bits bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7FFFu;
    const uint32_t rebias = magnitude < 0x7C00u ? (127u - 15u) << 23 : (255u - 31u) << 23;
    const uint32_t normal = (magnitude << 13) + rebias;
    // 0.5 + magnitude * 2^-24 is exact: no float32 subnormal on the way.
    const uint32_t subnormal = BitsFromFloat(FloatFromBits(0x3F000000u + magnitude) - 0.5f);
    return FloatFromBits(sign | (magnitude < 0x0400u ? subnormal : normal));
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

// The 16 levels of a block, scaled and rounded one by one.
template <typename Format>
void RoundLevels(const float* levels, float scale, typename Format::Bits (&table)[kNumCodes]) {
  for (int code = 0; code < kNumCodes; ++code) table[code] = Format::Round(levels[code] * scale);
}

}  // namespace
}  // namespace nf4tensor::cpu
