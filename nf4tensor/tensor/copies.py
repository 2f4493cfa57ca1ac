"""Copies and moves: the same copy of the record, byte for byte.

A shard that FSDP2 padded keeps its padding on the way. The logical dtype changes without touching
a byte.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nf4tensor import _versions
from nf4tensor.errors import DTypeError, UnsupportedError
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from nf4tensor.tensor import fallback
from nf4tensor.tensor.dispatch import implements
from nf4tensor.tensor.nf4_tensor import NF4Tensor

aten = torch.ops.aten


def _copy(
    tensor: NF4Tensor, copy: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> NF4Tensor:
    """Copy or move the record, with the padding behind it."""
    if tensor.padded is None:
        return tensor.with_record(copy(tensor.record), dtype=dtype)
    padded = copy(tensor.padded)
    is_padding = tensor.padded is tensor.record
    record = padded if is_padding else padded[: tensor.record.shape[0]]
    return tensor.with_record(record, dtype=dtype, padded=padded)


@implements(aten.clone.default, aten._pin_memory.default)
def clone(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy the record; only a transposed view that must become contiguous is decoded."""
    tensor = args[0]
    memory_format = kwargs.get("memory_format")
    if tensor.view_kind == "transposed" and memory_format == torch.contiguous_format:
        return fallback.decode(op, args, kwargs)
    return _copy(tensor, lambda record: op(record, *args[1:], **kwargs))


@implements(aten._to_copy.default)
def to_copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Move the record; float dtypes change the logical dtype and no byte, others decode.

    Raises:
        DTypeError: A module is converted to one of the others, which would leave it dense.
        UnsupportedError: Accelerate would load it in a way that leaves ranks with other bytes.
    """
    tensor = args[0]
    if torch.device(kwargs.get("device") or tensor.device).type == "meta":
        _refuse_to_be_dropped()
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in WEIGHT_DTYPES:
        if _versions.is_converting_module():
            raise DTypeError(
                f"a 4-bit weight cannot be converted to {dtype}, only to float32, bfloat16 or "
                "float16: call dequantize_(model) before model.to(dtype)"
            )
        return fallback.decode(op, args, kwargs)
    moving = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
    return _copy(tensor, lambda record: op(record, **moving), dtype)


def _refuse_to_be_dropped() -> None:
    if _versions.is_dropped_by_accelerate():
        raise UnsupportedError(
            "Accelerate's cpu_ram_efficient_loading would send 4-bit weights as dense ones: import "
            "nf4tensor.integrations.accelerate, or set cpu_ram_efficient_loading to false"
        )


@implements(aten.is_pinned.default, aten.record_stream.default)
def ask_record(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass a question about memory on to the record."""
    return op(args[0].record, *args[1:], **kwargs)


@implements(aten.is_set_to.default)
def is_set_to(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether two tensors are the same look at the same record."""
    one, other = args
    are_alike = isinstance(one, NF4Tensor) and isinstance(other, NF4Tensor)
    return are_alike and one.view_kind == other.view_kind and op(one.record, other.record)
