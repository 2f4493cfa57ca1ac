// Products of a two-dimensional weight, the parts of the ops linear and matmul.
#pragma once

#include "cpu/kernels.h"

namespace nf4tensor::cpu {

// A weight [num_rows, in_features] as records, and the dtype that it is decoded to, which is that
// of inputs and outputs.
struct Weight {
  const Kernels& kernels;
  const RecordSpec& spec;
  DType dtype;
  int64_t element_bytes;
  int64_t num_rows;
  const uint8_t* record;
};

// output = input @ W.T + bias. input: [num_inputs, in_features]; bias: [num_rows] or null; output:
// [num_inputs, num_rows].
void MultiplyByTransposed(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                          const uint8_t* bias, uint8_t* output);

// output = input @ W. input: [num_inputs, num_rows]; output: [num_inputs, in_features].
void MultiplyBy(const Weight& weight, int64_t num_inputs, const uint8_t* input, uint8_t* output);

}  // namespace nf4tensor::cpu
