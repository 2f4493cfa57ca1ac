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

// The same for a codebook that the kernel knows.
template <DType kDType, QuantType kQuantType>
__device__ __forceinline__ Table MakeTable(float scale) {
  constexpr Codebook kCodebook = MakeCodebook(kQuantType);
  return MakeTable<kDType>(kCodebook, scale);
}

// Looks up the four codes in the low 16 bits. A selector of PRMT with bit 3 set gives a sign, so
// `codes` is good for entries below 8, `flipped` (codes ^ 8) for the others, and `halves` selects
// byte i of the first or the second result (4 + i where code i is 8 or more).
__device__ __forceinline__ uint32_t LookUp(const uint32_t (&bytes)[4], uint32_t codes,
                                           uint32_t flipped, uint32_t halves) {
  return __byte_perm(__byte_perm(bytes[0], bytes[1], codes),
                     __byte_perm(bytes[2], bytes[3], flipped), halves);
}

// Eight codes, as a record has them, to eight weights in order, two a word.
__device__ __forceinline__ void DecodeWord(const Table& table, uint32_t codes,
                                           uint32_t (&weights)[4]) {
  const uint32_t flipped = codes ^ 0x88888888u;
  const uint32_t halves = ((codes >> 1) & 0x44444444u) | 0x32103210u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = LookUp(table.low, codes >> 16 * i, flipped >> 16 * i, halves >> 16 * i);
    const uint32_t high = LookUp(table.high, codes >> 16 * i, flipped >> 16 * i, halves >> 16 * i);
    // The high nibble of a byte comes first.
    weights[2 * i] = __byte_perm(low, high, 0x4051);
    weights[2 * i + 1] = __byte_perm(low, high, 0x6273);
  }
}

}  // namespace nf4tensor::cuda
