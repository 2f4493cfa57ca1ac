// How products are cut: into blocks of inputs, which share a decoded weight, then into units of the
// weight, which threads take one by one and decode tile by tile.
//
// A tile is decoded once for all inputs of a block and stays in the second cache. A block of inputs
// is widened to float32 once for all units. Tiles are a few hundred kilobytes; inputs are 4 MB, or
// kMinBlockInputs of them where rows are longer than 170,000 columns.
#include "cpu/products.h"

#include <algorithm>
#include <atomic>

#include "cpu/panels.h"
#include "cpu/workspace.h"
#include "torch_shim.h"

namespace nf4tensor::cpu {
namespace {

constexpr int64_t kMinBlockInputs = 6;
constexpr int64_t kMaxBlockInputs = 192;
constexpr int64_t kMaxBlockFloats = int64_t{1} << 20;  // 4 MB
// Columns of a tile where sums run along rows, and rows where they run across them.
constexpr int64_t kTileColumns = 512;
constexpr int64_t kTileRows = 64;
// One row more than a panel has: panels at multiples of 4 KB would share a set of the first cache.
constexpr int64_t kPanelPitch = (kTileRows + 1) * kPanelWidth;
// Rows of a unit for few inputs, whose tile then fits the first cache.
constexpr int64_t kFewInputs = 8;
constexpr int64_t kFewRows = kTileRowStep;
// Fewer weights times inputs cost less than another thread.
constexpr int64_t kGrainProducts = 1 << 16;

// Inputs of each block: as many as fit, evenly.
int64_t BlockInputs(int64_t num_inputs, int64_t length) {
  const int64_t fitting = std::clamp<int64_t>(kMaxBlockFloats / RoundUp(length, kPanelWidth),
                                              kMinBlockInputs, kMaxBlockInputs);
  return CeilDiv(num_inputs, CeilDiv(num_inputs, fitting));
}

int64_t NumWorkers(const Weight& weight, int64_t num_inputs, int64_t num_units) {
  const int64_t products = weight.num_rows * weight.spec.in_features * num_inputs;
  return std::clamp<int64_t>(std::min(num_units, products / kGrainProducts), 1, NumThreads());
}

// Calls body(worker, unit) for every unit: each worker takes the next one when it is done.
template <typename Body>
void ForEachUnit(int64_t num_workers, int64_t num_units, Body body) {
  std::atomic<int64_t> next{0};
  ParallelFor(num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t unit = next++; unit < num_units; unit = next++) body(worker, unit);
    }
  });
}

// Columns [first, last) of inputs of some length, widened to float32 in tiles: `width` columns of
// all inputs are together, filled up with zeros to a panel.
class Inputs {
 public:
  Inputs(const Weight& weight, int64_t num_inputs, int64_t length, int64_t first, int64_t last,
         int64_t width)
      : weight_(weight),
        num_inputs_(num_inputs),
        length_(length),
        first_(first),
        last_(last),
        width_(width) {}

  int64_t num_floats() const { return num_inputs_ * RoundUp(last_ - first_, kPanelWidth); }
  int64_t num_tiles() const { return CeilDiv(last_ - first_, width_); }
  int64_t begin(int64_t tile) const { return first_ + tile * width_; }
  int64_t end(int64_t tile) const { return std::min(begin(tile) + width_, last_); }
  int64_t pitch(int64_t tile) const { return RoundUp(end(tile) - begin(tile), kPanelWidth); }
  const float* operator[](int64_t tile) const { return floats_ + tile * width_ * num_inputs_; }

  void Load(const uint8_t* input, float* floats) {
    floats_ = floats;
    const auto widen = weight_.kernels.widen[weight_.dtype];
    const int64_t grain = std::max<int64_t>(1, kGrainProducts / length_);
    ParallelFor(num_inputs_, grain, [&](int64_t first, int64_t last) {
      for (int64_t m = first; m < last; ++m) {
        for (int64_t tile = 0; tile < num_tiles(); ++tile) {
          const int64_t count = end(tile) - begin(tile);
          float* to = floats + tile * width_ * num_inputs_ + m * pitch(tile);
          widen(count, input + (m * length_ + begin(tile)) * weight_.element_bytes, to);
          std::fill(to + count, to + pitch(tile), 0.0f);
        }
      }
    });
  }

 private:
  const Weight& weight_;
  int64_t num_inputs_;
  int64_t length_;
  int64_t first_;
  int64_t last_;
  int64_t width_;
  const float* floats_ = nullptr;
};

// Rows [first_row, first_row + num_rows) of W, and what their products go to.
struct Unit {
  int64_t first_row;
  int64_t num_rows;
  int64_t padded_rows;  // a multiple of kTileRowStep: the pitch of sums
  const uint8_t* record;
};

Unit UnitOf(const Weight& weight, int64_t index, int64_t unit_rows) {
  const int64_t first = index * unit_rows;
  const int64_t num_rows = std::min(unit_rows, weight.num_rows - first);
  return {first, num_rows, RoundUp(num_rows, kTileRowStep),
          weight.record + first * weight.spec.pitch()};
}

// Adds the products of tiles [0, inputs.num_tiles()) of a unit to its sums.
void AddTiles(const Weight& weight, const Unit& unit, int64_t num_inputs, const Inputs& inputs,
              float* tile, float* sums) {
  for (int64_t t = 0; t < inputs.num_tiles(); ++t) {
    const int64_t pitch = inputs.pitch(t);
    weight.kernels.decode_tile[weight.dtype](weight.spec, unit.num_rows, inputs.begin(t),
                                             inputs.end(t), unit.record, {pitch, kPanelWidth},
                                             tile);
    std::fill(tile + unit.num_rows * pitch, tile + unit.padded_rows * pitch, 0.0f);
    weight.kernels.multiply_transposed(num_inputs, unit.padded_rows, pitch, pitch, inputs[t], tile,
                                       sums, unit.padded_rows);
  }
}

// Adds the bias to sums and rounds them to the output [num_inputs, weight.num_rows].
void WriteUnit(const Weight& weight, const Unit& unit, int64_t num_inputs, float* sums,
               const uint8_t* bias, uint8_t* output) {
  float widened[kTileRows] = {};
  if (bias != nullptr) {
    weight.kernels.widen[weight.dtype](unit.num_rows, bias + unit.first_row * weight.element_bytes,
                                       widened);
  }
  for (int64_t m = 0; m < num_inputs; ++m) {
    float* const row = sums + m * unit.padded_rows;
    for (int64_t n = 0; n < unit.num_rows; ++n) row[n] += widened[n];
    weight.kernels.narrow[weight.dtype](
        unit.num_rows, row, output + (m * weight.num_rows + unit.first_row) * weight.element_bytes);
  }
}

void MultiplyBlockByTransposed(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                               const uint8_t* bias, uint8_t* output) {
  const int64_t unit_rows = num_inputs <= kFewInputs ? kFewRows : kTileRows;
  const int64_t num_units = CeilDiv(weight.num_rows, unit_rows);
  const int64_t num_workers = NumWorkers(weight, num_inputs, num_units);
  const int64_t num_columns = weight.spec.in_features;
  Inputs inputs(weight, num_inputs, num_columns, 0, num_columns, kTileColumns);
  const int64_t tile_floats = unit_rows * inputs.pitch(0);
  const int64_t sums_floats = num_inputs * unit_rows;
  Workspace workspace({inputs.num_floats(), num_workers * tile_floats, num_workers * sums_floats});
  inputs.Load(input, workspace.Take(inputs.num_floats()));
  float* const tiles = workspace.Take(num_workers * tile_floats);
  float* const all_sums = workspace.Take(num_workers * sums_floats);

  ForEachUnit(num_workers, num_units, [&](int64_t worker, int64_t index) {
    const Unit unit = UnitOf(weight, index, unit_rows);
    float* const sums = all_sums + worker * sums_floats;
    std::fill_n(sums, num_inputs * unit.padded_rows, 0.0f);
    AddTiles(weight, unit, num_inputs, inputs, tiles + worker * tile_floats, sums);
    WriteUnit(weight, unit, num_inputs, sums, bias, output);
  });
}

// The same for few inputs: no tiles but for the last columns.
void DotBlock(const Weight& weight, int64_t num_inputs, const uint8_t* input, const uint8_t* bias,
              uint8_t* output) {
  const Kernels& kernels = weight.kernels;
  const int64_t num_columns = weight.spec.in_features;
  const int64_t whole = num_columns / kDotStep * kDotStep;
  // A group of inputs stays in the first cache for all rows of a unit.
  constexpr int64_t kCachedFloats = 4096;
  const int64_t step =
      std::max(kDotStep, kCachedFloats / std::min<int64_t>(num_inputs, 4) / kDotStep * kDotStep);
  const int64_t num_units = CeilDiv(weight.num_rows, kFewRows);
  const int64_t num_workers = NumWorkers(weight, num_inputs, num_units);
  Inputs natural(weight, num_inputs, num_columns, 0, whole, whole);
  Inputs rest(weight, num_inputs, num_columns, whole, num_columns, kDotStep);
  const int64_t tile_floats = kFewRows * kDotStep;
  const int64_t sums_floats = num_inputs * kFewRows;
  Workspace workspace({natural.num_floats(), rest.num_floats(), natural.num_floats(),
                       num_workers * tile_floats, num_workers * sums_floats});
  natural.Load(input, workspace.Take(natural.num_floats()));
  rest.Load(input, workspace.Take(rest.num_floats()));
  float* const arranged = workspace.Take(natural.num_floats());
  kernels.arrange_for_dot[weight.dtype](num_inputs * whole, natural[0], arranged);
  float* const tiles = workspace.Take(num_workers * tile_floats);
  float* const all_sums = workspace.Take(num_workers * sums_floats);

  ForEachUnit(num_workers, num_units, [&](int64_t worker, int64_t index) {
    const Unit unit = UnitOf(weight, index, kFewRows);
    float* const sums = all_sums + worker * sums_floats;
    std::fill_n(sums, num_inputs * unit.padded_rows, 0.0f);
    for (int64_t begin = 0; begin < whole; begin += step) {
      kernels.dot_rows[weight.dtype](weight.spec, unit.num_rows, begin,
                                     std::min(begin + step, whole), unit.record, num_inputs,
                                     arranged + begin, whole, sums, unit.padded_rows);
    }
    AddTiles(weight, unit, num_inputs, rest, tiles + worker * tile_floats, sums);
    WriteUnit(weight, unit, num_inputs, sums, bias, output);
  });
}

bool IsForDot(const Weight& weight, int64_t num_inputs) {
  return num_inputs <= weight.kernels.max_dot_inputs && weight.spec.in_features >= kDotStep &&
         weight.spec.block_size % kDotStep == 0;
}

void MultiplyBlockBy(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                     uint8_t* output) {
  const int64_t num_columns = weight.spec.in_features;
  // Wide units read long pieces of the records; narrow ones give every thread some.
  const int64_t even = RoundUp(CeilDiv(num_columns, 2 * NumThreads()), 4 * kPanelWidth);
  const int64_t unit_columns =
      std::min<int64_t>(even, num_inputs <= kFewInputs ? kTileColumns : kTileColumns / 2);
  const int64_t num_units = CeilDiv(num_columns, unit_columns);
  const int64_t num_workers = NumWorkers(weight, num_inputs, num_units);
  Inputs inputs(weight, num_inputs, weight.num_rows, 0, weight.num_rows, kTileRows);
  const int64_t tile_floats = kPanelPitch * CeilDiv(unit_columns, kPanelWidth);
  const int64_t sums_floats = num_inputs * unit_columns;
  Workspace workspace({inputs.num_floats(), num_workers * tile_floats, num_workers * sums_floats});
  inputs.Load(input, workspace.Take(inputs.num_floats()));
  float* const tiles = workspace.Take(num_workers * tile_floats);
  float* const all_sums = workspace.Take(num_workers * sums_floats);

  ForEachUnit(num_workers, num_units, [&](int64_t worker, int64_t unit) {
    const Kernels& kernels = weight.kernels;
    const int64_t begin = unit * unit_columns;
    const int64_t end = std::min(begin + unit_columns, num_columns);
    const int64_t num_panels = CeilDiv(end - begin, kPanelWidth);
    const int64_t sums_pitch = num_inputs * kPanelWidth;
    float* const tile = tiles + worker * tile_floats;
    float* const sums = all_sums + worker * sums_floats;
    std::fill_n(sums, num_panels * sums_pitch, 0.0f);
    for (int64_t t = 0; t < inputs.num_tiles(); ++t) {
      const int64_t num_rows = inputs.end(t) - inputs.begin(t);
      const uint8_t* record = weight.record + inputs.begin(t) * weight.spec.pitch();
      kernels.decode_tile[weight.dtype](weight.spec, num_rows, begin, end, record,
                                        {kPanelWidth, kPanelPitch}, tile);
      kernels.multiply(num_inputs, num_rows, num_panels, inputs[t], inputs.pitch(t), tile,
                       kPanelPitch, sums, sums_pitch);
    }
    for (int64_t m = 0; m < num_inputs; ++m) {
      for (int64_t panel = 0; panel < num_panels; ++panel) {
        const int64_t column = begin + panel * kPanelWidth;
        kernels.narrow[weight.dtype](std::min<int64_t>(kPanelWidth, end - column),
                                     sums + panel * sums_pitch + m * kPanelWidth,
                                     output + (m * num_columns + column) * weight.element_bytes);
      }
    }
  });
}

}  // namespace

void MultiplyByTransposed(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                          const uint8_t* bias, uint8_t* output) {
  if (num_inputs == 0 || weight.num_rows == 0) return;
  if (IsForDot(weight, num_inputs)) return DotBlock(weight, num_inputs, input, bias, output);
  if (IsForPanels(weight, num_inputs)) {
    return MultiplyPanelsByTransposed(weight, num_inputs, input, bias, output);
  }
  const int64_t block = BlockInputs(num_inputs, weight.spec.in_features);
  for (int64_t m = 0; m < num_inputs; m += block) {
    MultiplyBlockByTransposed(weight, std::min(block, num_inputs - m),
                              input + m * weight.spec.in_features * weight.element_bytes, bias,
                              output + m * weight.num_rows * weight.element_bytes);
  }
}

void MultiplyBy(const Weight& weight, int64_t num_inputs, const uint8_t* input, uint8_t* output) {
  if (num_inputs == 0) return;
  if (weight.num_rows == 0) {  // sums of nothing
    std::fill_n(output, num_inputs * weight.spec.in_features * weight.element_bytes, uint8_t{0});
    return;
  }
  if (IsForPanels(weight, num_inputs)) {
    return MultiplyPanelsBy(weight, num_inputs, input, output);
  }
  const int64_t block = BlockInputs(num_inputs, weight.num_rows);
  for (int64_t m = 0; m < num_inputs; m += block) {
    MultiplyBlockBy(weight, std::min(block, num_inputs - m),
                    input + m * weight.num_rows * weight.element_bytes,
                    output + m * weight.spec.in_features * weight.element_bytes);
  }
}

}  // namespace nf4tensor::cpu
