// The ops linear and matmul on the CPU: checks, shapes, and a product for each matrix of a stack.
#include <algorithm>

#include "cpu/backend.h"
#include "cpu/products.h"
#include "operands.h"

namespace nf4tensor::cpu {
namespace {

// Where the matrix of a stack lies that an index into the broadcast leading sizes `all` stands for,
// in elements. A stack may be expanded or strided; its matrices are contiguous.
int64_t MatrixOffset(const Tensor& stack, const Sizes& lead, const Sizes& all, int64_t index) {
  const Sizes strides = stack.strides();
  int64_t offset = 0;
  for (size_t i = 0; i < lead.size(); ++i) {
    const size_t dim = lead.size() - 1 - i;
    const int64_t all_size = all[all.size() - 1 - i];
    offset += lead[dim] == 1 ? 0 : index % all_size * strides[dim];
    index /= all_size;
  }
  return offset;
}

// Whether the last two dimensions, or the only one, lie in order.
bool HasContiguousMatrices(const Tensor& tensor) {
  const Sizes sizes = tensor.sizes();
  const Sizes strides = tensor.strides();
  int64_t expected = 1;
  for (size_t i = 0; i < sizes.size() && i < 2; ++i) {
    const size_t dim = sizes.size() - 1 - i;
    if (sizes[dim] != 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

// Whether inputs need no copy. One matrix of many leading sizes must be contiguous as a whole.
bool IsReadable(const Tensor& input, const Operands& operands) {
  return operands.record_lead.empty() ? input.is_contiguous() : HasContiguousMatrices(input);
}

// Calls multiply(weight, input, output) for each matrix of the stack.
template <typename Multiply>
Tensor ForEachMatrix(const Operands& operands, const Tensor& input, const Tensor& record,
                     const RecordSpec& spec, Multiply multiply) {
  Tensor output = input.NewEmpty(operands.output_sizes, input.dtype());
  const int64_t num_matrices = Product(operands.lead);
  if (output.numel() == 0) return output;
  Weight weight{CurrentKernels(),  spec,   DTypeOf(input.dtype()), input.element_bytes(),
                operands.num_rows, nullptr};
  const uint8_t* const records = record.bytes();
  const uint8_t* const inputs = input.bytes();
  uint8_t* const outputs = output.bytes();
  const int64_t output_bytes =
      operands.num_inputs * operands.output_sizes.back() * weight.element_bytes;
  for (int64_t i = 0; i < num_matrices; ++i) {
    weight.record = records + MatrixOffset(record, operands.record_lead, operands.lead, i);
    const int64_t offset = MatrixOffset(input, operands.input_lead, operands.lead, i);
    multiply(weight, inputs + offset * weight.element_bytes, outputs + i * output_bytes);
  }
  return output;
}

}  // namespace

Tensor Backend::Linear(const Tensor& input, const Tensor& record, const RecordSpec& spec,
                       const Tensor* bias) {
  const Operands operands = CheckedOperands(input, record, spec, device(), /*is_transposed=*/true);
  if (bias != nullptr) {
    CheckBias(*bias, operands.num_rows, input, device());
    if (!bias->is_contiguous()) {
      const Tensor contiguous = bias->Clone();
      return Linear(input, record, spec, &contiguous);
    }
  }
  if (!IsReadable(input, operands)) return Linear(input.Clone(), record, spec, bias);
  if (!HasContiguousMatrices(record)) return Linear(input, record.Clone(), spec, bias);
  const uint8_t* const bias_bytes = bias == nullptr ? nullptr : bias->bytes();
  return ForEachMatrix(operands, input, record, spec,
                       [&](const Weight& weight, const uint8_t* from, uint8_t* to) {
                         MultiplyByTransposed(weight, operands.num_inputs, from, bias_bytes, to);
                       });
}

Tensor Backend::Matmul(const Tensor& input, const Tensor& record, const RecordSpec& spec) {
  const Operands operands = CheckedOperands(input, record, spec, device(), /*is_transposed=*/false);
  if (!IsReadable(input, operands)) return Matmul(input.Clone(), record, spec);
  if (!HasContiguousMatrices(record)) return Matmul(input, record.Clone(), spec);
  return ForEachMatrix(operands, input, record, spec,
                       [&](const Weight& weight, const uint8_t* from, uint8_t* to) {
                         MultiplyBy(weight, operands.num_inputs, from, to);
                       });
}

}  // namespace nf4tensor::cpu
