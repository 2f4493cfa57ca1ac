// A spec as a thread wants it: 32-bit offsets, divisions by multiplication; and the scale of a
// block.
#pragma once

#include "cuda/device.h"

namespace nf4tensor::cuda {

// n / divisor for n below 2^31, as (high(n * magic) + n) >> shift (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t magic;
  uint32_t shift;
  uint32_t divisor;
};

inline Divider MakeDivider(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t rest = (uint64_t{1} << shift) - divisor;
  return {static_cast<uint32_t>((rest << 32) / divisor + 1), shift, divisor};
}

__device__ __forceinline__ uint32_t Divide(uint32_t n, const Divider& by) {
  return (__umulhi(n, by.magic) + n) >> by.shift;
}

// Sizes and offsets of one row, in bytes unless they count something.
struct RowLayout {
  uint32_t pitch;
  uint32_t in_features;
  uint32_t scales_offset;
  uint32_t segments_offset;
  uint32_t block_shift;  // log2 of the block size
  uint32_t num_segments;
  Divider segment_length;  // where there are several segments
};

// Refuses rows in which the kernels cannot count with 32 bits. No weight comes near.
inline void CheckRowLimits(const RecordSpec& spec) {
  const auto refuse = [](const std::string& what, int64_t limit) {
    throw std::invalid_argument("nf4tensor: " + what + ", and the CUDA kernels take less than " +
                                std::to_string(limit) + ": set NF4TENSOR_BACKEND=reference");
  };
  constexpr int64_t kMaxInFeatures = int64_t{1} << 29;  // 2 GiB as float32
  constexpr int64_t kMaxPitch = int64_t{1} << 32;
  constexpr int64_t kMaxBlocks = int64_t{1} << 31;  // what a Divider divides
  if (spec.in_features >= kMaxInFeatures) {
    refuse("in_features is " + std::to_string(spec.in_features), kMaxInFeatures);
  }
  if (spec.pitch() >= kMaxPitch) {
    refuse("a record has " + std::to_string(spec.pitch()) + " bytes", kMaxPitch);
  }
  if (spec.num_segments > 1 && spec.segment_length > (kMaxBlocks - 1) / (spec.num_segments - 1)) {
    refuse("the last of " + std::to_string(spec.num_segments) + " segments of " +
               std::to_string(spec.segment_length) + " blocks starts too far behind the first",
           kMaxBlocks);
  }
}

inline RowLayout MakeRowLayout(const RecordSpec& spec) {
  CheckRowLimits(spec);
  RowLayout layout{static_cast<uint32_t>(spec.pitch()),
                   static_cast<uint32_t>(spec.in_features),
                   static_cast<uint32_t>(spec.scales_offset()),
                   static_cast<uint32_t>(spec.segments_offset()),
                   0,
                   static_cast<uint32_t>(spec.num_segments),
                   MakeDivider(1)};
  while ((int64_t{1} << layout.block_shift) < spec.block_size) ++layout.block_shift;
  if (spec.num_segments > 1) {
    layout.segment_length = MakeDivider(static_cast<uint32_t>(spec.segment_length));
  }
  return layout;
}

__device__ constexpr auto kDeviceDynamicMapBits = MakeDynamicMapBits();

// What the scale of a block is made of. To load it and to decode it are two steps, so that loads
// can run ahead.
struct StoredScale {
  uint32_t code;  // the bits of a float32 scale, which has no pair
  float2 pair;
};

// Of a block that the row has.
template <ScaleKind kKind>
__device__ __forceinline__ StoredScale LoadScale(const RowLayout& layout, const uint8_t* row,
                                                 uint32_t block) {
  const uint8_t* const scales = row + layout.scales_offset;
  if constexpr (kKind == ScaleKind::kFloat32) {
    return {__ldg(reinterpret_cast<const uint32_t*>(scales) + block), {}};
  } else {
    const uint8_t* const segments = row + layout.segments_offset;
    uint32_t segment = 0;
    if (layout.num_segments > 1) {
      const uint32_t phase = __ldg(reinterpret_cast<const uint32_t*>(segments));
      // No phase leads out of the row, not even one that no file reader accepts. From 2^31 - 1 on,
      // every block is in the last segment.
      const uint32_t last_phase = 0x7FFFFFFFu - block;
      const uint32_t last_segment = layout.num_segments - 1;
      segment = Divide((phase < last_phase ? phase : last_phase) + block, layout.segment_length);
      segment = segment < last_segment ? segment : last_segment;
    }
    return {__ldg(scales + block), __ldg(reinterpret_cast<const float2*>(segments + 8) + segment)};
  }
}

template <ScaleKind kKind>
__device__ __forceinline__ float DecodeStored(const StoredScale& stored) {
  if constexpr (kKind == ScaleKind::kFloat32) {
    return FloatFromBits(stored.code);
  } else {
    const float level = kKind == ScaleKind::kSquare8
                            ? SquareLevel(static_cast<uint8_t>(stored.code))
                            : FloatFromBits(__ldg(kDeviceDynamicMapBits.values + stored.code));
    return DecodeScale(level, {stored.pair.x, stored.pair.y});
  }
}

// The scale of a block, which the row has.
template <ScaleKind kKind>
__device__ __forceinline__ float BlockScale(const RowLayout& layout, const uint8_t* row,
                                            uint32_t block) {
  return DecodeStored<kKind>(LoadScale<kKind>(layout, row, block));
}

}  // namespace nf4tensor::cuda
