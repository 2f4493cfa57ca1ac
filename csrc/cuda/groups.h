// What a thread of a quantizer does with a group, 32 bytes of weights: load them, find their
// largest magnitude, encode them, store the codes.
#pragma once

#include "cuda/encode.h"

namespace nf4tensor::cuda {

inline constexpr uint32_t kGroupBytes = 32;
inline constexpr uint32_t kWords = kGroupBytes / 4;
template <DType kDType>
inline constexpr uint32_t kElementBytes = ElementBytes(kDType);
template <DType kDType>
inline constexpr uint32_t kGroup = kGroupBytes / kElementBytes<kDType>;

inline constexpr uint32_t kInfinityBits = 0x7F800000u;

template <QuantType kQuantType>
inline constexpr uint32_t kZeroCodes = ZeroCode(kQuantType) * 0x11111111u;

// The first num_left weights of a group, and zeros.
template <DType kDType, bool kWhole>
__device__ __forceinline__ void LoadGroup(const uint8_t* from, int32_t num_left,
                                          uint32_t (&words)[kWords]) {
#pragma unroll
  for (uint32_t& word : words) word = 0;
  if constexpr (kWhole) {
    if (num_left > 0) LoadSector(from, words);
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(kGroup<kDType>); ++i) {
      if (i >= num_left) continue;
      if constexpr (kDType == kFloat32) {
        words[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
      } else {
        const uint32_t bits = __ldg(reinterpret_cast<const uint16_t*>(from) + i);
        words[i / 2] |= bits << 16 * (i % 2);
      }
    }
  }
}

// The largest magnitude of each half of the words, or of the words for float32.
template <DType kDType>
__device__ __forceinline__ uint32_t LargestMagnitudes(const uint32_t (&words)[kWords]) {
  constexpr uint32_t kMagnitude = kDType == kFloat32 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  uint32_t largest = 0;
#pragma unroll
  for (const uint32_t word : words) largest = MaxOrNan<kDType>(largest, word & kMagnitude);
  return largest;
}

// What a block stores: its largest magnitude, or the one NaN.
template <DType kDType>
__device__ __forceinline__ float AbsMax(uint32_t largest) {
  if constexpr (kDType != kFloat32) {
    float low = 0.0f;
    float high = 0.0f;
    WidenPair<kDType>(largest, low, high);
    largest = MaxOrNan<kFloat32>(BitsFromFloat(low), BitsFromFloat(high));
  }
  return FloatFromBits(largest < kInfinityBits ? largest : kNanBits);
}

template <DType kDType, QuantType kQuantType>
__device__ __forceinline__ void EncodeGroup(const uint32_t (&words)[kWords], float absmax,
                                            float lane_threshold,
                                            uint32_t (&codes)[kGroup<kDType> / 8]) {
  float weights[kGroup<kDType>];
#pragma unroll
  for (uint32_t i = 0; i < kWords; ++i) {
    if constexpr (kDType == kFloat32) {
      weights[i] = FloatFromBits(words[i]);
    } else {
      WidenPair<kDType>(words[i], weights[2 * i], weights[2 * i + 1]);
    }
  }
  const bool is_zero = !(absmax > 0.0f);  // or NaN
  if constexpr (kDType != kFloat16) absmax = BringIntoRange(absmax, weights);
  const Reciprocal reciprocal = RefineReciprocal(absmax, ApproximateReciprocal(absmax));
#pragma unroll
  for (uint32_t i = 0; i < kGroup<kDType> / 8; ++i) {
    codes[i] = EncodeWord<kQuantType>(weights + 8 * i, reciprocal, lane_threshold);
    if (is_zero) codes[i] = kZeroCodes<kQuantType>;
  }
}

// Stores the codes of the first num_left weights of a group.
template <uint32_t kNumWords, bool kWhole>
__device__ __forceinline__ void StoreCodes(uint8_t* to, int32_t num_left,
                                           const uint32_t (&codes)[kNumWords]) {
  if constexpr (kWhole) {
    if (num_left > 0) StoreOnce<4 * kNumWords>(to, codes);
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(kNumWords); ++i) {
      const int32_t num_bytes = (num_left - 8 * i + 1) / 2;
      if (num_left <= 8 * i) continue;
      // Behind the codes is a gap.
      const uint32_t word = num_bytes < 4 ? codes[i] & ((1u << 8 * num_bytes) - 1) : codes[i];
      StoreOnce<4>(to + 4 * i, &word);
    }
  }
}

}  // namespace nf4tensor::cuda
