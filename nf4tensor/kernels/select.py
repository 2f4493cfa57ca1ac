"""Which backend computes which op on which device: the only place that registers kernels.

The reference works everywhere. Faster are, on a CPU, the compiled library; on a GPU the compiled
library, where it was built with nvcc, then Triton. `NF4TENSOR_BACKEND` forces the choice: reference
for everything, triton in place of the compiled library on GPUs, cpu or cuda to make it an error
where the compiled library cannot be used there. `NF4TENSOR_ISA` forces the CPU's instruction set:
avx512vbmi, avx512, avx2 or scalar on x86-64, neon or scalar on AArch64. `table()` says what was
picked and why; `nf4tensor env` prints it.

Which GPUs there are is known once torch has initialized CUDA. Importing this package does not: a
process that did could not fork.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NoReturn

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


_choices: dict[tuple[str, str], Choice] = {}


def table() -> tuple[Choice, ...]:
    """Return one line for each op and kind of device; those of "cuda" may change when it starts."""
    return tuple(_choices.values())


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
    _choose_for_cpu(backend)
    _register_chosen("cpu")
    _choose_for_cuda(backend)
    _choose_triton_or_reference("xpu", _why_not_triton(backend, torch.version.xpu, "XPU"))
    _register_chosen("xpu")
    if backend == "triton" and not any(one.backend == "triton" for one in table()):
        _refuse("triton", "Triton", _choices["linear", "cuda"].reason)
    _choose("other", "reference", "no kernel for other devices")
    # Where torch itself queues what waits for CUDA; if that has started, the call is made now.
    torch.cuda._lazy_call(partial(_register_for_cuda, backend))


@cache  # torch calls again if it fails to initialize later on
def _register_for_cuda(backend: str) -> None:
    num_devices = 0 if torch.version.hip else torch.cuda.device_count()
    _choose_for_cuda(backend, [torch.cuda.get_device_capability(i) for i in range(num_devices)])
    if backend == "triton" and _choices["linear", "cuda"].backend != "triton":
        _refuse("triton", "Triton", _choices["linear", "cuda"].reason)
    _register_chosen("cuda")


def _refuse(backend: str, what: str, reason: str) -> NoReturn:
    raise NF4TensorError(
        f"NF4TENSOR_BACKEND is {backend}, but {what} cannot be used: {reason}: unset it to use "
        "the fastest backend that can"
    )


def _register_chosen(device: str) -> None:
    chosen = {name: _choices[name, device].backend for name in _REFERENCE}
    if device in chosen.values():
        native.register(device)
    for name, backend in chosen.items():
        if backend == "triton":
            library.impl(name, _TRITON[name], device.upper())


def _choose(device: str, backend: str, reason: str) -> None:
    for name in _REFERENCE:
        _choices[name, device] = Choice(name, device, backend, reason)


def _choose_for_cpu(backend: str) -> None:
    reason = f"NF4TENSOR_BACKEND={backend}" if backend == "reference" else None
    reason = reason or native.unavailable_because()
    if reason is not None:
        if backend == "cpu":
            _refuse("cpu", "the compiled library", reason)
        _choose("cpu", "reference", reason)
        return
    if forced_isa := os.environ.get("NF4TENSOR_ISA"):
        native.use_isa(forced_isa)
    _choose("cpu", "cpu", f"compiled library, {native.isa()}")


def _choose_for_cuda(backend: str, capabilities: Sequence[tuple[int, int]] = ()) -> None:
    """Choose what all devices can run, or any would, where none are given."""
    reason = f"NF4TENSOR_BACKEND={backend}" if backend in ("reference", "triton") else None
    reason = reason or native.cuda_unavailable_because(capabilities)
    if reason is None:
        _choose("cuda", "cuda", "compiled library")
        return
    if backend == "cuda":
        _refuse("cuda", "the compiled kernels", reason)
    version = torch.version.cuda or torch.version.hip  # torch calls both devices "cuda"
    why_not = _why_not_triton(backend, version, "CUDA or ROCm", capabilities)
    _choose_triton_or_reference("cuda", why_not, reason)


def _why_not_triton(
    backend: str,
    version: str | None,
    platform: str,
    capabilities: Sequence[tuple[int, int]] = (),
) -> str | None:
    if backend == "reference":
        return "NF4TENSOR_BACKEND=reference"
    if version is None:
        return f"this torch is not built for {platform}"
    return triton_backend.unavailable_because(capabilities)


def _choose_triton_or_reference(device: str, why_not: str | None, because: str = "") -> None:
    _choose(device, "reference", why_not or "not in Triton")
    if why_not is None:
        reason = f"Triton; {because}" if because else "Triton"
        for name in _TRITON:
            _choices[name, device] = Choice(name, device, "triton", reason)


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
