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

// From an approximation that is off by a few units in the last place. A step of Newton's has to
// make `high` of it. Without, of the 2.8e9 quotients that cuda_grid_quantize.cpp tries with at most
// one unit, 32 are on the wrong side of a threshold; of the 4.6e9 with at most two, 181.
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

// The rank of a weight is the number of thresholds below it. A curve n * (kSlope - kBend * |n|)
// comes within 1/2 of the rank of each threshold: so the integer k that is nearest to it is the
// rank, or one less, and a comparison with threshold k tells which. FP4, whose thresholds are those
// of magnitudes on both sides of zero, has two of them so close there that its curve jumps by 1.
template <QuantType kQuantType>
struct Curve;
constexpr int kCurveStart = 7;

template <>
struct Curve<QuantType::kNf4> {
  static constexpr float kSlope = 11.9375f;
  static constexpr float kBend = 4.5f;
  static constexpr int kJump = 0;
};

template <>
struct Curve<QuantType::kFp4> {
  static constexpr float kSlope = 11.25f;
  static constexpr float kBend = 4.75f;
  static constexpr int kJump = 1;
};

constexpr float NextAbove(float value) {
  float step = value;
  while (value + step / 2.0f > value) step /= 2.0f;
  return value + step;
}

// Threshold k for lanes k and k + 16 of a warp, and one that no weight comes to where there is
// none.
template <QuantType kQuantType>
constexpr Table<float, kNumCodes> MakeThresholdsByRank() {
  Table<float, kNumCodes> thresholds{};
  for (int i = 0; i < kNumCodes; ++i) {
    if constexpr (kQuantType == QuantType::kNf4) {
      thresholds.values[i] = i < kNumCodes - 1 ? kNf4Thresholds[i] : 2.0f;
    } else {
      // Ranks count from 1. A weight is not beyond a negative threshold if it is that number.
      const int place = i < 8 ? 7 - i : i - 8;
      const float magnitude = place < kNumFp4Magnitudes - 1 ? kFp4Thresholds[place] : 2.0f;
      thresholds.values[i] = i < 8 ? -NextAbove(magnitude) : magnitude;
    }
  }
  return thresholds;
}
template <QuantType kQuantType>
__device__ constexpr auto kThresholdsByRank = MakeThresholdsByRank<kQuantType>();

template <QuantType kQuantType>
constexpr bool IsCurveNear() {
  using ThisCurve = Curve<kQuantType>;
  constexpr auto kThresholds = MakeThresholdsByRank<kQuantType>();
  for (int rank = 0; rank < kNumCodes; ++rank) {
    const float t = kThresholds[rank];
    if (t < -1.0f || t > 1.0f) continue;
    const int start = kCurveStart + (t < 0.0f ? 0 : ThisCurve::kJump);
    const float place = t * (ThisCurve::kSlope - ThisCurve::kBend * (t < 0.0f ? -t : t));
    const float distance = place + static_cast<float>(start - rank);
    if (distance > 0.48f || distance < -0.48f) return false;
  }
  return 2.0f * ThisCurve::kBend < ThisCurve::kSlope;  // it rises all the way from -1 to 1
}
static_assert(IsCurveNear<QuantType::kNf4>());
static_assert(IsCurveNear<QuantType::kFp4>());

// kFp4Codes and a sign of ranks from 1 to 15, in all nibbles.
__device__ __forceinline__ uint32_t Fp4CodesOfRanks(uint32_t ranks) {
  const uint32_t signs = ~ranks & 0x88888888u;
  const uint32_t negated = signs - (signs >> 3);
  const uint32_t magnitudes = ((ranks & 0x77777777u) ^ negated) + (signs >> 3);
  return magnitudes ^ (magnitudes & 0x22222222u) << 1 ^ signs;
}

template <QuantType kQuantType>
__device__ __forceinline__ float LaneThreshold() {
  return __ldg(kThresholdsByRank<kQuantType>.values + threadIdx.x % kNumCodes);
}

// The codes of eight weights, as a record has them, of a block whose absmax is neither zero nor
// NaN. For all lanes of a warp at once.
template <QuantType kQuantType>
__device__ __forceinline__ uint32_t EncodeWord(const float* weights, const Reciprocal& reciprocal,
                                               float lane_threshold) {
  using ThisCurve = Curve<kQuantType>;
  // 1.5 * 2^23: a number that is added to it is rounded to an integer, in the low bits of the sum.
  constexpr uint32_t kRounderBits = 0x4B400000u;
  uint32_t ranks = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float n = Normalize(weights[i], reciprocal);
    uint32_t start = kRounderBits + kCurveStart + ThisCurve::kJump;
    if constexpr (ThisCurve::kJump != 0) start -= BitsFromFloat(n) >> 31;
    const float slope = __fmaf_rn(-ThisCurve::kBend, fabsf(n), ThisCurve::kSlope);
    const uint32_t place = BitsFromFloat(__fmaf_rn(slope, n, FloatFromBits(start)));
    const float threshold = __shfl_sync(kAllLanes, lane_threshold, place);
    const uint32_t is_above = BitsFromFloat(__fsub_rn(threshold, n)) >> 31;
    ranks = 16 * ranks + place + is_above;
  }
  ranks -= kRounderBits * 0x11111111u;
  const uint32_t codes = kQuantType == QuantType::kNf4 ? ranks : Fp4CodesOfRanks(ranks);
  return __byte_perm(codes, 0, 0x0123);  // the first weight's code is the highest nibble so far
}

}  // namespace nf4tensor::cuda
