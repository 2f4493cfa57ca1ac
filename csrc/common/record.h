// The record: where a row keeps its codes, scales and segments, and how a scale is decoded. The
// only C++ copy of these facts (their Python copies are nf4tensor/format/spec.py and layout.py). No
// torch here; CUDA may include it.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/codebook.h"

#ifdef __CUDACC__
#define NF4TENSOR_HOST_DEVICE __host__ __device__
#else
#define NF4TENSOR_HOST_DEVICE
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

namespace nf4tensor {

enum class ScaleKind : int32_t { kFloat32 = 0, kSquare8 = 1, kDynamic8 = 2 };

inline constexpr int64_t kMinBlockSize = 16;
inline constexpr int64_t kMaxBlockSize = 4096;
inline constexpr uint32_t kNanBits =
    0x7FC00000u;  // what a block or segment with a non-finite weight stores

NF4TENSOR_HOST_DEVICE constexpr int64_t CeilDiv(int64_t numerator, int64_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

NF4TENSOR_HOST_DEVICE constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// The geometry of one row; offsets and sizes in bytes unless they count something.
struct RecordSpec {
  int64_t in_features;
  int64_t block_size;
  ScaleKind scale_kind;
  int64_t segment_length;  // blocks; 0 for float32 scales
  int64_t num_segments;    // 0 for float32 scales
  QuantType quant_type;

  NF4TENSOR_HOST_DEVICE constexpr bool has_segments() const {
    return scale_kind != ScaleKind::kFloat32;
  }
  NF4TENSOR_HOST_DEVICE constexpr int64_t num_blocks() const {
    return CeilDiv(in_features, block_size);
  }
  NF4TENSOR_HOST_DEVICE constexpr int64_t codes_bytes() const { return CeilDiv(in_features, 2); }
  NF4TENSOR_HOST_DEVICE constexpr int64_t scales_offset() const {
    return RoundUp(codes_bytes(), 4);
  }
  NF4TENSOR_HOST_DEVICE constexpr int64_t scales_end() const {
    return scales_offset() + num_blocks() * (has_segments() ? 1 : 4);
  }
  // The phase is here, the pairs follow.
  NF4TENSOR_HOST_DEVICE constexpr int64_t segments_offset() const {
    return RoundUp(scales_end(), 8);
  }
  NF4TENSOR_HOST_DEVICE constexpr int64_t pair_offset(int64_t segment) const {
    return segments_offset() + 8 + 8 * segment;
  }
  NF4TENSOR_HOST_DEVICE constexpr int64_t end() const {
    return has_segments() ? pair_offset(num_segments) : scales_end();
  }
  NF4TENSOR_HOST_DEVICE constexpr int64_t pitch() const { return RoundUp(end(), 32); }
};

// What the scales of a segment are decoded with.
struct SegmentPair {
  float step;
  float base;
};

// A record's base has no alignment: every typed access is a copy.
template <typename T>
NF4TENSOR_HOST_DEVICE inline T Load(const void* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
NF4TENSOR_HOST_DEVICE inline void Store(void* to, const T& value) {
  memcpy(to, &value, sizeof(T));
}

NF4TENSOR_HOST_DEVICE inline float FloatFromBits(uint32_t bits) { return Load<float>(&bits); }
NF4TENSOR_HOST_DEVICE inline uint32_t BitsFromFloat(float value) { return Load<uint32_t>(&value); }

// fl(fl(level * step) + base): two roundings, never fused.
NF4TENSOR_HOST_DEVICE inline float DecodeScale(float level, SegmentPair pair) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(__fmul_rn(level, pair.step), pair.base);
#else
  return level * pair.step + pair.base;  // built with -ffp-contract=off
#endif
}

// What a square8 scale byte multiplies the step by: exact in float32.
NF4TENSOR_HOST_DEVICE inline float SquareLevel(uint8_t q) {
  return static_cast<float>(int32_t{q} * q);
}

NF4TENSOR_HOST_DEVICE inline int64_t LoadPhase(const RecordSpec& spec, const uint8_t* row) {
  return spec.has_segments() ? Load<uint32_t>(row + spec.segments_offset()) : 0;
}

// The segment of a block. A phase that no file reader accepts stays inside the row all the same.
NF4TENSOR_HOST_DEVICE inline int64_t SegmentOfBlock(const RecordSpec& spec, int64_t phase,
                                                    int64_t block) {
  if (spec.num_segments == 1) return 0;
  const int64_t segment = (phase + block) / spec.segment_length;
  return segment < spec.num_segments ? segment : spec.num_segments - 1;
}

// The first block of a segment, at most num_blocks; a row may start in the middle of one.
NF4TENSOR_HOST_DEVICE inline int64_t FirstBlock(const RecordSpec& spec, int64_t phase,
                                                int64_t segment) {
  if (segment >= spec.num_segments) return spec.num_blocks();
  const int64_t block = segment * spec.segment_length - phase;
  return block < 0 ? 0 : block < spec.num_blocks() ? block : spec.num_blocks();
}

namespace {  // each instruction set compiles its own copy of what follows

// Decodes the scales of rows on the host, each row's in order from a block on. Offsets of a spec
// cost a division, so it keeps what it needs of them.
class ScaleReader {
 public:
  explicit ScaleReader(const RecordSpec& spec)
      : spec_(spec),
        num_blocks_(spec.num_blocks()),
        scales_offset_(spec.scales_offset()),
        segments_offset_(spec.segments_offset()) {}

  void StartRow(const uint8_t* row, int64_t first_block) {
    row_ = row;
    block_ = first_block;
    if (!spec_.has_segments()) return;
    phase_ = Load<uint32_t>(row + segments_offset_);
    const bool is_first = phase_ + first_block < spec_.segment_length;
    EnterSegment(is_first ? 0 : SegmentOfBlock(spec_, phase_, first_block));
  }

  // The next `count` scales, of the blocks that the row still has.
  void Read(float* scales, int64_t count) {
    if (!spec_.has_segments()) {
      memcpy(scales, row_ + scales_offset_ + 4 * block_, 4 * count);
      block_ += count;
      return;
    }
    for (const float* const end = scales + count; scales < end;) {
      if (block_ == segment_end_) EnterSegment(segment_ + 1);
      const int64_t left = segment_end_ - block_;
      const int64_t num = left < end - scales ? left : end - scales;
      DecodeScales(row_ + scales_offset_ + block_, num, scales);
      block_ += num;
      scales += num;
    }
  }

 private:
  void DecodeScales(const uint8_t* q, int64_t count, float* scales) const {
    const SegmentPair pair = pair_;
    if (spec_.scale_kind == ScaleKind::kSquare8) {
      for (int64_t i = 0; i < count; ++i) scales[i] = DecodeScale(SquareLevel(q[i]), pair);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        scales[i] = DecodeScale(FloatFromBits(kDynamicMapBits[q[i]]), pair);
      }
    }
  }

  void EnterSegment(int64_t segment) {
    segment_ = segment;
    const int64_t end = (segment + 1) * spec_.segment_length - phase_;
    segment_end_ = segment + 1 < spec_.num_segments && end < num_blocks_ ? end : num_blocks_;
    pair_ = Load<SegmentPair>(row_ + segments_offset_ + 8 + 8 * segment);
  }

  const RecordSpec spec_;
  const int64_t num_blocks_;
  const int64_t scales_offset_;
  const int64_t segments_offset_;
  const uint8_t* row_ = nullptr;
  SegmentPair pair_{};
  int64_t phase_ = 0;
  int64_t segment_ = 0;
  int64_t segment_end_ = 0;
  int64_t block_ = 0;
};

}  // namespace
}  // namespace nf4tensor
