// Products of a weight with few inputs on tensor cores, the weight decoded on its way there.
//
// Tensor cores multiply tiles of 16 rows and 8 inputs, and sum over 16 columns: any 16, if weights
// and inputs agree on them. So a lane takes from its two rows what it can decode with one table
// each, up to 64 columns side by side that lie in one block, and no code moves between lanes.
// Decoding keeps the integer units busiest of all; the counts are in tests/kernels.
#include "cuda/linear_inputs.h"
#include "cuda/tables.h"

namespace nf4tensor::cuda {

inline constexpr uint32_t kTailLaneColumns = 2 * kPieceColumns;
inline constexpr uint32_t kTailColumns = 4 * kTailLaneColumns;

struct LinearProblem {
  RowLayout layout;
  Codebook codebook;
  uint32_t num_rows;
  uint32_t num_inputs;
  uint32_t num_groups;    // of inputs, each with blocks of its own
  const uint8_t* record;  // [num_rows, pitch]
  const uint8_t* input;   // [num_inputs, in_features]
  const uint8_t* bias;    // [num_rows] or null
  uint8_t* output;        // [num_inputs, num_rows]
};

// What a lane needs of a row for a chunk.
template <int kPieces>
struct RowChunk {
  uint32_t codes[kPieces];
  StoredScale scale;
};

template <ScaleKind kKind, int kPieces>
__device__ __forceinline__ void LoadChunk(const RowLayout& layout, const uint8_t* row,
                                          uint32_t column, RowChunk<kPieces>& chunk) {
  const uint8_t* const from = row + column / 2;
  if constexpr (kPieces == 8) {
    LoadSector(from, chunk.codes);
  } else if constexpr (kPieces == 4) {
    const uint4 codes = LoadOnce(from);
    chunk.codes[0] = codes.x;
    chunk.codes[1] = codes.y;
    chunk.codes[2] = codes.z;
    chunk.codes[3] = codes.w;
  } else {
    static_assert(kPieces == 2);
    const uint2 codes = __ldg(reinterpret_cast<const uint2*>(from));
    chunk.codes[0] = codes.x;
    chunk.codes[1] = codes.y;
  }
  chunk.scale = LoadScale<kKind>(layout, row, column >> layout.block_shift);
}

// Adds the products of a lane's pieces, of both its rows, with the inputs: input(piece, tile) gives
// 16 bytes of them. Columns from num_columns on count as zero, whatever their codes and scales.
template <DType kDType, ScaleKind kKind, int kTiles, int kPieces, typename Input>
__device__ __forceinline__ void MultiplyChunk(const Codebook& codebook,
                                              const RowChunk<kPieces> (&chunks)[2],
                                              uint32_t num_columns, Input input,
                                              float (&sums)[kTiles][4]) {
  const Table first = MakeTable<kDType>(codebook, DecodeStored<kKind>(chunks[0].scale));
  const Table second = MakeTable<kDType>(codebook, DecodeStored<kKind>(chunks[1].scale));
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    uint32_t a[4] = {};
    uint32_t b[4] = {};
    if (static_cast<uint32_t>(piece * kPieceColumns) < num_columns) {
      DecodeWord(first, chunks[0].codes[piece], a);
      DecodeWord(second, chunks[1].codes[piece], b);
    }
    // Of a tile a lane has the columns 2 * place + {0, 1, 8, 9}: four of the piece stand there.
    const uint32_t early[4] = {a[0], b[0], a[1], b[1]};
    const uint32_t late[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 x = input(piece, tile);
      MultiplyTile<kDType>(sums[tile], early, {x.x, x.y});
      MultiplyTile<kDType>(sums[tile], late, {x.z, x.w});
    }
  }
}

// The columns from `begin` on, at most kTailColumns: few enough of a lane for blocks of any size.
template <DType kDType, ScaleKind kKind, int kTiles>
__device__ __forceinline__ void MultiplyTail(const LinearProblem& problem,
                                             const uint8_t* const (&rows)[2], uint32_t begin,
                                             uint32_t first_input, float (&sums)[kTiles][4]) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t column = begin + lane % 4 * kTailLaneColumns;
  const uint32_t end = problem.layout.in_features;
  const uint32_t num_columns = column < end ? end - column : 0;
  RowChunk<2> chunks[2] = {};
  if (num_columns > 0) {
    LoadChunk<kKind>(problem.layout, rows[0], column, chunks[0]);
    LoadChunk<kKind>(problem.layout, rows[1], column, chunks[1]);
  }
  const auto input = [&](int piece, int tile) {
    const uint32_t n = first_input + tile * kTileInputs + lane / 4;
    if (n >= problem.num_inputs || static_cast<uint32_t>(piece * kPieceColumns) >= num_columns) {
      return make_uint4(0, 0, 0, 0);
    }
    return __ldg(reinterpret_cast<const uint4*>(problem.input) +
                 (uint64_t{n} * end + column) / kPieceColumns + piece);
  };
  MultiplyChunk<kDType, kKind, kTiles, 2>(problem.codebook, chunks, num_columns, input, sums);
}

// Adds up what the warps of the same rows have, in the order of their numbers, and stores it.
template <DType kDType, int kTiles, int kPieces>
__device__ __forceinline__ void StoreSums(const LinearProblem& problem, uint32_t first_row,
                                          uint32_t first_input, const float* sums) {
  using Shape = BlockShape<kTiles, kPieces>;
  for (uint32_t i = threadIdx.x; i < Shape::kRows * Shape::kInputs; i += kLinearThreads) {
    const uint32_t row = i % Shape::kRows;
    const uint32_t input = i / Shape::kRows;
    if (first_row + row >= problem.num_rows || first_input + input >= problem.num_inputs) continue;
    const uint32_t warp = row / kTileRows * Shape::kSplits;
    const float* const from = sums + (warp * Shape::kInputs + input) * kTileRows + row % kTileRows;
    float sum = from[0];
#pragma unroll
    for (int split = 1; split < Shape::kSplits; ++split) {
      sum = __fadd_rn(sum, from[split * Shape::kInputs * kTileRows]);
    }
    if (problem.bias != nullptr) {
      const uint16_t* const biases = reinterpret_cast<const uint16_t*>(problem.bias);
      float bias, none;
      WidenPair<kDType>(__ldg(biases + first_row + row), bias, none);
      sum = __fadd_rn(sum, bias);
    }
    const uint32_t word = RoundPair<kDType>(sum, 0.0f);
    const uint64_t at = uint64_t{first_input + input} * problem.num_rows + first_row + row;
    reinterpret_cast<uint16_t*>(problem.output)[at] = static_cast<uint16_t>(word);
  }
}

// A block multiplies kRows rows with kInputs inputs; a warp, 16 rows with all of them, over its
// chunks of columns. Lane 4 * group + place has the columns from place * kLaneColumns on of a
// chunk, of the rows `group` and `group + 8`, and of the inputs `group` of every tile.
//
// Inputs lie at multiples of 16 bytes, records at multiples of 32; in_features is a multiple of 8.
template <DType kDType, ScaleKind kKind, int kTiles, int kPieces>
__global__ void __launch_bounds__(kLinearThreads, (BlockShape<kTiles, kPieces>::kBlocksAtOnce))
    MultiplyRows(const LinearProblem problem) {
  using Shape = BlockShape<kTiles, kPieces>;
  __shared__ union {
    uint4 inputs[Shape::kStageUnits];
    float sums[kLinearWarps * Shape::kInputs * kTileRows];
  } shared;
  const RowLayout& layout = problem.layout;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  const uint32_t split = warp % Shape::kSplits;
  const uint32_t first_row = blockIdx.x / problem.num_groups * Shape::kRows;
  const uint32_t first_input = blockIdx.x % problem.num_groups * Shape::kInputs;
  // Of whole chunks; what remains is the tail.
  const uint32_t end_column = layout.in_features / Shape::kChunkColumns * Shape::kChunkColumns;

  const uint8_t* const first_record = problem.record + uint64_t{first_row} * layout.pitch;
  const uint8_t* rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t row = warp / Shape::kSplits * kTileRows + lane / 4 + 8 * i;
    // Past the last row comes the last one again; nobody stores it.
    const uint32_t last = problem.num_rows - 1 - first_row;
    rows[i] = first_record + (row < last ? row : last) * layout.pitch;
  }
  InputCopier<kTiles, kPieces> copier(
      problem.input + uint64_t{2} * first_input * layout.in_features,
      problem.num_inputs - first_input, layout.in_features, end_column);
  const uint4* const my_inputs = shared.inputs + split * kPieces * Shape::kPiecePitch + lane;
  float sums[kTiles][4] = {};

  uint32_t chunk = split * Shape::kChunkColumns;
  const uint32_t lane_column = lane % 4 * Shape::kLaneColumns;
  RowChunk<kPieces> next[2];
  uint4 inputs[Shape::kCopies];
  if (chunk < end_column) {
    LoadChunk<kKind>(layout, rows[0], chunk + lane_column, next[0]);
    LoadChunk<kKind>(layout, rows[1], chunk + lane_column, next[1]);
  }
  copier.Load(inputs);
  for (uint32_t slab = 0; slab < end_column; slab += Shape::kSlabColumns) {
    copier.Store(inputs, shared.inputs);
    __syncthreads();
    const RowChunk<kPieces> now[2] = {next[0], next[1]};
    const bool has_chunk = chunk < end_column;
    chunk += Shape::kSlabColumns;
    if (chunk < end_column) {
      LoadChunk<kKind>(layout, rows[0], chunk + lane_column, next[0]);
      LoadChunk<kKind>(layout, rows[1], chunk + lane_column, next[1]);
    }
    copier.Load(inputs);
    if (has_chunk) {
      const auto input = [&](int piece, int tile) {
        return my_inputs[piece * Shape::kPiecePitch + tile * 4 * kTileInputs];
      };
      MultiplyChunk<kDType, kKind, kTiles, kPieces>(problem.codebook, now, Shape::kLaneColumns,
                                                    input, sums);
    }
    __syncthreads();
  }
  // The last warps of a row's have the fewest chunks.
  for (uint32_t begin = end_column + (Shape::kSplits - 1 - split) * kTailColumns;
       begin < layout.in_features; begin += Shape::kSplits * kTailColumns) {
    MultiplyTail<kDType, kKind>(problem, rows, begin, first_input, sums);
  }
  float* const my_sums = shared.sums + warp * Shape::kInputs * kTileRows;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t input = tile * kTileInputs + lane % 4 * 2 + i % 2;
      my_sums[input * kTileRows + lane / 4 + 8 * (i / 2)] = sums[tile][i];
    }
  }
  __syncthreads();
  StoreSums<kDType, kTiles, kPieces>(problem, first_row, first_input, shared.sums);
}

namespace {

template <DType kDType, ScaleKind kKind, int kTiles, int kPieces>
void LaunchShape(const LinearCall& call, Stream stream) {
  using Shape = BlockShape<kTiles, kPieces>;
  const int64_t num_groups = CeilDiv(call.num_inputs, Shape::kInputs);
  const int64_t num_blocks = CeilDiv(call.num_rows, Shape::kRows) * num_groups;
  const LinearProblem problem{MakeRowLayout(call.spec),
                              MakeCodebook(call.spec.quant_type),
                              static_cast<uint32_t>(call.num_rows),
                              static_cast<uint32_t>(call.num_inputs),
                              static_cast<uint32_t>(num_groups),
                              call.record,
                              call.input,
                              call.bias,
                              call.output};
  Run(MultiplyRows<kDType, kKind, kTiles, kPieces>,
      Launch{static_cast<uint32_t>(num_blocks), kLinearThreads, stream}, problem);
}

template <DType kDType, ScaleKind kKind>
void LaunchKind(const LinearCall& call, Stream stream) {
  const int64_t block_size = call.spec.block_size;
  const int64_t num_inputs = call.num_inputs;
  const bool is_wide = block_size >= 64;
  if (num_inputs <= 8 && is_wide) return LaunchShape<kDType, kKind, 1, 8>(call, stream);
  if (num_inputs <= 16 && is_wide) return LaunchShape<kDType, kKind, 2, 8>(call, stream);
  // The smallest blocks are rare: eight inputs at a time will do.
  if (num_inputs <= 8 || block_size < 32) return LaunchShape<kDType, kKind, 1, 2>(call, stream);
  // 64 inputs at once leave processors idle where rows are few: better to decode twice then.
  const int64_t num_blocks = CeilDiv(call.num_rows, BlockShape<8, 4>::kRows);
  if (num_inputs <= 32 || num_blocks < NumProcessors()) {
    return LaunchShape<kDType, kKind, 4, 4>(call, stream);
  }
  LaunchShape<kDType, kKind, 8, 4>(call, stream);
}

template <DType kDType>
void LaunchDType(const LinearCall& call, Stream stream) {
  switch (call.spec.scale_kind) {
    case ScaleKind::kFloat32:
      return LaunchKind<kDType, ScaleKind::kFloat32>(call, stream);
    case ScaleKind::kSquare8:
      return LaunchKind<kDType, ScaleKind::kSquare8>(call, stream);
    case ScaleKind::kDynamic8:
      return LaunchKind<kDType, ScaleKind::kDynamic8>(call, stream);
  }
}

bool IsAligned(const uint8_t* address, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

int64_t max_fused_inputs = -1;  // or what SetMaxFusedInputs was told

}  // namespace

bool CanFuse(const LinearCall& call) {
  // Offsets of a block's rows and inputs, at most 64 of each, have 32 bits.
  constexpr int64_t kMaxPitch = int64_t{1} << 26;
  constexpr int64_t kMaxColumns = int64_t{1} << 24;
  return call.dtype != kFloat32 && call.spec.in_features % kPieceColumns == 0 &&
         call.spec.pitch() <= kMaxPitch && call.spec.in_features <= kMaxColumns &&
         call.num_rows * call.num_inputs < int64_t{1} << 31 && IsAligned(call.input, 16) &&
         IsAligned(call.record, 32);
}

void SetMaxFusedInputs(int64_t max_inputs) { max_fused_inputs = max_inputs; }

int64_t MaxFusedInputs(const RecordSpec& spec, int64_t num_rows) {
  if (max_fused_inputs >= 0) return max_fused_inputs;
  const int compute_capability = ComputeCapability();
  // Nobody has measured this kernel. These are the crossovers that bitsandbytes 0.50 found for its
  // own, which multiplies 64 rows a block (its backends/cuda/ops.py): where a wave of blocks is not
  // full, and where one, two and three are.
  struct Crossover {
    int compute_capability;
    int64_t num_processors;
    int64_t max_inputs[4];
  };
  constexpr Crossover kCrossovers[] = {
      {80, 108, {16, 64, 64, 128}}, {86, 84, {16, 128, 128, 128}}, {89, 128, {8, 64, 128, 256}},
      {90, 132, {16, 32, 48, 64}},  {100, 148, {8, 8, 8, 32}},     {120, 170, {8, 64, 128, 256}},
  };
  int64_t found = 0;
  for (const Crossover& crossover : kCrossovers) {
    if (crossover.compute_capability > compute_capability) break;
    const int64_t num_waves = CeilDiv(num_rows, 64) / crossover.num_processors;
    found = crossover.max_inputs[num_waves < 3 ? num_waves : 3];
    // A long sum suits the other way, which splits it among blocks.
    if (num_waves == 1 && spec.in_features >= num_rows) found /= 2;
  }
  return found;
}

void LaunchLinear(const LinearCall& call, Stream stream) {
  if (call.num_rows == 0 || call.num_inputs == 0) return;
  if (call.dtype == kBFloat16) {
    LaunchDType<kBFloat16>(call, stream);
  } else {
    LaunchDType<kFloat16>(call, stream);
  }
}

}  // namespace nf4tensor::cuda
