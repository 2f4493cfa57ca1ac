// How the codes of weights are found: by quotients that need no division, a curve that needs no
// search, and one comparison.
#pragma once

#include "cuda/device.h"

namespace nf4tensor::cuda {

// 1 / absmax to about 48 bits.
struct Reciprocal {
  float high;
  float low;
};

// From an approximation that is off by a few units in the last place.
__device__ __forceinline__ Reciprocal RefineReciprocal(float absmax, float guess) {
  const float high = __fmaf_rn(guess, __fmaf_rn(-absmax, guess, 1.0f), guess);
  return {high, __fmul_rn(__fmaf_rn(-absmax, high, 1.0f), high)};
}

// weight / absmax, rounded once: it is above a threshold exactly where fl(weight / absmax) is. That
// is no theorem: cuda_grid_quantize.cpp tries every absmax, threshold and approximation, with the
// weights next to the threshold. For an absmax in range, as BringIntoRange leaves it.
__device__ __forceinline__ float Normalize(float weight, const Reciprocal& reciprocal) {
  return __fmaf_rn(weight, reciprocal.high, __fmul_rn(weight, reciprocal.low));
}

// Multiplies weights whose absmax is so small or large that parts of its reciprocal might not be
// normal numbers by a power of two, and returns the new absmax. It is exact but for weights that
// become zero, whose code is that of zero anyway.
template <int kSize>
__device__ __forceinline__ float BringIntoRange(float absmax, float (&weights)[kSize]) {
  constexpr float kTwoTo64 = 1.8446744e19f;
  constexpr float kTwoTo96 = 7.9228163e28f;
  if (absmax > 1.0f / kTwoTo64 && absmax < kTwoTo64) return absmax;
  const float factor = absmax < 1.0f ? kTwoTo96 : 1.0f / kTwoTo96;
#pragma unroll
  for (float& weight : weights) weight = __fmul_rn(weight, factor);
  return __fmul_rn(absmax, factor);
}

// A curve n * (kSlope - kBend * |n|) + kStart through the thresholds, within 1/2 of the number of
// each: so the integer k that is nearest to the curve at a weight is how many thresholds are below
// it, or one less, and a comparison with threshold k tells which. FP4 has a sign and a magnitude,
// and the thresholds are those of the magnitude.
template <QuantType kQuantType>
struct Curve;

template <>
struct Curve<QuantType::kNf4> {
  static constexpr float kSlope = 11.9375f;
  static constexpr float kBend = 4.5f;
  static constexpr int kStart = 7;
  static constexpr auto kThresholds = kNf4Thresholds;
};

template <>
struct Curve<QuantType::kFp4> {
  static constexpr float kSlope = 11.25f;
  static constexpr float kBend = 4.75f;
  static constexpr int kStart = 0;
  static constexpr auto kThresholds = kFp4Thresholds;
};

template <typename ThisCurve>
constexpr bool IsNearThresholds() {
  int i = 0;
  for (const float t : ThisCurve::kThresholds.values) {
    const float place = t * (ThisCurve::kSlope - ThisCurve::kBend * (t < 0.0f ? -t : t));
    const float distance = place + static_cast<float>(ThisCurve::kStart - i++);
    if (distance > 0.48f || distance < -0.48f) return false;
  }
  return 2.0f * ThisCurve::kBend < ThisCurve::kSlope;  // it rises all the way from -1 to 1
}
static_assert(IsNearThresholds<Curve<QuantType::kNf4>>());
static_assert(IsNearThresholds<Curve<QuantType::kFp4>>());

// Threshold k for lanes k and k + 16 of a warp, and one above all weights where there is none.
template <QuantType kQuantType>
constexpr Table<float, kNumCodes> MakeLaneThresholds() {
  Table<float, kNumCodes> thresholds{};
  for (float& threshold : thresholds.values) threshold = 2.0f;
  int i = 0;
  for (const float t : Curve<kQuantType>::kThresholds.values) thresholds.values[i++] = t;
  return thresholds;
}
template <QuantType kQuantType>
__device__ constexpr auto kLaneThresholds = MakeLaneThresholds<kQuantType>();

template <QuantType kQuantType>
__device__ __forceinline__ float LaneThreshold() {
  return __ldg(kLaneThresholds<kQuantType>.values + threadIdx.x % kNumCodes);
}

// The codes of eight weights, as a record has them, of a block whose absmax is neither zero nor
// NaN. For all lanes of a warp at once.
template <QuantType kQuantType>
__device__ __forceinline__ uint32_t EncodeWord(const float* weights, const Reciprocal& reciprocal,
                                               float lane_threshold) {
  using ThisCurve = Curve<kQuantType>;
  constexpr bool kHasSign = kQuantType == QuantType::kFp4;
  // A number that 1.5 * 2^23 is added to is rounded to an integer, in the low bits of the sum.
  constexpr float kRounder = 12582912.0f;
  constexpr uint32_t kRounderBits = 0x4B400000u;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float normalized = Normalize(weights[i], reciprocal);
    const float value = kHasSign ? fabsf(normalized) : normalized;
    const float slope = __fmaf_rn(-ThisCurve::kBend, fabsf(normalized), ThisCurve::kSlope);
    const float place = __fmaf_rn(slope, value, kRounder + ThisCurve::kStart);
    const float threshold = __shfl_sync(kAllLanes, lane_threshold, BitsFromFloat(place));
    const uint32_t is_above = BitsFromFloat(__fsub_rn(threshold, value)) >> 31;
    codes = 16 * codes + BitsFromFloat(place) + is_above;
    if constexpr (kHasSign) codes += BitsFromFloat(normalized) >> 28 & kFp4SignBit;
  }
  codes -= kRounderBits * 0x11111111u;
  if constexpr (kHasSign) {
    // kFp4Codes of each nibble, and no sign for zero.
    const uint32_t nonzero = (codes | codes >> 1 | codes >> 2) & 0x11111111u;
    codes = (codes ^ (codes & 0x22222222u) << 1) & (0x77777777u | nonzero << 3);
  }
  return __byte_perm(codes, 0, 0x0123);  // the first weight's code is the highest nibble so far
}

}  // namespace nf4tensor::cuda
