"""The ops of `nf4tensor::`, each defined once: schema, argument checks, fake kernel.

No arithmetic in here; `select.py` registers the kernels, `gradients.py` the rules of derivatives. A
spec travels as six integers (`NF4Spec.op_args`), so that a graph holds tensors, integers and dtypes
only.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import DTypeError, ShapeError, SpecError
from nf4tensor.format.spec import NF4Spec

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SPEC = (
    "int in_features, int block_size, int scale_kind, int segment_length, int num_segments, "
    "int quant_type"
)
SCHEMAS = (
    f"quantize(Tensor weight, {_SPEC}) -> Tensor",
    f"quantize_into(Tensor weight, {_SPEC}, Tensor(a!) record) -> ()",
    f"dequantize(Tensor record, {_SPEC}, ScalarType dtype) -> Tensor",
    f"dequantize_into(Tensor record, {_SPEC}, Tensor(a!) out) -> ()",
    # input @ W.T + bias and input @ W: each is the other's gradient.
    f"linear(Tensor input, Tensor record, {_SPEC}, Tensor? bias=None) -> Tensor",
    f"matmul(Tensor input, Tensor record, {_SPEC}) -> Tensor",
)

library = torch.library.Library("nf4tensor", "DEF")
for _schema in SCHEMAS:
    library.define(_schema)


@cache
def spec_of(*op_args: int) -> NF4Spec:
    """Return the spec that six integers of an op stand for."""
    return NF4Spec.from_op_args(*op_args)


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Refuse a dtype that the format neither takes nor gives.

    Raises:
        DTypeError: It is not float32, bfloat16 or float16.
    """
    if dtype not in WEIGHT_DTYPES:
        raise DTypeError(
            f"{what} is {dtype}, expected float32, bfloat16 or float16: cast it first, for example "
            "with .to(torch.float32)"
        )


def check_weight(weight: Tensor, spec: NF4Spec) -> None:
    """Refuse a weight that does not fit the spec.

    Raises:
        DTypeError: Its dtype is not float32, bfloat16 or float16.
        ShapeError: Its last dimension is not the spec's `in_features`.
        SpecError: The scale kind can only be imported, never made.
    """
    check_dtype(weight.dtype, "weight.dtype")
    if weight.dim() == 0 or weight.shape[-1] != spec.in_features:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}, expected [*, {spec.in_features}] for {spec}"
        )
    if spec.scale_kind == "dynamic8":
        raise SpecError(
            "dynamic8 scales are only imported from bitsandbytes, never made: write "
            "to_nf4(q.dequantize() + delta) instead"
        )


def check_record(record: Tensor, spec: NF4Spec) -> None:
    """Refuse a record that does not fit the spec.

    Raises:
        DTypeError: It is not uint8.
        ShapeError: Its last dimension is not the spec's pitch.
    """
    if record.dtype != torch.uint8:
        raise DTypeError(f"record.dtype is {record.dtype}, expected torch.uint8")
    if record.dim() == 0 or record.shape[-1] != spec.pitch:
        raise ShapeError(
            f"record has shape {tuple(record.shape)}, expected [*, {spec.pitch}] bytes for {spec}"
        )


def check_same_rows(record: Tensor, other: Tensor, what: str) -> None:
    """Refuse two tensors with different leading dimensions.

    Raises:
        ShapeError: They differ in any dimension but the last.
    """
    if record.shape[:-1] != other.shape[:-1]:
        raise ShapeError(
            f"{what} has leading dimensions {tuple(other.shape[:-1])}, the record has "
            f"{tuple(record.shape[:-1])}"
        )


def check_input(input: Tensor, record: Tensor, spec: NF4Spec, num_features: int) -> None:
    """Refuse an input that cannot be multiplied with the weight.

    Raises:
        DTypeError: Its dtype is not float32, bfloat16 or float16.
        ShapeError: Its last dimension is not `num_features`, or the weight has fewer than two.
    """
    check_record(record, spec)
    check_dtype(input.dtype, "input.dtype")
    if record.dim() < 2:
        raise ShapeError("a 1-D weight cannot be multiplied here: give it two dimensions")
    if input.dim() == 0 or input.shape[-1] != num_features:
        raise ShapeError(
            f"input has shape {tuple(input.shape)}, expected [*, {num_features}] for a weight of "
            f"shape {(*record.shape[:-1], spec.in_features)}"
        )


def check_bias(bias: Tensor | None, input: Tensor, record: Tensor) -> None:
    """Refuse a bias that cannot be added to the product.

    Raises:
        DTypeError: Its dtype is not the input's.
        ShapeError: It is not one number for each row of the weight.
    """
    if bias is None:
        return
    if bias.dtype != input.dtype:
        raise DTypeError(f"bias is {bias.dtype}, expected the input's {input.dtype}: cast it first")
    if bias.dim() != 1 or bias.shape[0] != record.shape[-2]:
        raise ShapeError(f"bias has shape {tuple(bias.shape)}, expected ({record.shape[-2]},)")


@torch.library.register_fake("nf4tensor::quantize", lib=library)
def _fake_quantize(weight: Tensor, *op_args: int) -> Tensor:
    spec = spec_of(*op_args)
    check_weight(weight, spec)
    return weight.new_empty((*weight.shape[:-1], spec.pitch), dtype=torch.uint8)


@torch.library.register_fake("nf4tensor::quantize_into", lib=library)
def _fake_quantize_into(weight: Tensor, *args: Any) -> None:
    *op_args, record = args
    spec = spec_of(*op_args)
    check_weight(weight, spec)
    check_record(record, spec)
    check_same_rows(record, weight, "weight")


@torch.library.register_fake("nf4tensor::dequantize", lib=library)
def _fake_dequantize(record: Tensor, *args: Any) -> Tensor:
    *op_args, dtype = args
    spec = spec_of(*op_args)
    check_record(record, spec)
    check_dtype(dtype, "dtype")
    return record.new_empty((*record.shape[:-1], spec.in_features), dtype=dtype)


@torch.library.register_fake("nf4tensor::dequantize_into", lib=library)
def _fake_dequantize_into(record: Tensor, *args: Any) -> None:
    *op_args, out = args
    check_out(record, spec_of(*op_args), out)


def check_out(record: Tensor, spec: NF4Spec, out: Tensor) -> None:
    """Refuse an output that the decoded record does not fit.

    Raises:
        DTypeError: Its dtype is not float32, bfloat16 or float16.
        ShapeError: Its shape is not the decoded weight's.
    """
    check_record(record, spec)
    check_dtype(out.dtype, "out.dtype")
    expected = (*record.shape[:-1], spec.in_features)
    if tuple(out.shape) != expected:
        raise ShapeError(f"out has shape {tuple(out.shape)}, expected {expected}")


@torch.library.register_fake("nf4tensor::linear", lib=library)
def _fake_linear(input: Tensor, record: Tensor, *args: Any) -> Tensor:
    op_args, bias = args[:6], args[6] if len(args) > 6 else None
    spec = spec_of(*op_args)
    check_input(input, record, spec, spec.in_features)
    check_bias(bias, input, record)
    weight = input.new_empty((*record.shape[:-1], spec.in_features))
    output = input @ weight.mT
    return output if bias is None else output + bias


@torch.library.register_fake("nf4tensor::matmul", lib=library)
def _fake_matmul(input: Tensor, record: Tensor, *op_args: int) -> Tensor:
    spec = spec_of(*op_args)
    check_input(input, record, spec, record.shape[-2])
    return input @ input.new_empty((*record.shape[:-1], spec.in_features))
