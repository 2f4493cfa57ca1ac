"""Which backend computes which op on which device: the only place that registers kernels.

`NF4TENSOR_BACKEND` (auto, cpu, reference) forces the choice, `NF4TENSOR_ISA` that of the CPU's
instruction set: avx512vbmi, avx512, avx2 or scalar on x86-64, neon or scalar on AArch64. `table()`
says what was picked and why; `nf4tensor env` prints it.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import NF4TensorError
from nf4tensor.kernels import native, reference
from nf4tensor.kernels.schema import (
    check_bias,
    check_dtype,
    check_input,
    check_out,
    check_record,
    check_same_rows,
    check_weight,
    library,
    spec_of,
)

BACKENDS = ("auto", "cpu", "reference")


@dataclass(frozen=True)
class Choice:
    """One line of the table: a backend, where it works, and why it was picked."""

    op: str
    device: str
    backend: str
    reason: str


_choices: list[Choice] = []


def table() -> tuple[Choice, ...]:
    """Return what was registered, one line for each op and kind of device."""
    return tuple(_choices)


def requested_backend() -> str:
    """Read `NF4TENSOR_BACKEND`.

    Raises:
        NF4TensorError: It names no backend.
    """
    backend = os.environ.get("NF4TENSOR_BACKEND", "auto")
    if backend not in BACKENDS:
        raise NF4TensorError(
            f"NF4TENSOR_BACKEND is {backend!r}, expected one of {', '.join(BACKENDS)}"
        )
    return backend


def register_backends() -> None:
    """Register the reference for every device and the compiled kernels where they are wanted.

    Raises:
        NF4TensorError: `NF4TENSOR_BACKEND` names no backend, or one that is not there.
    """
    backend = requested_backend()
    for name, kernel in _REFERENCE.items():
        library.impl(name, kernel, "CompositeExplicitAutograd")
    reason: str | None
    if backend == "reference":
        reason = "NF4TENSOR_BACKEND=reference"
    else:
        reason = native.unavailable_because()
        if reason is None:
            native.register_cpu()
            if forced_isa := os.environ.get("NF4TENSOR_ISA"):
                native.use_isa(forced_isa)
        elif backend == "cpu":
            raise NF4TensorError(
                f"NF4TENSOR_BACKEND is cpu, but the compiled library cannot be used: {reason}"
            )
    for name in _REFERENCE:
        if reason is None and name in native.CPU_OPS:
            _choices.append(Choice(name, "cpu", "cpu", f"compiled library, {native.isa()}"))
        else:
            _choices.append(
                Choice(name, "cpu", "reference", reason or "decodes, then torch's own matmul")
            )
        _choices.append(Choice(name, "other", "reference", "no kernel for other devices"))


def _quantize(weight: Tensor, *op_args: int) -> Tensor:
    spec = spec_of(*op_args)
    check_weight(weight, spec)
    return reference.quantize(weight, spec)


def _quantize_into(weight: Tensor, *args: Any) -> None:
    *op_args, record = args
    spec = spec_of(*op_args)
    check_weight(weight, spec)
    check_record(record, spec)
    check_same_rows(record, weight, "weight")
    reference.quantize_into(weight, spec, record)


def _dequantize(record: Tensor, *args: Any) -> Tensor:
    *op_args, dtype = args
    spec = spec_of(*op_args)
    check_record(record, spec)
    check_dtype(dtype, "dtype")
    return reference.dequantize(record, spec, dtype)


def _dequantize_into(record: Tensor, *args: Any) -> None:
    *op_args, out = args
    spec = spec_of(*op_args)
    check_out(record, spec, out)
    reference.dequantize_into(record, spec, out)


def _linear(input: Tensor, record: Tensor, *args: Any) -> Tensor:
    op_args, bias = args[:6], args[6] if len(args) > 6 else None
    spec = spec_of(*op_args)
    check_input(input, record, spec, spec.in_features)
    check_bias(bias, input, record)
    weight = torch.ops.nf4tensor.dequantize.default(record, *op_args, input.dtype)
    if weight.dim() == 2:
        return torch.nn.functional.linear(input, weight, bias)
    output = input @ weight.mT
    return output if bias is None else output + bias


def _matmul(input: Tensor, record: Tensor, *op_args: int) -> Tensor:
    spec = spec_of(*op_args)
    check_input(input, record, spec, record.shape[-2])
    return input @ torch.ops.nf4tensor.dequantize.default(record, *op_args, input.dtype)


_REFERENCE = {
    "quantize": _quantize,
    "quantize_into": _quantize_into,
    "dequantize": _dequantize,
    "dequantize_into": _dequantize_into,
    "linear": _linear,
    "matmul": _matmul,
}
