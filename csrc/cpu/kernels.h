// What an instruction set has to offer, and which one is in use.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/record.h"

namespace nf4tensor::cpu {

inline constexpr int kPanelWidth = 16;

// How many scales of a row are decoded at once, in loops over all of them.
inline constexpr int64_t kScalesAtOnce = 32;

// Columns [begin, end) of some rows, and how many bytes of output lie between two rows. begin is a
// multiple of kPanelWidth.
struct Columns {
  int64_t begin;
  int64_t end;
  int64_t out_pitch;
};

// Decodes columns of num_rows records [pitch]; past the caches where told to stream.
using DequantizeRows = void (*)(const RecordSpec& spec, int64_t num_rows, Columns columns,
                                const uint8_t* record, uint8_t* out, bool stream);

// Encodes num_rows weights [in_features] to records [pitch]. keep_phase: the rows have phases to
// keep, else these become 0. absmax: scratch for num_blocks floats.
using QuantizeRows = void (*)(const RecordSpec& spec, int64_t num_rows, const uint8_t* weight,
                              bool keep_phase, float* absmax, uint8_t* record);

// A tile of a decoded weight is float32, in panels of kPanelWidth columns: panel p of row r starts
// at p * panel_pitch + r * row_pitch, in floats.
struct TileLayout {
  int64_t row_pitch;
  int64_t panel_pitch;
};
// The rows of a tile come in multiples of this where sums run along them.
inline constexpr int kTileRowStep = 8;

// Decodes columns [begin, end) of num_rows records [pitch], rounded to the dtype, to a tile. begin
// is a multiple of kPanelWidth; columns from end to the end of its panel become zero.
using DecodeTile = void (*)(const RecordSpec& spec, int64_t num_rows, int64_t begin, int64_t end,
                            const uint8_t* record, TileLayout layout, float* tile);

// Converts count values to float32, or float32 to the dtype.
using Widen = void (*)(int64_t count, const uint8_t* from, float* to);
using Narrow = void (*)(int64_t count, const float* from, uint8_t* to);

// output[m][n] += sum of input[m][k] * tile[n][k] over length columns. num_rows is a multiple of
// kTileRowStep, length of kPanelWidth; rows of input and tile have the same pitch.
using MultiplyTransposed = void (*)(int64_t num_inputs, int64_t num_rows, int64_t length,
                                    int64_t pitch, const float* input, const float* tile,
                                    float* output, int64_t output_pitch);

// output[m] += sum of input[m][n] * tile[n] over num_rows. Rows of tile and output have the pitch
// kPanelWidth; each panel of output has a row for each input.
using Multiply = void (*)(int64_t num_inputs, int64_t num_rows, int64_t num_panels,
                          const float* input, int64_t input_pitch, const float* tile,
                          int64_t panel_pitch, float* output, int64_t output_panel_pitch);

// Products of few inputs without a tile, for pieces of blocks of kDotStep columns.
inline constexpr int64_t kDotStep = 64;

// A number that compilers know: sums that are picked by it stay in registers.
template <int kNumber>
struct Place {
  static constexpr int kValue = kNumber;
};

// Puts count inputs, a multiple of kDotStep, in the order in which DotRows decodes weights.
using ArrangeForDot = void (*)(int64_t count, const float* from, float* to);

// output[m][n] += sum of input[m][k] * row[n][begin + k]; begin and end are multiples of kDotStep,
// as is the spec's block size.
using DotRows = void (*)(const RecordSpec& spec, int64_t num_rows, int64_t begin, int64_t end,
                         const uint8_t* record, int64_t num_inputs, const float* input,
                         int64_t input_pitch, float* output, int64_t output_pitch);

struct Kernels {
  const char* isa;
  DequantizeRows dequantize[kNumDTypes];
  QuantizeRows quantize[kNumDTypes];
  DecodeTile decode_tile[kNumDTypes];
  Widen widen[kNumDTypes];
  Narrow narrow[kNumDTypes];
  MultiplyTransposed multiply_transposed;
  Multiply multiply;
  int64_t max_dot_inputs;  // up to how many inputs dot_rows is faster than a tile; 0: there is none
  ArrangeForDot arrange_for_dot[kNumDTypes];
  DotRows dot_rows[kNumDTypes];
};

extern const Kernels kScalarKernels;
#ifdef NF4TENSOR_AVX2
extern const Kernels kAvx2Kernels;
#endif
#ifdef NF4TENSOR_AVX512
extern const Kernels kAvx512Kernels;
#endif
#ifdef NF4TENSOR_AVX512VBMI
extern const Kernels kAvx512VbmiKernels;
#endif
#ifdef NF4TENSOR_NEON
extern const Kernels kNeonKernels;
#endif

// The kernels in use: of the best instruction set, until UseIsa says otherwise.
const Kernels& CurrentKernels();

}  // namespace nf4tensor::cpu
