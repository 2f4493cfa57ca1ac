// Tiles of decoded weights and what they are multiplied with, shared by the instruction sets.
// Included by their translation units only, inside an anonymous namespace (see dequantize_rows.h).
//
// Everything here is float32. Weights and inputs of 16 bits are widened, which is exact, and sums
// are float32, whatever the dtype of the result. The order of a sum depends on the lengths of its
// tiles only, so that a row's result does not depend on the other rows, nor on threads.
//
// Needs dequantize_rows.h.
//
// A panel is kPanelWidth columns of a tile: panel p of row r starts at p * panel_pitch + r *
// row_pitch. Columns past the end of a weight are zero, up to the end of the panel.
//
// Vector is a processor's register of floats:
//   Register, kLanes                a divisor of kPanelWidth
//   Load, Store, Broadcast, Zero    as they say
//   MultiplyAdd(a, b, c)            a * b + c, fused or not
//   AddSums(a, b, c, d, to)         adds the sum of the lanes of each to to[0..3]
//   kDotRows, kOuterRows            how many inputs to multiply at once
//   kSums                           how many sums fit in the registers beside their factors
//
// The tables of a FloatDecoder<Format> are rounded to the format and widened again:
//   DecodePanels(packed, count, panel_pitch, to)  from the start of a panel; writes whole ones

template <typename Format>
void WidenEach(int64_t count, const uint8_t* __restrict__ from, float* __restrict__ to) {
  using Bits = typename Format::Bits;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = Format::Widen(Load<Bits>(from + i * static_cast<int64_t>(sizeof(Bits))));
  }
}

template <typename Format>
void NarrowEach(int64_t count, const float* __restrict__ from, uint8_t* __restrict__ to) {
  using Bits = typename Format::Bits;
  for (int64_t i = 0; i < count; ++i) {
    Store(to + i * static_cast<int64_t>(sizeof(Bits)), Format::Round(from[i]));
  }
}

// Decodes columns [begin, end) of some rows; begin is a multiple of kPanelWidth.
template <typename Decoder>
void DecodeTileWith(const RecordSpec& shared_spec, int64_t num_rows, int64_t begin, int64_t end,
                    const uint8_t* __restrict__ record, TileLayout layout,
                    float* __restrict__ tile) {
  const RecordSpec spec = shared_spec;
  const int64_t pitch = spec.pitch();
  Decoder decoder(/*stream=*/false);
  ScaleReader reader(spec);
  for (int64_t row = 0; row < num_rows; ++row, record += pitch) {
    float* const to = tile + row * layout.row_pitch;
    PrefetchRow(spec, record + 8 * pitch, begin, end);
    ForEachBlock(spec, reader, record, begin, end, decoder,
                 [&](const auto& table, int64_t column, int64_t count) {
                   table.DecodePanels(record + column / 2, count, layout.panel_pitch,
                                      to + (column - begin) / kPanelWidth * layout.panel_pitch);
                 });
  }
}

// output[m][n] += sum of input[m][k] * tile[n][k], for kRows inputs and kColumns rows of the tile.
template <typename Vector, int kRows, int kColumns>
void Dot(const float* __restrict__ input, const float* __restrict__ tile, int64_t pitch,
         int64_t length, float* __restrict__ output, int64_t output_pitch) {
  typename Vector::Register sums[kRows][kColumns];
  for (auto& row : sums) {
    for (auto& sum : row) sum = Vector::Zero();
  }
  for (int64_t k = 0; k < length; k += Vector::kLanes) {
    typename Vector::Register values[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) values[m] = Vector::Load(input + m * pitch + k);
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; ++n) {
      const typename Vector::Register weights = Vector::Load(tile + n * pitch + k);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        sums[m][n] = Vector::MultiplyAdd(values[m], weights, sums[m][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < kColumns; n += 4) {
      Vector::AddSums(sums[m][n], sums[m][n + 1], sums[m][n + 2], sums[m][n + 3],
                      output + m * output_pitch + n);
    }
  }
}

// The same for a number of inputs known at run time, at most kRows.
template <typename Vector, int kRows>
void DotInputs(int64_t num_inputs, const float* input, const float* tile, int64_t pitch,
               int64_t length, float* output, int64_t output_pitch) {
  // A single input leaves registers free, and too few sums to keep the multipliers busy.
  constexpr int kColumns = kRows == 1 ? kTileRowStep : 4;
  if constexpr (kRows > 1) {
    if (num_inputs < kRows) {
      return DotInputs<Vector, kRows - 1>(num_inputs, input, tile, pitch, length, output,
                                          output_pitch);
    }
  }
  for (int n = 0; n < kTileRowStep; n += kColumns) {
    Dot<Vector, kRows, kColumns>(input, tile + n * pitch, pitch, length, output + n, output_pitch);
  }
}

// output[m][n] += sum of input[m][k] * tile[n][k] over length columns. num_rows of the tile is a
// multiple of kTileRowStep, length of kPanelWidth; inputs and tile have the same row pitch.
template <typename Vector>
void MultiplyTransposedWith(int64_t num_inputs, int64_t num_rows, int64_t length, int64_t pitch,
                            const float* input, const float* tile, float* output,
                            int64_t output_pitch) {
  // Some inputs stay in the first cache for all rows of the tile.
  constexpr int64_t kInputs = 6;
  for (int64_t first = 0; first < num_inputs; first += kInputs) {
    const int64_t last = first + kInputs < num_inputs ? first + kInputs : num_inputs;
    for (int64_t n = 0; n < num_rows; n += kTileRowStep) {
      for (int64_t m = first; m < last; m += Vector::kDotRows) {
        DotInputs<Vector, Vector::kDotRows>(last - m, input + m * pitch, tile + n * pitch, pitch,
                                            length, output + m * output_pitch + n, output_pitch);
      }
    }
  }
}

// output[m] += sum of input[m][n] * tile[n], for kRows inputs and kPanels panels of the tile.
template <typename Vector, int kRows, int kPanels>
void Outer(int64_t num_rows, const float* __restrict__ input, int64_t input_pitch,
           const float* __restrict__ tile, int64_t panel_pitch, float* __restrict__ output,
           int64_t output_panel_pitch) {
  constexpr int kVectors = kPanelWidth / Vector::kLanes;
  typename Vector::Register sums[kRows][kPanels][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[m][p][v] =
            Vector::Load(output + p * output_panel_pitch + m * kPanelWidth + v * Vector::kLanes);
      }
    }
  }
  for (int64_t n = 0; n < num_rows; ++n) {
    typename Vector::Register weights[kPanels][kVectors];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        weights[p][v] = Vector::Load(tile + p * panel_pitch + n * kPanelWidth + v * Vector::kLanes);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const typename Vector::Register value = Vector::Broadcast(input[m * input_pitch + n]);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sums[m][p][v] = Vector::MultiplyAdd(value, weights[p][v], sums[m][p][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        Vector::Store(output + p * output_panel_pitch + m * kPanelWidth + v * Vector::kLanes,
                      sums[m][p][v]);
      }
    }
  }
}

// How many panels to take at once: few inputs leave registers free, and too few sums to keep the
// multipliers busy.
template <typename Vector>
constexpr int PanelsFor(int num_rows) {
  const int panels = Vector::kSums / (num_rows * kPanelWidth / Vector::kLanes);
  return panels < 1 ? 1 : panels > 4 ? 4 : panels;
}

// The same for a number of inputs known at run time, at most kRows, and any number of panels.
template <typename Vector, int kRows>
void OuterRows(int64_t num_inputs, int64_t num_rows, int64_t num_panels, const float* input,
               int64_t input_pitch, const float* tile, int64_t panel_pitch, float* output,
               int64_t output_panel_pitch) {
  if constexpr (kRows > 1) {
    if (num_inputs < kRows) {
      return OuterRows<Vector, kRows - 1>(num_inputs, num_rows, num_panels, input, input_pitch,
                                          tile, panel_pitch, output, output_panel_pitch);
    }
  }
  constexpr int kPanels = PanelsFor<Vector>(kRows);
  int64_t p = 0;
  for (; p + kPanels <= num_panels; p += kPanels) {
    Outer<Vector, kRows, kPanels>(num_rows, input, input_pitch, tile + p * panel_pitch, panel_pitch,
                                  output + p * output_panel_pitch, output_panel_pitch);
  }
  for (; p < num_panels; ++p) {
    Outer<Vector, kRows, 1>(num_rows, input, input_pitch, tile + p * panel_pitch, panel_pitch,
                            output + p * output_panel_pitch, output_panel_pitch);
  }
}

// output[m] += sum of input[m][n] * tile[n] over num_rows. The tile's rows have the pitch
// kPanelWidth; output has panels like the tile's, with a row for each input.
template <typename Vector>
void MultiplyWith(int64_t num_inputs, int64_t num_rows, int64_t num_panels, const float* input,
                  int64_t input_pitch, const float* tile, int64_t panel_pitch, float* output,
                  int64_t output_panel_pitch) {
  constexpr int kRows = Vector::kOuterRows;
  // A panel or a few stay in the first cache for all inputs.
  const int64_t step = num_inputs < kRows ? num_panels : PanelsFor<Vector>(kRows);
  for (int64_t p = 0; p < num_panels; p += step) {
    for (int64_t m = 0; m < num_inputs; m += kRows) {
      OuterRows<Vector, kRows>(
          num_inputs - m, num_rows, step < num_panels - p ? step : num_panels - p,
          input + m * input_pitch, input_pitch, tile + p * panel_pitch, panel_pitch,
          output + p * output_panel_pitch + m * kPanelWidth, output_panel_pitch);
    }
  }
}
