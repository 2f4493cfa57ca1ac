// The CUDA kernels as their callers see them: device pointers in, work on a stream out. No torch
// and no CUDA header here, so that a test can link the same kernels against an emulator.
//
// All launches are asynchronous, on the current device, allocate nothing and never wait, so that a
// CUDA graph can capture them. A launch that CUDA refuses throws std::runtime_error; a spec past
// the limits of rows.h, std::invalid_argument. Records lie at multiples of kRecordAlignment, other
// pointers at multiples of their elements.
#pragma once

#include "common/dtype.h"
#include "common/record.h"

namespace nf4tensor::cuda {

inline constexpr int64_t kRecordAlignment = 16;

using Stream = void*;  // a cudaStream_t; null is the default stream

// How a warp spreads the stores of the weights that it decodes, which its lanes load 32 at a time.
enum class Mapping {
  kDefault,  // what suits the device and the spec
  kDirect,   // each lane its own weights: half a sector at a time before sm_100, a whole one since
  kPair,     // two lanes a sector together, after they have swapped codes
  kStaged,   // all lanes 512 bytes in a row, by way of shared memory; 16-bit dtypes only
};

struct DequantizeTuning {
  Mapping mapping = Mapping::kDefault;  // where a spec does not allow one, it gets the default
  int64_t max_blocks = 0;               // of 256 threads, to leave room beside them; 0: no limit
};

// For all launches from now on. Not while another thread launches.
void SetDequantizeTuning(const DequantizeTuning& tuning);

// Decodes num_rows records [pitch] to out [num_rows, in_features] of the dtype.
void LaunchDequantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* record,
                      uint8_t* out, Stream stream);

// Encodes num_rows weights [in_features] to records [pitch]. keep_phase: the rows have phases to
// keep, else these become 0.
void LaunchQuantize(const RecordSpec& spec, DType dtype, int64_t num_rows, const uint8_t* weight,
                    bool keep_phase, uint8_t* record, Stream stream);

// A product of a weight [num_rows, in_features] with few inputs, without a decoded weight:
// output [num_inputs, num_rows] = input [num_inputs, in_features] @ W.T + bias [num_rows] or null.
struct LinearCall {
  RecordSpec spec;
  DType dtype;  // of all but the record
  int64_t num_rows;
  int64_t num_inputs;
  const uint8_t* record;
  const uint8_t* input;
  const uint8_t* bias;
  uint8_t* output;
};

// Up to how many inputs LaunchLinear is expected to be faster, on the current device, than decoding
// the weight for torch's own product; or what was set, if it is not below zero.
int64_t MaxFusedInputs(const RecordSpec& spec, int64_t num_rows);
void SetMaxFusedInputs(int64_t max_inputs);

// Whether the kernel takes a call: 16-bit dtypes, in_features a multiple of 8, records of 64 MiB at
// most, fewer than 2^31 outputs, inputs at a multiple of 16 bytes and records at one of 32.
bool CanFuse(const LinearCall& call);
// Takes any number of inputs.
void LaunchLinear(const LinearCall& call, Stream stream);

}  // namespace nf4tensor::cuda
