// The two codebooks, the rule that chooses a code, and the map of bitsandbytes' 8-bit scales: the
// only C++ copy of these facts (their Python copy is nf4tensor/format/codebook.py). Constants and
// arithmetic only: no torch, no memory.
#pragma once

#include <cstdint>

namespace nf4tensor {

enum class QuantType : int32_t { kNf4 = 0, kFp4 = 1 };

inline constexpr int kNumCodes = 16;

inline constexpr float kNf4Levels[kNumCodes] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// The eight magnitudes of FP4 in ascending order, and the code of each; a set bit 3 negates.
inline constexpr int kNumFp4Magnitudes = 8;
inline constexpr float kFp4Magnitudes[kNumFp4Magnitudes] = {
    0.0f, 0.0052083335f, 0.16666667f, 0.25f, 0.33333334f, 0.5f, 0.6666667f, 1.0f,
};
inline constexpr uint8_t kFp4Codes[kNumFp4Magnitudes] = {0, 1, 6, 7, 4, 5, 2, 3};
inline constexpr uint8_t kFp4SignBit = 8;

// The positive half of the map, ascending, as float32 bits. They follow no formula (see
// DynamicMap).
inline constexpr uint32_t kDynamicPositiveBits[128] = {
    0x3513A3B7, 0x365A1A94, 0x370205FF, 0x37B24206, 0x38378034, 0x388AEFB3, 0x38BA1F4B, 0x3923D70B,
    0x398CE705, 0x39C7E283, 0x3A016F01, 0x3A1EECC1, 0x3A3C6A80, 0x3A59E83E, 0x3A7765FF, 0x3AA7EF9D,
    0x3AF1A9FC, 0x3B1DB22D, 0x3B428F5C, 0x3B676C8A, 0x3B8624DD, 0x3B989374, 0x3BAB020D, 0x3BBD70A4,
    0x3BCFDF3B, 0x3BE24DD3, 0x3BF4BC6A, 0x3C039581, 0x3C0CCCCD, 0x3C160418, 0x3C1F3B64, 0x3C3AE148,
    0x3C68F5C3, 0x3C8B851F, 0x3CA28F5D, 0x3CB9999A, 0x3CD0A3D7, 0x3CE7AE15, 0x3CFEB852, 0x3D0AE148,
    0x3D166667, 0x3D21EB85, 0x3D2D70A3, 0x3D38F5C3, 0x3D447AE1, 0x3D500000, 0x3D5B851F, 0x3D670A3D,
    0x3D728F5D, 0x3D7E147B, 0x3D84CCCD, 0x3D8A8F5D, 0x3D9051EB, 0x3D96147B, 0x3D9BD70A, 0x3DA1999A,
    0x3DA75C2A, 0x3DAD1EB8, 0x3DB2E148, 0x3DB8A3D7, 0x3DBE6667, 0x3DC428F7, 0x3DC9EB85, 0x3DDB3334,
    0x3DF80000, 0x3E0A6666, 0x3E18CCCD, 0x3E273333, 0x3E35999A, 0x3E440000, 0x3E526666, 0x3E60CCCD,
    0x3E6F3333, 0x3E7D9999, 0x3E860000, 0x3E8D3334, 0x3E946666, 0x3E9B999A, 0x3EA2CCCC, 0x3EAA0000,
    0x3EB13333, 0x3EB86666, 0x3EBF999A, 0x3EC6CCCC, 0x3ECE0000, 0x3ED53333, 0x3EDC6666, 0x3EE3999A,
    0x3EEACCCC, 0x3EF20000, 0x3EF93332, 0x3F003333, 0x3F03CCCC, 0x3F076666, 0x3F0B0000, 0x3F0E999A,
    0x3F123334, 0x3F15CCCD, 0x3F196666, 0x3F1D0000, 0x3F20999A, 0x3F243334, 0x3F27CCCD, 0x3F2B6666,
    0x3F2F0000, 0x3F32999A, 0x3F363334, 0x3F39CCCD, 0x3F3D6666, 0x3F410000, 0x3F44999A, 0x3F483333,
    0x3F4BCCCD, 0x3F4F6666, 0x3F530000, 0x3F56999A, 0x3F5A3333, 0x3F5DCCCD, 0x3F616666, 0x3F650000,
    0x3F68999A, 0x3F6C3333, 0x3F6FCCCD, 0x3F736666, 0x3F770000, 0x3F7A999A, 0x3F7E3333, 0x3F800000,
};

template <typename T, int kSize>
struct Table {
  T values[kSize];
  constexpr const T& operator[](int64_t index) const { return values[index]; }
};

// The levels by code. Codes 0 and 8 of FP4 are both +0.0.
constexpr Table<float, kNumCodes> MakeFp4Levels() {
  Table<float, kNumCodes> levels{};
  for (int rank = 1; rank < kNumFp4Magnitudes; ++rank) {
    levels.values[kFp4Codes[rank]] = kFp4Magnitudes[rank];
    levels.values[kFp4Codes[rank] | kFp4SignBit] = -kFp4Magnitudes[rank];
  }
  return levels;
}

// The midpoints of neighbouring levels, in float32 arithmetic.
template <int kSize>
constexpr Table<float, kSize - 1> MakeThresholds(const float (&levels)[kSize]) {
  Table<float, kSize - 1> thresholds{};
  for (int i = 0; i + 1 < kSize; ++i) thresholds.values[i] = (levels[i] + levels[i + 1]) / 2.0f;
  return thresholds;
}

// The whole map by code: index 127 is zero, index 126 - i mirrors entry i, and 1.0 (index 255) has
// no mirror.
constexpr Table<uint32_t, 256> MakeDynamicMapBits() {
  Table<uint32_t, 256> map{};
  for (int i = 0; i < 128; ++i) map.values[128 + i] = kDynamicPositiveBits[i];
  for (int i = 0; i < 127; ++i) map.values[126 - i] = kDynamicPositiveBits[i] | 0x80000000u;
  return map;
}

inline constexpr auto kFp4Levels = MakeFp4Levels();
inline constexpr auto kNf4Thresholds = MakeThresholds(kNf4Levels);
inline constexpr auto kFp4Thresholds = MakeThresholds(kFp4Magnitudes);
inline constexpr auto kDynamicMapBits = MakeDynamicMapBits();

constexpr const float* Levels(QuantType quant_type) {
  return quant_type == QuantType::kNf4 ? kNf4Levels : kFp4Levels.values;
}

// The code of a zero block, and of an unused nibble.
constexpr uint8_t ZeroCode(QuantType quant_type) { return quant_type == QuantType::kNf4 ? 7 : 0; }

// The code of a weight that was divided by its block's absmax: a tie goes to the lower level.
template <QuantType kQuantType>
constexpr uint8_t Encode(float normalized) {
  int rank = 0;
  if constexpr (kQuantType == QuantType::kNf4) {
    for (const float threshold : kNf4Thresholds.values) rank += normalized > threshold;
    return static_cast<uint8_t>(rank);
  } else {
    const float magnitude = normalized < 0.0f ? -normalized : normalized;
    for (const float threshold : kFp4Thresholds.values) rank += magnitude > threshold;
    const uint8_t sign = normalized < 0.0f && rank > 0 ? kFp4SignBit : 0;
    return static_cast<uint8_t>(kFp4Codes[rank] | sign);
  }
}

static_assert(Encode<QuantType::kNf4>(0.0f) == ZeroCode(QuantType::kNf4));
static_assert(Encode<QuantType::kFp4>(-0.0f) == ZeroCode(QuantType::kFp4));

}  // namespace nf4tensor
