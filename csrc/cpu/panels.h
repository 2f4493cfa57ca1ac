// Products of many inputs by torch's own matmul, on panels of a decoded weight.
#pragma once

#include "cpu/products.h"

namespace nf4tensor::cpu {

// Whether torch multiplies faster than tiles.h: where the processor multiplies 16-bit floats, which
// tiles widen, and where torch's library is made for the processor.
bool IsForPanels(const Weight& weight, int64_t num_inputs);

// As MultiplyByTransposed and MultiplyBy. A panel is as many rows, or columns, as fit in 4 MB.
void MultiplyPanelsByTransposed(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                                const uint8_t* bias, uint8_t* output);
void MultiplyPanelsBy(const Weight& weight, int64_t num_inputs, const uint8_t* input,
                      uint8_t* output);

}  // namespace nf4tensor::cpu
