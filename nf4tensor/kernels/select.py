"""Which backend computes which op on which device: the only place that registers kernels.

The reference works everywhere. Faster are, on a CPU, the compiled library; on a GPU the compiled
library, where it was built with nvcc, then Triton. `NF4TENSOR_BACKEND` forces the choice: reference
for everything, triton in place of the compiled library on GPUs, cpu or cuda to make it an error
where the compiled library cannot be used there. `NF4TENSOR_ISA` forces the CPU's instruction set:
avx512vbmi, avx512, avx2 or scalar on x86-64, neon or scalar on AArch64. `table()` says what was
picked and why; `nf4tensor env` prints it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import NF4TensorError
from nf4tensor.kernels import native, reference, triton_backend
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

BACKENDS = ("auto", "cpu", "cuda", "triton", "reference")


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
    """Register the reference for every device, and what is faster where it can be used.

    Raises:
        NF4TensorError: `NF4TENSOR_BACKEND` names no backend, or one that is not there.
    """
    backend = requested_backend()
    for name, kernel in _REFERENCE.items():
        library.impl(name, kernel, "CompositeExplicitAutograd")
    _register_cpu(backend)
    _register_cuda(backend)
    _register_triton_or_reference("xpu", _why_not_triton(backend, torch.version.xpu, "XPU"))
    if backend == "triton" and not any(choice.backend == "triton" for choice in _choices):
        why = next(choice.reason for choice in _choices if choice.device == "cuda")
        raise NF4TensorError(f"NF4TENSOR_BACKEND is triton, but Triton cannot be used: {why}")
    _choose("other", "reference", "no kernel for other devices")


def _choose(device: str, backend: str, reason: str) -> None:
    _choices.extend(Choice(name, device, backend, reason) for name in _REFERENCE)


def _register_cpu(backend: str) -> None:
    reason = f"NF4TENSOR_BACKEND={backend}" if backend == "reference" else None
    reason = reason or native.unavailable_because()
    if reason is not None:
        if backend == "cpu":
            raise NF4TensorError(
                f"NF4TENSOR_BACKEND is cpu, but the compiled library cannot be used: {reason}"
            )
        _choose("cpu", "reference", reason)
        return
    native.register("cpu")
    if forced_isa := os.environ.get("NF4TENSOR_ISA"):
        native.use_isa(forced_isa)
    _choose("cpu", "cpu", f"compiled library, {native.isa()}")


def _register_cuda(backend: str) -> None:
    reason = f"NF4TENSOR_BACKEND={backend}" if backend in ("reference", "triton") else None
    reason = reason or native.cuda_unavailable_because()
    if reason is None:
        native.register("cuda")
        _choose("cuda", "cuda", "compiled library")
        return
    if backend == "cuda":
        raise NF4TensorError(
            f"NF4TENSOR_BACKEND is cuda, but the compiled kernels cannot be used: {reason}"
        )
    version = torch.version.cuda or torch.version.hip  # torch calls both devices "cuda"
    why_not = _why_not_triton(backend, version, "CUDA or ROCm")
    _register_triton_or_reference("cuda", why_not, f"; {reason}")


def _why_not_triton(backend: str, version: str | None, platform: str) -> str | None:
    if backend == "reference":
        return "NF4TENSOR_BACKEND=reference"
    if version is None:
        return f"this torch is not built for {platform}"
    return triton_backend.unavailable_because()


def _register_triton_or_reference(device: str, reason: str | None, because: str = "") -> None:
    for name in _REFERENCE:
        if reason is None and name in _TRITON:
            library.impl(name, _TRITON[name], device.upper())
            _choices.append(Choice(name, device, "triton", f"Triton{because}"))
        else:
            _choices.append(Choice(name, device, "reference", reason or "not in Triton"))


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


class _Decoding:
    """The ops that decode, by one of the backends in Python: checks, then its functions."""

    def __init__(self, backend: ModuleType) -> None:
        self._backend = backend

    def dequantize(self, record: Tensor, *args: Any) -> Tensor:
        *op_args, dtype = args
        spec = spec_of(*op_args)
        check_record(record, spec)
        check_dtype(dtype, "dtype")
        decoded: Tensor = self._backend.dequantize(record, spec, dtype)
        return decoded

    def dequantize_into(self, record: Tensor, *args: Any) -> None:
        *op_args, out = args
        spec = spec_of(*op_args)
        check_out(record, spec, out)
        self._backend.dequantize_into(record, spec, out)

    def linear(self, input: Tensor, record: Tensor, *args: Any) -> Tensor:
        op_args, bias = args[:6], args[6] if len(args) > 6 else None
        spec = spec_of(*op_args)
        check_input(input, record, spec, spec.in_features)
        check_bias(bias, input, record)
        product: Tensor = self._backend.linear(input, record, spec, bias)
        return product


def _matmul(input: Tensor, record: Tensor, *op_args: int) -> Tensor:
    spec = spec_of(*op_args)
    check_input(input, record, spec, record.shape[-2])
    return input @ torch.ops.nf4tensor.dequantize.default(record, *op_args, input.dtype)


def _decoding_ops(backend: ModuleType) -> dict[str, Callable[..., Any]]:
    ops = _Decoding(backend)
    return {
        "dequantize": ops.dequantize,
        "dequantize_into": ops.dequantize_into,
        "linear": ops.linear,
    }


_TRITON = _decoding_ops(triton_backend)
_REFERENCE = {
    "quantize": _quantize,
    "quantize_into": _quantize_into,
    **_decoding_ops(reference),
    "matmul": _matmul,
}
