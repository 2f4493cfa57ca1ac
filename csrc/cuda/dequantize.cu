// Records to weights on CUDA: one launch for the codes and both levels of scales.
//
// A thread decodes a group: the 32 weights of one 16-byte load of codes. Groups are counted in
// pairs of 64 weights, so that two neighbouring lanes of a warp have neighbouring groups; the
// second group of a row's last pair may lie behind the row. How a warp spreads its stores is its
// Mapping (kernels.h).
//
// Kernels with kWhole are for rows of a multiple of 64 weights, of blocks of 32 and more where
// tables are made of them, to an output at a multiple of 32 bytes: it is one run of groups, and
// there is nothing to check. The others take everything else.
#include <algorithm>

#include "cuda/tables.h"

namespace nf4tensor::cuda {

constexpr uint32_t kGroup = 32;
constexpr uint32_t kThreads = 256;
constexpr int64_t kMaxGroups = int64_t{1} << 30;  // of a launch: a Divider wants fewer than 2^31

// A __grid_constant__ of its kernels: else threads copied all of it before they index its levels.
struct DequantizeArguments {
  RowLayout layout;
  Codebook codebook;
  Divider groups_per_row;
  uint32_t num_groups;
  bool is_aligned;  // every row of the output is at a multiple of 16 bytes
};

namespace {

template <int kBlocks>
struct Group {
  uint32_t index;
  uint32_t row;
  uint32_t column;
  uint32_t words[4];  // eight codes each
  float scales[kBlocks];
};

// The group of this thread, in a block whose threads have groups from `first` on.
template <ScaleKind kScaleKind, bool kWhole, int kBlocks>
__device__ __forceinline__ Group<kBlocks> LoadGroup(const uint8_t* record, uint32_t first,
                                                    const DequantizeArguments& arguments) {
  const RowLayout& layout = arguments.layout;
  Group<kBlocks> group;
  // Threads behind the end do the last pair once more: warps are whole when they shuffle.
  const uint32_t last_index = arguments.num_groups - 2 + threadIdx.x % 2;
  const uint32_t index = first + threadIdx.x;
  group.index = index < last_index ? index : last_index;
  group.row = Divide(group.index, arguments.groups_per_row);
  group.column = (group.index - group.row * arguments.groups_per_row.divisor) * kGroup;

  // Behind the codes of a row are other bytes of it: its pitch is a multiple of 32, a pair's codes.
  const uint8_t* const row = record + uint64_t{group.row} * layout.pitch;
  const uint4 codes = LoadOnce(row + group.column / 2);
  group.words[0] = codes.x;
  group.words[1] = codes.y;
  group.words[2] = codes.z;
  group.words[3] = codes.w;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    // The last block stands in for those that would be behind it.
    const uint32_t last = layout.in_features - 1;
    const uint32_t start = group.column + i * (kGroup / kBlocks);
    const uint32_t block = (kWhole || start <= last ? start : last) >> layout.block_shift;
    group.scales[i] = BlockScale<kScaleKind>(layout, row, block);
  }
  return group;
}

// The place of an element of a group's row in the output, counted from the group's first.
template <int kElementBytes, bool kWhole, int kBlocks>
__device__ __forceinline__ uint8_t* PlaceOf(const Group<kBlocks>& group, int32_t element,
                                            const DequantizeArguments& arguments, uint8_t* out) {
  const uint64_t start = kWhole ? uint64_t{group.index} * kGroup
                                : uint64_t{group.row} * arguments.layout.in_features + group.column;
  return out + start * kElementBytes + int64_t{element} * kElementBytes;
}

// Stores the first num_left elements of 16 bytes, if there are so many.
template <int kElementBytes>
__device__ __forceinline__ void StorePiece(uint8_t* to, const uint32_t* words, int32_t num_left,
                                           bool is_aligned) {
  if (is_aligned) {
    if (num_left > 0) StoreOnce<16>(to, words);
  } else {
#pragma unroll
    for (int i = 0; i < 16 / kElementBytes; ++i) {
      const uint32_t word = kElementBytes == 4 ? words[i] : words[i / 2] >> 16 * (i % 2);
      if (num_left > i) StoreOnce<kElementBytes>(to + i * kElementBytes, &word);
    }
  }
}

// Of the eight words of a pair of lanes, the even lane gets the even ones, the odd lane the others.
__device__ __forceinline__ void SwapWords(bool is_odd, uint32_t (&words)[4]) {
  const uint32_t first = __shfl_xor_sync(kAllLanes, is_odd ? words[0] : words[1], 1);
  const uint32_t second = __shfl_xor_sync(kAllLanes, is_odd ? words[2] : words[3], 1);
  const uint32_t swapped[4] = {is_odd ? first : words[0], is_odd ? second : words[2],
                               is_odd ? words[1] : first, is_odd ? words[3] : second};
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = swapped[i];
}

// Of each of the eight words of a pair of lanes, the even lane gets the first four codes, the odd
// lane the others; two by two in the words that they make.
__device__ __forceinline__ void SplitWords(bool is_odd, uint32_t (&words)[4]) {
  const uint32_t low_halves = 0x5410;
  const uint32_t high_halves = 0x7632;
  uint32_t kept[2];
  uint32_t taken[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = __byte_perm(words[2 * i], words[2 * i + 1], low_halves);
    const uint32_t high = __byte_perm(words[2 * i], words[2 * i + 1], high_halves);
    kept[i] = is_odd ? high : low;
    taken[i] = __shfl_xor_sync(kAllLanes, is_odd ? low : high, 1);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = is_odd ? taken[i] : kept[i];
    words[2 + i] = is_odd ? kept[i] : taken[i];
  }
}

// The scales of the quarters of a pair's 64 weights.
__device__ __forceinline__ void ShareScales(bool is_odd, const float (&own)[2],
                                            float (&scales)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(kAllLanes, own[i], 1);
    scales[i] = is_odd ? other : own[i];
    scales[2 + i] = is_odd ? own[i] : other;
  }
}

}  // namespace

// bfloat16 and float16, by a table of the 16 weights of a block.
template <DType kDType, ScaleKind kScaleKind, Mapping kMapping, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    Dequantize16(const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                 const __grid_constant__ DequantizeArguments arguments) {
  constexpr bool kIsPair = kMapping == Mapping::kPair;
  constexpr int kBlocks = kWhole || kIsPair ? 1 : 2;
  const bool is_odd = threadIdx.x % 2 != 0;
  for (uint32_t first = blockIdx.x * kThreads; first < arguments.num_groups;
       first += gridDim.x * kThreads) {
    auto group = LoadGroup<kScaleKind, kWhole, kBlocks>(record, first, arguments);
    if constexpr (kIsPair) SwapWords(is_odd, group.words);
    Table table = MakeTable<kDType>(arguments.codebook, group.scales[0]);

    if constexpr (kMapping == Mapping::kStaged) {
      // Each lane's four pieces in an order that lets eight lanes reach all banks, here and below.
      __shared__ uint4 stage[kThreads * 4];
      const uint32_t lane = threadIdx.x % kWarpThreads;
      uint4* const of_warp = stage + (threadIdx.x - lane) * 4;
      __syncwarp();
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t weights[4];
        DecodeWord(table, group.words[i], weights);
        of_warp[(lane * 4 + lane / 2 % 4) ^ i] =
            make_uint4(weights[0], weights[1], weights[2], weights[3]);
      }
      __syncwarp();
      const uint32_t owner = first + threadIdx.x - lane + lane / 4;
      uint8_t* const to = out + uint64_t{owner} * (kGroup * 2) + lane % 4 * 16;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint4 piece = of_warp[i * 32 + (lane ^ lane / 8)];
        const uint32_t weights[4] = {piece.x, piece.y, piece.z, piece.w};
        if (owner + i * 8 < arguments.num_groups) StoreOnce<16>(to + i * 512, weights);
      }
    } else {
      // The odd lane of a pair starts with the pair's second word, 24 weights before its group.
      const int32_t shift = kIsPair && is_odd ? -24 : 0;
      constexpr int kStep = kIsPair ? 16 : 8;             // weights from word to word
      constexpr int kWords = kWhole && !kIsPair ? 2 : 1;  // of codes to a store
      uint8_t* const to = PlaceOf<2, kWhole>(group, shift, arguments, out);
#pragma unroll
      for (int i = 0; i < 4; i += kWords) {
        if constexpr (kBlocks == 2) {
          if (i == 2) table = MakeTable<kDType>(arguments.codebook, group.scales[1]);
        }
        uint32_t weights[kWords][4];
#pragma unroll
        for (int j = 0; j < kWords; ++j) DecodeWord(table, group.words[i + j], weights[j]);
        if constexpr (kWhole) {
          StoreOnce<16 * kWords>(to + i * kStep * 2, weights[0]);
        } else {
          const uint32_t column = group.column + shift + i * kStep;
          StorePiece<2>(to + i * kStep * 2, weights[0],
                        static_cast<int32_t>(arguments.layout.in_features - column),
                        kIsPair || arguments.is_aligned);
        }
      }
    }
  }
}

// float32, without tables: each lane keeps one level, and the others ask it for it.
template <ScaleKind kScaleKind, Mapping kMapping, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    Dequantize32(const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                 const __grid_constant__ DequantizeArguments arguments) {
  constexpr bool kIsPair = kMapping == Mapping::kPair;
  const bool is_odd = threadIdx.x % 2 != 0;
  const float level = arguments.codebook.levels[threadIdx.x % kNumCodes];
  for (uint32_t first = blockIdx.x * kThreads; first < arguments.num_groups;
       first += gridDim.x * kThreads) {
    auto group = LoadGroup<kScaleKind, kWhole, 2>(record, first, arguments);
    float scales[4] = {group.scales[0], group.scales[0], group.scales[1], group.scales[1]};
    if constexpr (kIsPair) {
      SplitWords(is_odd, group.words);
      ShareScales(is_odd, group.scales, scales);
    }

    // The odd lane of a pair starts with the second half of the pair's first word.
    const int32_t shift = kIsPair && is_odd ? -28 : 0;
    uint8_t* const to = PlaceOf<4, kWhole>(group, shift, arguments, out);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t weights[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        // The high nibble of a byte comes first; lanes `code` and `code` + 16 have the level.
        const float own = __shfl_sync(kAllLanes, level, group.words[i] >> 4 * (j ^ 1));
        weights[j] = BitsFromFloat(__fmul_rn(own, scales[i]));
      }
      if constexpr (!kIsPair) {
        StoreOnce<32>(to + i * 32, weights);
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int32_t offset = 16 * i + 8 * j;
          if constexpr (kWhole) {
            StoreOnce<16>(to + offset * 4, weights + 4 * j);
          } else {
            const uint32_t column = group.column + shift + offset;
            StorePiece<4>(to + offset * 4, weights + 4 * j,
                          static_cast<int32_t>(arguments.layout.in_features - column),
                          arguments.is_aligned);
          }
        }
      }
    }
  }
}

namespace {

using Kernel = void (*)(const uint8_t*, uint8_t*, DequantizeArguments);

DequantizeTuning tuning;

struct Variant {
  Mapping mapping;
  bool is_whole;
};

// The mapping asked for, where there is such a kernel.
Variant VariantOf(const RecordSpec& spec, DType dtype, bool is_aligned, bool is_whole) {
  Mapping mapping = tuning.mapping;
  if (mapping == Mapping::kDefault) {
    mapping = ComputeCapability() >= 100 ? Mapping::kDirect : Mapping::kPair;
  }
  if (dtype == kFloat32) {
    return {is_whole && mapping == Mapping::kDirect ? mapping : Mapping::kPair, is_whole};
  }
  const bool can_pair = spec.block_size >= 2 * kGroup;
  if (!is_whole || spec.block_size < kGroup) {
    return {can_pair && is_aligned ? Mapping::kPair : Mapping::kDirect, false};
  }
  // Blocks of 32 have a table each, so no lane can decode for its neighbour.
  return {mapping == Mapping::kPair && !can_pair ? Mapping::kStaged : mapping, true};
}

template <DType kDType, ScaleKind kScaleKind>
Kernel Kernel16(const Variant& variant) {
  switch (variant.mapping) {
    case Mapping::kStaged:
      return Dequantize16<kDType, kScaleKind, Mapping::kStaged, true>;
    case Mapping::kPair:
      return variant.is_whole ? Dequantize16<kDType, kScaleKind, Mapping::kPair, true>
                              : Dequantize16<kDType, kScaleKind, Mapping::kPair, false>;
    default:
      return variant.is_whole ? Dequantize16<kDType, kScaleKind, Mapping::kDirect, true>
                              : Dequantize16<kDType, kScaleKind, Mapping::kDirect, false>;
  }
}

template <ScaleKind kScaleKind>
Kernel KernelOf(DType dtype, const Variant& variant) {
  if (dtype == kBFloat16) return Kernel16<kBFloat16, kScaleKind>(variant);
  if (dtype == kFloat16) return Kernel16<kFloat16, kScaleKind>(variant);
  if (!variant.is_whole) return Dequantize32<kScaleKind, Mapping::kPair, false>;
  return variant.mapping == Mapping::kPair ? Dequantize32<kScaleKind, Mapping::kPair, true>
                                           : Dequantize32<kScaleKind, Mapping::kDirect, true>;
}

Kernel KernelOf(ScaleKind scale_kind, DType dtype, const Variant& variant) {
  switch (scale_kind) {
    case ScaleKind::kFloat32:
      return KernelOf<ScaleKind::kFloat32>(dtype, variant);
    case ScaleKind::kSquare8:
      return KernelOf<ScaleKind::kSquare8>(dtype, variant);
    default:
      return KernelOf<ScaleKind::kDynamic8>(dtype, variant);
  }
}

}  // namespace

void SetDequantizeTuning(const DequantizeTuning& wanted) { tuning = wanted; }

void LaunchDequantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* record,
                      uint8_t* out, Stream stream) {
  const int64_t row_bytes = spec.in_features * ElementBytes(dtype);
  const int64_t groups_per_row = 2 * CeilDiv(spec.in_features, 2 * kGroup);
  const uint64_t places = reinterpret_cast<uintptr_t>(out) | static_cast<uint64_t>(row_bytes);
  const bool is_aligned = places % 16 == 0;
  const bool is_whole = places % 32 == 0 && spec.in_features % (2 * kGroup) == 0;
  const Kernel kernel =
      KernelOf(spec.scale_kind, dtype, VariantOf(spec, dtype, is_aligned, is_whole));

  DequantizeArguments arguments{MakeRowLayout(spec), MakeCodebook(spec.quant_type),
                                MakeDivider(static_cast<uint32_t>(groups_per_row)), 0, is_aligned};
  const int64_t rows_per_launch = kMaxGroups / groups_per_row;
  for (int64_t row = 0; row < num_rows; row += rows_per_launch) {
    const int64_t num_groups = std::min(rows_per_launch, num_rows - row) * groups_per_row;
    arguments.num_groups = static_cast<uint32_t>(num_groups);
    int64_t blocks = CeilDiv(num_groups, kThreads);
    if (tuning.max_blocks > 0) blocks = std::min(blocks, tuning.max_blocks);
    Run(kernel, Launch{static_cast<uint32_t>(blocks), kThreads, stream},
        record + row * spec.pitch(), out + row * row_bytes, arguments);
  }
}

}  // namespace nf4tensor::cuda
