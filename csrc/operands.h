// The checks of the ops linear and matmul, and the sizes of what they make.
#pragma once

#include <algorithm>

#include "arguments.h"

namespace nf4tensor {

using Sizes = std::vector<int64_t>;

inline int64_t Product(const Sizes& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

// The leading sizes of a product, by torch's rules of broadcasting.
inline Sizes Broadcast(const Sizes& a, const Sizes& b) {
  Sizes sizes(std::max(a.size(), b.size()));
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t left = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t right = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (left != right && left != 1 && right != 1) {
      Refuse("input and record have leading sizes ", left, " and ", right,
             " that do not broadcast");
    }
    sizes[sizes.size() - 1 - i] = left == 1 ? right : left;
  }
  return sizes;
}

// The operands of a product, checked: input [*lead, num_inputs, num_from], or [num_from], and
// record [*lead, num_rows, pitch].
struct Operands {
  Sizes input_lead;
  Sizes record_lead;
  Sizes lead;
  int64_t num_inputs;
  int64_t num_rows;
  Sizes output_sizes;
};

inline Operands CheckedOperands(const Tensor& input, const Tensor& record, const RecordSpec& spec,
                                const Device& device, bool is_transposed) {
  Operands found;
  found.record_lead = CheckedLead(record, "record", spec.pitch(), device);
  CheckRecordDtype(record);
  CheckFloatDtype(input.dtype(), "input");
  if (found.record_lead.empty()) Refuse("record has one dimension, expected two or more");
  found.num_rows = found.record_lead.back();
  found.record_lead.pop_back();
  const int64_t num_from = is_transposed ? spec.in_features : found.num_rows;
  const int64_t num_to = is_transposed ? found.num_rows : spec.in_features;

  found.input_lead = CheckedLead(input, "input", num_from, device);
  found.output_sizes = found.input_lead;
  if (found.record_lead.empty()) {  // the matrices of a stack of inputs are one
    found.num_inputs = Product(found.input_lead);
    found.input_lead.clear();
  } else {
    const bool is_vector = found.input_lead.empty();
    found.num_inputs = is_vector ? 1 : found.input_lead.back();
    if (!is_vector) found.input_lead.pop_back();
    found.lead = Broadcast(found.input_lead, found.record_lead);
    found.output_sizes = found.lead;
    if (!is_vector) found.output_sizes.push_back(found.num_inputs);
  }
  found.output_sizes.push_back(num_to);
  return found;
}

inline void CheckBias(const Tensor& bias, int64_t num_rows, const Tensor& input,
                      const Device& device) {
  CheckedLead(bias, "bias", num_rows, device);
  if (bias.dim() != 1) Refuse("bias has ", bias.dim(), " dimensions, expected one");
  if (bias.dtype() != input.dtype()) {
    Refuse("bias has elements of dtype code ", bias.dtype(), ", expected the input's ",
           input.dtype());
  }
}

}  // namespace nf4tensor
