// The 16 levels of a block, scaled and rounded once, and looked up four codes at a time. Every
// kernel that decodes 16-bit weights goes through here, so all have the same bits.
#pragma once

#include "cuda/rows.h"

namespace nf4tensor::cuda {

// The levels, as an argument of a kernel: the processor multiplies by constants where they are.
struct Codebook {
  float levels[kNumCodes];
};

constexpr Codebook MakeCodebook(QuantType quant_type) {
  Codebook codebook{};
  for (int i = 0; i < kNumCodes; ++i) codebook.levels[i] = Levels(quant_type)[i];
  return codebook;
}

// The low and the high bytes of the 16 weights that a block can have; entry i is byte i.
struct Table {
  uint32_t low[4];
  uint32_t high[4];
};

// Of four levels: fl(level * scale), the first of the two roundings of a weight, then the second.
template <DType kDType, int kQuarter>
__device__ __forceinline__ void FillQuarter(const Codebook& codebook, float scale, Table& table) {
  const float* const levels = codebook.levels + 4 * kQuarter;
  const uint32_t first =
      RoundPair<kDType>(__fmul_rn(levels[0], scale), __fmul_rn(levels[1], scale));
  const uint32_t second =
      RoundPair<kDType>(__fmul_rn(levels[2], scale), __fmul_rn(levels[3], scale));
  table.low[kQuarter] = __byte_perm(first, second, 0x6420);
  table.high[kQuarter] = __byte_perm(first, second, 0x7531);
}

template <DType kDType>
__device__ __forceinline__ Table MakeTable(const Codebook& codebook, float scale) {
  Table table;
  FillQuarter<kDType, 0>(codebook, scale, table);
  FillQuarter<kDType, 1>(codebook, scale, table);
  FillQuarter<kDType, 2>(codebook, scale, table);
  FillQuarter<kDType, 3>(codebook, scale, table);
  return table;
}

// Eight codes, as a record has them, to eight weights in order, two a word.
__device__ __forceinline__ void DecodeWord(const Table& table, uint32_t codes,
                                           uint32_t (&weights)[4]) {
  // Bit 3 of a selector means a sign: it chooses between the two halves of a table instead.
  const uint32_t index = codes & 0x77777777u;
  const uint32_t shifted = codes << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // 255 in byte j where code j is 8 or more: the signs of the nibbles.
    const uint32_t is_upper = PermuteBytes(codes, shifted, i == 0 ? 0x9D8Cu : 0xBFAEu);
    const auto look_up = [&](const uint32_t (&bytes)[4]) {
      const uint32_t lower = PermuteBytes(bytes[0], bytes[1], index >> 16 * i);
      const uint32_t upper = PermuteBytes(bytes[2], bytes[3], index >> 16 * i);
      return (lower & ~is_upper) | (upper & is_upper);
    };
    const uint32_t low = look_up(table.low);
    const uint32_t high = look_up(table.high);
    // The high nibble of a byte comes first.
    weights[2 * i] = PermuteBytes(low, high, 0x4051);
    weights[2 * i + 1] = PermuteBytes(low, high, 0x6273);
  }
}

}  // namespace nf4tensor::cuda
