// The CUDA kernels as their callers see them: device pointers in, work on a stream out. No torch
// and no CUDA header here, so that a test can link the same kernels against an emulator.
//
// All launches are asynchronous, on the current device, allocate nothing and never wait, so that a
// CUDA graph can capture them. A launch that CUDA refuses throws std::runtime_error. Records lie at
// multiples of kRecordAlignment, other pointers at multiples of their elements.
#pragma once

#include "common/dtype.h"
#include "common/record.h"

namespace nf4tensor::cuda {

inline constexpr int64_t kRecordAlignment = 16;

using Stream = void*;  // a cudaStream_t; null is the default stream

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

// Whether the kernel takes a call: 16-bit dtypes, in_features a multiple of 8, fewer than 2^31
// outputs, inputs at a multiple of 16 bytes and records at one of 32.
bool CanFuse(const LinearCall& call);

// Up to how many inputs LaunchLinear is expected to be faster than decoding the weight first.
int64_t MaxFusedInputs(const RecordSpec& spec, int64_t num_rows, int compute_capability);

// Takes any number of inputs.
void LaunchLinear(const LinearCall& call, Stream stream);

}  // namespace nf4tensor::cuda
