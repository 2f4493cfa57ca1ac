"""The Triton kernels as `select.py` calls them, for GPUs that the compiled library has none for.

Triton is imported by the first call, never with the package. The caller has checked arguments;
what is not contiguous is copied here. A kernel is compiled by the first call that needs it, so a
CUDA graph can capture calls like those that were made before.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels.reference import multiply

# That torch.compile asks of devices for Triton, too.
OLDEST_CAPABILITY = (7, 0)


def unavailable_because(capabilities: Sequence[tuple[int, int]] = ()) -> str | None:
    """Return why the kernels cannot be used, or None when they can; imports nothing.

    Args:
        capabilities: Of the CUDA devices in question, such as (9, 0).
    """
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'nf4tensor[triton]'"
    for index, capability in enumerate(capabilities):
        if capability < OLDEST_CAPABILITY:
            return ("device {} has compute capability {}.{}, and Triton's code needs {}.{}").format(
                index, *capability, *OLDEST_CAPABILITY
            )
    return None


def dequantize(record: Tensor, spec: NF4Spec, dtype: torch.dtype) -> Tensor:
    """Return the weight `[*lead, in_features]` of a record `[*lead, pitch]` in `dtype`."""
    out = torch.empty(*record.shape[:-1], spec.in_features, dtype=dtype, device=record.device)
    dequantize_into(record, spec, out)
    return out


def dequantize_into(record: Tensor, spec: NF4Spec, out: Tensor) -> None:
    """Decode a record `[*lead, pitch]` into `out` `[*lead, in_features]`, in its dtype."""
    from nf4tensor.kernels import triton_dequantize

    target = out if out.is_contiguous() else out.new_empty(out.shape)
    with _on_device_of(record):
        triton_dequantize.dequantize_into(record.contiguous(), spec, target)
    if target is not out:
        out.copy_(target)


def linear(input: Tensor, record: Tensor, spec: NF4Spec, bias: Tensor | None = None) -> Tensor:
    """Return `input @ W.T + bias`, W decoded to the input's dtype; stacks of W broadcast.

    Few inputs are multiplied while W is decoded; for more, W is decoded first and torch multiplies.
    """
    from nf4tensor.kernels import triton_linear

    if triton_linear.can_fuse(input, record, spec):
        bias = None if bias is None else bias.contiguous()
        with _on_device_of(record):
            return triton_linear.linear(input.contiguous(), record.contiguous(), spec, bias)
    return multiply(input, dequantize(record, spec, input.dtype), bias)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    # Triton launches on the current device.
    if tensor.device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(tensor.device).device(tensor.device)
