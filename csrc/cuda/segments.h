// The second level of scales: a warp fits a square8 pair to the absmax values of a segment, and
// encodes them.
#pragma once

#include "cuda/groups.h"
#include "cuda/rows.h"

namespace nf4tensor::cuda {

inline constexpr float kMaxSquare = 255.0f * 255.0f;

// The pair for absmax values from lowest to highest, as bits. Zero blocks, which are not in
// `lowest`, have no say.
__device__ __forceinline__ SegmentPair FitPair(uint32_t lowest, uint32_t highest) {
  if (highest == 0) return {0.0f, 0.0f};
  if (highest > kInfinityBits) return {FloatFromBits(kNanBits), FloatFromBits(kNanBits)};
  const float base = FloatFromBits(lowest);
  const float range = __fsub_rn(FloatFromBits(highest), base);
  SegmentPair pair{__fdiv_rn(range, kMaxSquare), base};
  if (BitsFromFloat(DecodeScale(kMaxSquare, pair)) == kInfinityBits) {
    pair.step = FloatFromBits(BitsFromFloat(pair.step) - 1);
  }
  return pair;
}

__device__ __forceinline__ uint8_t EncodeScale(float absmax, const SegmentPair& pair) {
  if (!(absmax > 0.0f && pair.step > 0.0f)) return 0;
  const float root = __fsqrt_rn(__fdiv_rn(__fsub_rn(absmax, pair.base), pair.step));
  return static_cast<uint8_t>(__float2int_rn(fminf(root, 255.0f)));
}

// Writes the pair of a segment, and the scales of its blocks [begin, end).
template <typename AbsMaxOf>
__device__ __forceinline__ void WriteSegment(const RowLayout& layout, uint8_t* record,
                                             uint32_t segment, uint32_t begin, uint32_t end,
                                             AbsMaxOf absmax_of) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint32_t before_lowest = 0xFFFFFFFFu;  // one less, and so the largest for zero
  uint32_t highest = 0;
#pragma unroll 1
  for (uint32_t block = begin + lane; block < end; block += kWarpThreads) {
    const uint32_t bits = BitsFromFloat(absmax_of(block));  // magnitudes order like their bits
    before_lowest = min(before_lowest, bits - 1);
    highest = max(highest, bits);
  }
#pragma unroll
  for (uint32_t i = kWarpThreads / 2; i > 0; i /= 2) {
    before_lowest = min(before_lowest, __shfl_xor_sync(kAllLanes, before_lowest, i));
    highest = max(highest, __shfl_xor_sync(kAllLanes, highest, i));
  }
  const SegmentPair pair = FitPair(before_lowest + 1, highest);
  if (lane == 0) {
    uint8_t* const pairs = record + layout.segments_offset + 8;
    reinterpret_cast<float2*>(pairs)[segment] = {pair.step, pair.base};
  }
#pragma unroll 1
  for (uint32_t block = begin + lane; block < end; block += kWarpThreads) {
    record[layout.scales_offset + block] = EncodeScale(absmax_of(block), pair);
  }
}

}  // namespace nf4tensor::cuda
