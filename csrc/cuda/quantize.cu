// Weights to records on CUDA: one launch for the codes and both levels of scales, which reads each
// weight once.
//
// A thread encodes a group at a time: 32 bytes of weights, all of one block. Rows are counted in
// whole blocks of groups, of which the last may lie behind the row. A block of threads takes some
// short rows at a time, or a long one in windows of whole segments whose absmax values fit into
// shared memory; when the codes of a window are written, its warps write the segments. Only a
// segment of more blocks than fit is read again for the scales of the others.
//
// Kernels with kWhole are for rows of whole groups at multiples of 32 bytes; the others take
// everything else.
#include <algorithm>

#include "cuda/groups.h"
#include "cuda/segments.h"

namespace nf4tensor::cuda {

// Of a block, which has at least as many as the groups of a block of weights.
constexpr uint32_t kMinThreads = 128;
template <DType kDType>
constexpr uint32_t kMaxThreads = kMaxBlockSize / kGroup<kDType>;
constexpr uint32_t kMaxWarps = kMaxThreads<kFloat32> / kWarpThreads;
constexpr uint32_t kThreadsPerProcessor = 1024;

constexpr uint32_t kMaxStaged = 512;            // absmax values of a window in shared memory
constexpr int64_t kMaxRows = int64_t{1} << 30;  // of a launch: sums of row numbers have 32 bits

struct QuantizeArguments {
  RowLayout layout;  // a block wider than the row is as wide as its groups
  uint32_t num_rows;
  uint32_t num_blocks;
  uint32_t scales_end;
  uint32_t end;
  uint32_t group_shift;   // log2 of groups per block
  uint32_t thread_shift;  // log2 of threads per block of them
  uint32_t rows_at_once;
  uint32_t segments_at_once;
  int64_t segment_length;
  Divider groups_per_row;
  Divider segments_per_row;
  bool keep_phase;
};

namespace {

// Which group of a window a thread encodes first. Of several rows, a window has no more groups than
// there are threads.
struct Place {
  uint32_t row;
  uint32_t group;
};

// Some rows, and some segments of each with the blocks that use them.
struct Window {
  const uint8_t* weight;
  uint8_t* record;
  uint32_t num_rows;
  uint32_t segment;
  uint32_t end_segment;
  uint32_t block;
  uint32_t end_block;
  float* staged;  // the absmax values
};

// LargestMagnitudes of all threads of a block of weights. Where that is wider than a warp, all
// threads of a block call it at once.
template <DType kDType>
__device__ __forceinline__ uint32_t LargestOfBlock(uint32_t largest, uint32_t groups_per_block) {
#pragma unroll 1
  for (uint32_t i = min(groups_per_block, kWarpThreads) / 2; i > 0; i /= 2) {
    largest = MaxOrNan<kDType>(largest, __shfl_xor_sync(kAllLanes, largest, i));
  }
  if (groups_per_block > kWarpThreads) {
    __shared__ uint32_t of_warps[kMaxWarps];
    const uint32_t warp = threadIdx.x / kWarpThreads;
    const uint32_t num_warps = groups_per_block / kWarpThreads;
    of_warps[warp] = largest;
    __syncthreads();
    const uint32_t first = warp / num_warps * num_warps;
#pragma unroll 1
    for (uint32_t i = 0; i < num_warps; ++i) {
      largest = MaxOrNan<kDType>(largest, of_warps[first + i]);
    }
    __syncthreads();
  }
  return largest;
}

// Writes the codes of a window, and its absmax values or float32 scales.
template <DType kDType, QuantType kQuantType, bool kWhole>
__device__ __forceinline__ void WriteCodes(const QuantizeArguments& arguments, const Window& window,
                                           const Place& place, float lane_threshold) {
  const RowLayout& layout = arguments.layout;
  const bool has_segments = layout.num_segments > 0;
  const uint32_t groups_per_block = 1u << arguments.group_shift;
  const uint32_t begin = window.block << arguments.group_shift;
  const uint32_t end = window.end_block << arguments.group_shift;
  const uint32_t group = begin + place.group;
  const uint8_t* from =
      window.weight + place.row * layout.in_features * kElementBytes<kDType> + group * kGroupBytes;
  uint8_t* to = window.record + place.row * layout.pitch + group * (kGroup<kDType> / 2);
  const uint32_t end_column =
      place.row < window.num_rows ? min(end * kGroup<kDType>, layout.in_features) : 0;
  int32_t num_left = static_cast<int32_t>(end_column - group * kGroup<kDType>);

  // The first thread of a block of weights puts down its absmax.
  uint32_t block = place.group >> arguments.group_shift;
  const uint32_t most_blocks = has_segments ? kMaxStaged : 0xFFFFFFFFu;
  const uint32_t end_absmax = place.group % groups_per_block == 0 ? most_blocks : 0;

  // Warps without a group have nothing to do, unless others wait for them.
  const uint32_t of_warp = groups_per_block > kWarpThreads ? 0 : threadIdx.x & ~(kWarpThreads - 1);
  const uint32_t num_groups = max(window.num_rows * (end - begin), of_warp) - of_warp;
#pragma unroll 1
  for (uint32_t steps = (num_groups + blockDim.x - 1) >> arguments.thread_shift; steps > 0;
       --steps) {
    uint32_t words[kWords];
    LoadGroup<kDType, kWhole>(from, num_left, words);
    const float absmax =
        AbsMax<kDType>(LargestOfBlock<kDType>(LargestMagnitudes<kDType>(words), groups_per_block));
    if (num_left > 0 && block < end_absmax) {
      if (has_segments) {
        window.staged[place.row * arguments.num_blocks + block] = absmax;
      } else {
        uint8_t* const scales = window.record + place.row * layout.pitch + layout.scales_offset;
        reinterpret_cast<float*>(scales)[block] = absmax;
      }
    }
    uint32_t codes[kGroup<kDType> / 8];
    EncodeGroup<kDType, kQuantType>(words, absmax, lane_threshold, codes);
    StoreCodes<kGroup<kDType> / 8, kWhole>(to, num_left, codes);
    from += blockDim.x * kGroupBytes;
    to += blockDim.x * (kGroup<kDType> / 2);
    num_left -= static_cast<int32_t>(blockDim.x * kGroup<kDType>);
    block += blockDim.x >> arguments.group_shift;
  }
}

__device__ __forceinline__ uint32_t LoadPhase(const QuantizeArguments& arguments,
                                              const uint8_t* record) {
  if (!arguments.keep_phase) return 0;
  return *reinterpret_cast<const uint32_t*>(record + arguments.layout.segments_offset);
}

// As nf4tensor::FirstBlock.
__device__ __forceinline__ uint32_t FirstBlock(const QuantizeArguments& arguments, uint32_t phase,
                                               uint32_t segment) {
  if (segment == 0) return 0;
  if (segment >= arguments.layout.num_segments) return arguments.num_blocks;
  const int64_t block = segment * arguments.segment_length - phase;
  const int64_t most = arguments.num_blocks;
  return static_cast<uint32_t>(block < 0 ? 0 : block < most ? block : most);
}

// The absmax of a block once more, by one thread.
template <DType kDType, bool kWhole>
__device__ __forceinline__ float AbsMaxAgain(const RowLayout& layout, const uint8_t* weight,
                                             uint32_t block) {
  uint32_t largest = 0;
  const uint32_t begin = block << layout.block_shift;
  const uint32_t end = min(begin + (1u << layout.block_shift), layout.in_features);
#pragma unroll 1
  for (uint32_t i = begin; i < end; i += kGroup<kDType>) {
    uint32_t words[kWords];
    LoadGroup<kDType, kWhole>(weight + i * kElementBytes<kDType>, static_cast<int32_t>(end - i),
                              words);
    largest = MaxOrNan<kDType>(largest, LargestMagnitudes<kDType>(words));
  }
  return AbsMax<kDType>(largest);
}

// Spreads the segments of a window over the warps.
template <DType kDType, bool kWhole>
__device__ __forceinline__ void WriteSegments(const QuantizeArguments& arguments,
                                              const Window& window) {
  const RowLayout& layout = arguments.layout;
  const uint32_t num_segments = window.num_rows * (window.end_segment - window.segment);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / kWarpThreads; i < num_segments; i += blockDim.x / kWarpThreads) {
    // Of several rows, a window has all segments.
    const uint32_t row = Divide(i, arguments.segments_per_row);
    const uint32_t segment = window.segment + i - row * arguments.segments_per_row.divisor;
    uint8_t* const record = window.record + row * layout.pitch;
    const uint8_t* const weight = window.weight + row * layout.in_features * kElementBytes<kDType>;
    const uint32_t phase = LoadPhase(arguments, record);
    WriteSegment(layout, record, segment, FirstBlock(arguments, phase, segment),
                 FirstBlock(arguments, phase, segment + 1), [&](uint32_t block) {
                   const uint32_t place = block - window.block;
                   if (place >= kMaxStaged)
                     return AbsMaxAgain<kDType, kWhole>(layout, weight, block);
                   return window.staged[row * arguments.num_blocks + place];
                 });
  }
}

// Writes what no clause gives a meaning, a warp a row: fewer than 32 bytes on either side of the
// pairs.
__device__ __forceinline__ void WriteGaps(const QuantizeArguments& arguments,
                                          const Window& window) {
  const RowLayout& layout = arguments.layout;
  const bool has_segments = layout.num_segments > 0;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t byte = arguments.scales_end + lane;
  const uint32_t end_byte = has_segments ? layout.segments_offset + 8 : layout.pitch;
  const bool is_kept = arguments.keep_phase && byte - layout.segments_offset < 4;
#pragma unroll 1
  for (uint32_t row = threadIdx.x / kWarpThreads; row < window.num_rows;
       row += blockDim.x / kWarpThreads) {
    uint8_t* const record = window.record + row * layout.pitch;
    if (byte < end_byte && !is_kept) record[byte] = 0;
    if (has_segments && arguments.end + lane < layout.pitch) record[arguments.end + lane] = 0;
  }
}

}  // namespace

template <DType kDType, QuantType kQuantType, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads<kDType>, kThreadsPerProcessor / kMaxThreads<kDType>)
    QuantizeRows(const uint8_t* __restrict__ weight, uint8_t* __restrict__ record,
                 const QuantizeArguments arguments) {
  // Two, for warps that have no segment to write go on to the next window.
  __shared__ float staged[2 * kMaxStaged];
  const RowLayout& layout = arguments.layout;
  const bool has_windows = arguments.segments_at_once < layout.num_segments;
  const float lane_threshold = LaneThreshold<kQuantType>();
  Place place{Divide(threadIdx.x, arguments.groups_per_row), 0};
  place.group = threadIdx.x - place.row * arguments.groups_per_row.divisor;

  Window window{};
  window.staged = staged;
  for (uint32_t row = blockIdx.x * arguments.rows_at_once; row < arguments.num_rows;
       row += gridDim.x * arguments.rows_at_once) {
    window.weight = weight + uint64_t{row} * (layout.in_features * kElementBytes<kDType>);
    window.record = record + uint64_t{row} * layout.pitch;
    window.num_rows = min(arguments.num_rows - row, arguments.rows_at_once);
    window.end_segment = 0;
    window.end_block = 0;
    WriteGaps(arguments, window);
    const uint32_t phase = has_windows ? LoadPhase(arguments, window.record) : 0;
    do {
      window.segment = window.end_segment;
      window.block = window.end_block;
      window.end_segment = min(window.segment + arguments.segments_at_once, layout.num_segments);
      window.end_block =
          has_windows ? FirstBlock(arguments, phase, window.end_segment) : arguments.num_blocks;
      WriteCodes<kDType, kQuantType, kWhole>(arguments, window, place, lane_threshold);
      if (layout.num_segments > 0) {
        __syncthreads();
        WriteSegments<kDType, kWhole>(arguments, window);
        window.staged = staged + (window.staged == staged ? kMaxStaged : 0);
      }
    } while (window.end_segment < layout.num_segments);
  }
}

namespace {

using Kernel = void (*)(const uint8_t*, uint8_t*, QuantizeArguments);

template <DType kDType>
Kernel KernelOf(QuantType quant_type, bool is_whole) {
  if (quant_type == QuantType::kNf4) {
    return is_whole ? QuantizeRows<kDType, QuantType::kNf4, true>
                    : QuantizeRows<kDType, QuantType::kNf4, false>;
  }
  return is_whole ? QuantizeRows<kDType, QuantType::kFp4, true>
                  : QuantizeRows<kDType, QuantType::kFp4, false>;
}

Kernel KernelOf(DType dtype, QuantType quant_type, bool is_whole) {
  switch (dtype) {
    case kBFloat16:
      return KernelOf<kBFloat16>(quant_type, is_whole);
    case kFloat16:
      return KernelOf<kFloat16>(quant_type, is_whole);
    default:
      return KernelOf<kFloat32>(quant_type, is_whole);
  }
}

QuantizeArguments MakeArguments(RecordSpec spec, bool keep_phase, int64_t group_size) {
  while (spec.block_size > kMinBlockSize && spec.block_size / 2 >= spec.in_features) {
    spec.block_size /= 2;
  }
  const int64_t groups_per_block = spec.block_size / group_size;
  const int64_t groups_per_row = spec.num_blocks() * groups_per_block;
  const int64_t num_segments = std::max<int64_t>(spec.num_segments, 1);
  const int64_t segment_length = std::max<int64_t>(spec.segment_length, 1);

  QuantizeArguments arguments{};
  arguments.layout = MakeRowLayout(spec);
  arguments.num_blocks = static_cast<uint32_t>(spec.num_blocks());
  arguments.scales_end = static_cast<uint32_t>(spec.scales_end());
  arguments.end = static_cast<uint32_t>(spec.end());
  while (1 << arguments.group_shift < groups_per_block) ++arguments.group_shift;
  const int64_t num_threads = std::max<int64_t>(groups_per_block, kMinThreads);
  while (1 << arguments.thread_shift < num_threads) ++arguments.thread_shift;
  // Offsets in several rows have 32 bits.
  const int64_t rows = std::min(num_threads / groups_per_row, (int64_t{1} << 31) / spec.pitch());
  arguments.rows_at_once = static_cast<uint32_t>(std::max<int64_t>(rows, 1));
  const int64_t segments =
      spec.num_blocks() <= kMaxStaged ? num_segments : kMaxStaged / segment_length;
  arguments.segments_at_once = static_cast<uint32_t>(std::max<int64_t>(segments, 1));
  arguments.segment_length = spec.segment_length;
  arguments.groups_per_row = MakeDivider(static_cast<uint32_t>(groups_per_row));
  arguments.segments_per_row = MakeDivider(static_cast<uint32_t>(num_segments));
  arguments.keep_phase = keep_phase && spec.has_segments();
  return arguments;
}

}  // namespace

void LaunchQuantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* weight,
                    bool keep_phase, uint8_t* record, Stream stream) {
  const int64_t row_bytes = spec.in_features * ElementBytes(dtype);
  const uint64_t places = reinterpret_cast<uintptr_t>(weight) | static_cast<uint64_t>(row_bytes);
  const Kernel kernel = KernelOf(dtype, spec.quant_type, places % kGroupBytes == 0);
  QuantizeArguments arguments = MakeArguments(spec, keep_phase, kGroupBytes / ElementBytes(dtype));
  const uint32_t num_threads = 1u << arguments.thread_shift;
  const int64_t max_blocks = int64_t{NumProcessors()} * (kThreadsPerProcessor / num_threads);
  for (int64_t row = 0; row < num_rows; row += kMaxRows) {
    const int64_t rows_left = std::min(num_rows - row, kMaxRows);
    arguments.num_rows = static_cast<uint32_t>(rows_left);
    const int64_t blocks = std::min(CeilDiv(rows_left, arguments.rows_at_once), max_blocks);
    Run(kernel, Launch{static_cast<uint32_t>(blocks), num_threads, stream},
        weight + row * row_bytes, record + row * spec.pitch(), arguments);
  }
}

}  // namespace nf4tensor::cuda
