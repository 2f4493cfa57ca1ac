// How the blocks of a product with few inputs divide their work, and how they bring inputs to
// shared memory. For linear.cu only.
#pragma once

#include "cuda/device.h"

namespace nf4tensor::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kTileInputs = 8;
inline constexpr int kPieceColumns = 8;  // a word of codes, 16 bytes of an input
inline constexpr int kLinearWarps = 8;
inline constexpr int kLinearThreads = kLinearWarps * static_cast<int>(kWarpThreads);

// How a block divides its work: kSplits warps share 16 rows and split their columns, a chunk for
// each in turn; the chunks of one turn are a slab, whose inputs the block has in shared memory.
// From there a lane loads 16 bytes without conflicts, 4 wavefronts a warp; straight from where the
// inputs lie, 128 bytes apart, they were 32.
//
// kTiles: of inputs. kPieces: of a lane in a chunk.
template <int kTiles, int kPieces>
struct BlockShape {
  // The more inputs, the more rows must share them: a block loads kInputs / kRows of a weight.
  static constexpr int kSplits = kTiles == 1 ? 8 : kTiles == 8 ? 2 : 4;
  static constexpr int kRows = kLinearWarps / kSplits * kTileRows;
  static constexpr int kInputs = kTiles * kTileInputs;
  // 64 inputs and what is loaded ahead need more registers than two blocks have.
  static constexpr int kBlocksAtOnce = kTiles == 8 ? 1 : 2;
  static constexpr int kLaneColumns = kPieces * kPieceColumns;
  static constexpr int kChunkColumns = 4 * kLaneColumns;
  static constexpr int kSlabColumns = kSplits * kChunkColumns;
  static constexpr int kSlabUnits = kSlabColumns / kPieceColumns;  // of 16 bytes, of one input
  // As many threads as there are for each input bring it to shared memory.
  static constexpr int kCopyThreads = kLinearThreads / kInputs;
  static constexpr int kCopies = kSlabUnits / kCopyThreads;
  // Units in shared memory: [split][piece][input][lane % 4]. Warps read 512 bytes in a row; the gap
  // behind each piece spreads what eight lanes write over all banks.
  static constexpr int kGap = (kCopyThreads < 8 ? kCopyThreads : 8) / kPieces;
  static constexpr int kPiecePitch = 4 * kInputs + kGap;
  static constexpr int kStageUnits = kSplits * kPieces * kPiecePitch;

  // Where a unit of the first input lies there.
  __host__ __device__ static constexpr int Place(int unit) {
    const int piece = unit % kPieces;
    const int lane = unit / kPieces % 4;
    const int split = unit / kPieces / 4;
    return (split * kPieces + piece) * kPiecePitch + lane;
  }
};

// A thread's part in bringing inputs to shared memory: every kCopyThreads-th unit of one of them.
template <int kTiles, int kPieces>
class InputCopier {
  using Shape = BlockShape<kTiles, kPieces>;

 public:
  // first: the first input of the block. Inputs past num_inputs and columns past num_columns are
  // not there, and stay what they were: no sum that counts has them.
  __device__ __forceinline__ InputCopier(const uint8_t* first, uint32_t num_inputs,
                                         uint32_t in_features, uint32_t num_columns) {
    const uint32_t unit = threadIdx.x % Shape::kCopyThreads;
    const uint32_t input = threadIdx.x / Shape::kCopyThreads;
    to_ = Shape::Place(unit) + 4 * input;
    from_ = reinterpret_cast<const uint4*>(first + uint64_t{2} * input * in_features) + unit;
    units_left_ = input < num_inputs ? static_cast<int>(num_columns / kPieceColumns - unit) : 0;
  }

  // The next slab.
  __device__ __forceinline__ void Load(uint4 (&values)[Shape::kCopies]) {
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      if (i * Shape::kCopyThreads < units_left_) values[i] = __ldg(from_ + i * Shape::kCopyThreads);
    }
    from_ += Shape::kSlabUnits;
    units_left_ -= Shape::kSlabUnits;
  }

  __device__ __forceinline__ void Store(const uint4 (&values)[Shape::kCopies], uint4* stage) const {
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      stage[to_ + Shape::Place(i * Shape::kCopyThreads)] = values[i];
    }
  }

 private:
  const uint4* from_;
  int units_left_;
  uint32_t to_;
};

}  // namespace nf4tensor::cuda
