"""The kernels as the rest of the package calls them: a tensor, a spec, and what to make of them.

Thin names over `torch.ops.nf4tensor`; the backend is the dispatcher's business. What only reads or
moves a record's parts is plain PyTorch everywhere. Importing this module registers the backends.
"""

import torch
from torch import Tensor

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import gradients, select
from nf4tensor.kernels.native import release_workspace
from nf4tensor.kernels.reference import (
    Parts,
    assemble,
    read_pairs_of_blocks,
    read_scales,
    zero_record,
)
from nf4tensor.kernels.schema import (
    check_bias,
    check_dtype,
    check_input,
    check_out,
    check_record,
    check_same_rows,
    check_weight,
)

__all__ = [
    "Parts",
    "assemble",
    "dequantize",
    "dequantize_into",
    "linear",
    "matmul",
    "quantize",
    "quantize_into",
    "read_pairs_of_blocks",
    "read_scales",
    "release_workspace",
    "zero_record",
]

select.register_backends()
gradients.register()


def quantize(weight: Tensor, spec: NF4Spec) -> Tensor:
    """Quantize a float weight `[*lead, in_features]` to a record `[*lead, pitch]` uint8.

    Raises:
        DTypeError, ShapeError, SpecError: The weight does not fit the spec.
    """
    check_weight(weight, spec)
    return torch.ops.nf4tensor.quantize.default(weight, *spec.op_args)


def quantize_into(weight: Tensor, spec: NF4Spec, record: Tensor) -> None:
    """Write a weight over a record in place, keeping the phase of each row."""
    check_weight(weight, spec)
    check_record(record, spec)
    check_same_rows(record, weight, "weight")
    torch.ops.nf4tensor.quantize_into.default(weight, *spec.op_args, record)


def dequantize(record: Tensor, spec: NF4Spec, dtype: torch.dtype) -> Tensor:
    """Decode a record `[*lead, pitch]` to a weight `[*lead, in_features]` of a dtype."""
    check_record(record, spec)
    check_dtype(dtype, "dtype")
    return torch.ops.nf4tensor.dequantize.default(record, *spec.op_args, dtype)


def dequantize_into(record: Tensor, spec: NF4Spec, out: Tensor) -> Tensor:
    """Decode a record into `out` `[*lead, in_features]`, in its dtype, and return it."""
    check_out(record, spec, out)
    torch.ops.nf4tensor.dequantize_into.default(record, *spec.op_args, out)
    return out


def linear(input: Tensor, record: Tensor, spec: NF4Spec, bias: Tensor | None = None) -> Tensor:
    """Return `input @ W.T + bias`, W decoded to the input's dtype; stacks of W broadcast.

    Sums are float32 and round once; their order depends on the sizes.

    Raises:
        DTypeError, ShapeError: The input or the bias does not fit the weight.
    """
    check_input(input, record, spec, spec.in_features)
    check_bias(bias, input, record)
    return torch.ops.nf4tensor.linear.default(input, record, *spec.op_args, bias)


def matmul(input: Tensor, record: Tensor, spec: NF4Spec) -> Tensor:
    """Return `input @ W`, W decoded to the input's dtype: the gradient of `linear`.

    Raises:
        DTypeError, ShapeError: The input does not fit the weight.
    """
    check_input(input, record, spec, record.shape[-2] if record.dim() > 1 else 0)
    return torch.ops.nf4tensor.matmul.default(input, record, *spec.op_args)
