// Records and weights for native_grid.cpp: pseudo-random, the same on every processor, and full of
// what goes wrong.
#pragma once

#include <vector>

#include "cpu/formats.h"
#include "cpu/kernels.h"

namespace nf4tensor {
namespace {

// SplitMix64 (public domain, Sebastiano Vigna).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(Next() % static_cast<uint64_t>(bound));
  }

  // Of either sign, with an exponent (of 2) from low to high.
  float Normal(int low, int high) {
    const uint32_t exponent = static_cast<uint32_t>(127 + low + Below(high - low + 1));
    return FloatFromBits(static_cast<uint32_t>(Next() & 0x807FFFFFu) | exponent << 23);
  }

 private:
  uint64_t state_;
};

// What a scale, a step or a base can be: mostly a number as models have them.
float AnyScale(Random& random) {
  switch (random.Below(26)) {
    case 0:
      return 0.0f;
    case 1:
      return -0.0f;
    case 2:
      return FloatFromBits(1);  // 2^-149
    case 3:
      return FloatFromBits(static_cast<uint32_t>(random.Below(0x00800000)));  // subnormal
    case 4:
      return FloatFromBits(0x7F800000u | static_cast<uint32_t>(random.Next() & 0x80000000u));
    case 5:
      return FloatFromBits(0x7F800001u + static_cast<uint32_t>(random.Below(0x7FFFFF)));  // NaN
    case 6:
      return FloatFromBits(0xFFC00000u);
    case 7:
      return random.Normal(-126, -110);  // subnormal as bfloat16
    case 8:
      return random.Normal(-30, -10);  // subnormal as float16
    case 9:
      return random.Normal(14, 17);  // around float16's largest
    case 10:
      return random.Normal(125, 127);
    case 11:  // a tie of bfloat16, at the level 1
      return FloatFromBits((BitsFromFloat(random.Normal(-12, 2)) & 0xFFFF0000u) | 0x8000u);
    case 12:  // a tie of float16
      return FloatFromBits((BitsFromFloat(random.Normal(-12, 2)) & 0xFFFFE000u) | 0x1000u);
    default:
      return random.Normal(-12, 2);
  }
}

// A spec with blocks, segments and a phase that depend on the case.
RecordSpec MakeSpec(int64_t in_features, int64_t block_size, ScaleKind scale_kind,
                    QuantType quant_type) {
  RecordSpec spec{in_features, block_size, scale_kind, 0, 0, quant_type};
  if (!spec.has_segments()) return spec;
  constexpr int64_t kScaleBlockSizes[] = {1, 3, 256};
  const int64_t scale_block_size = kScaleBlockSizes[in_features % 3];
  spec.segment_length = CeilDiv(spec.num_blocks(), CeilDiv(spec.num_blocks(), scale_block_size));
  // One segment more than needed leaves room for phases.
  spec.num_segments = CeilDiv(spec.num_blocks(), spec.segment_length) + in_features % 2;
  return spec;
}

void StoreLegalPhase(const RecordSpec& spec, Random& random, uint8_t* row) {
  if (!spec.has_segments()) return;
  const int64_t room = spec.num_segments * spec.segment_length - spec.num_blocks();
  Store(row + spec.segments_offset(), static_cast<uint32_t>(random.Below(room + 1)));
}

// Any bytes, with scales and pairs of every kind.
std::vector<uint8_t> MakeRecords(const RecordSpec& spec, int64_t num_rows, Random& random) {
  std::vector<uint8_t> records(num_rows * spec.pitch());
  for (uint8_t& byte : records) byte = static_cast<uint8_t>(random.Next());
  for (int64_t i = 0; i < num_rows; ++i) {
    uint8_t* const row = records.data() + i * spec.pitch();
    StoreLegalPhase(spec, random, row);
    for (int64_t j = 0; j < spec.num_segments; ++j) {
      Store(row + spec.pair_offset(j), SegmentPair{AnyScale(random), AnyScale(random)});
    }
    for (int64_t j = 0; j < spec.num_blocks() && !spec.has_segments(); ++j) {
      Store(row + spec.scales_offset() + 4 * j, AnyScale(random));
    }
  }
  return records;
}

// A weight of a block of some kind; `first` comes before all others of its block.
float AnyWeight(int64_t kind, bool first, Random& random) {
  const float threshold = kNf4Thresholds[random.Below(kNumCodes - 1)];
  switch (kind) {
    case 0:
      return 0.0f;
    case 1:
      return -0.0f;
    case 2:
      return FloatFromBits(static_cast<uint32_t>(random.Next() & 0x807FFFFFu));  // subnormal
    case 3:
      return first ? FloatFromBits(1) : 0.0f;
    case 4:
      return first ? random.Normal(-8, 8) : 0.0f;
    case 5:
      return first ? 1.0f : threshold;  // a tie
    case 6:
      return first ? -4.0f : 4.0f * kFp4Thresholds[random.Below(kNumFp4Magnitudes - 1)];
    case 7:
      return random.Normal(-26, -12);  // subnormal as float16
    case 8:
      return random.Normal(13, 15);
    default:
      return random.Normal(-8, 0);
  }
}

uint32_t RoundTo(DType dtype, float value) {
  if (dtype == kFloat32) return cpu::Float32::Round(value);
  return dtype == kBFloat16 ? cpu::BFloat16::Round(value) : cpu::Float16::Round(value);
}

// Blocks of every kind; few have a NaN or an infinity, which spoil a whole segment.
std::vector<uint8_t> MakeWeights(const RecordSpec& spec, DType dtype, int64_t num_rows,
                                 Random& random) {
  const int64_t element_bytes = ElementBytes(dtype);
  std::vector<uint8_t> weights(num_rows * spec.in_features * element_bytes);
  for (int64_t i = 0; i < num_rows; ++i) {
    int64_t kind = 0;
    bool spoilt = false;
    for (int64_t j = 0; j < spec.in_features; ++j) {
      const bool first = j % spec.block_size == 0;
      if (first) {
        kind = random.Below(16);
        spoilt = random.Below(40) == 0;
      }
      float value = AnyWeight(kind, first, random);
      if (spoilt && (first || random.Below(64) == 0)) {
        value = FloatFromBits(random.Below(2) == 0 ? 0x7F800000u : 0xFFC00001u);
      }
      const uint32_t bits = RoundTo(dtype, value);
      std::memcpy(weights.data() + (i * spec.in_features + j) * element_bytes, &bits,
                  element_bytes);
    }
  }
  return weights;
}

}  // namespace
}  // namespace nf4tensor
