"""New tensors that look like an NF4Tensor: rows of the same spec where a size has such rows.

Zeros are zero rows of the format, which decode to +0.0, never records of zero bytes. What has no
rows of this spec becomes a dense tensor, without decoding anything.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nf4tensor.kernels import ops
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from nf4tensor.tensor import fallback
from nf4tensor.tensor.dispatch import bind, implements, overrides
from nf4tensor.tensor.nf4_tensor import NewRows, NF4Tensor

aten = torch.ops.aten


def like_dense(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make a new dense tensor like an NF4Tensor, strides included, without decoding it."""
    tensor, *rest = args
    size, stride = tensor.shape, tensor.stride()
    template = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    return op(template, *rest, **{**kwargs, "device": kwargs.get("device") or tensor.device})


_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
implements(*_LIKE)(like_dense)


@implements(aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default)
def new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make rows of the same spec where the size has such rows, else a dense tensor.

    They are zero rows, also where any bytes would do: a float write keeps the phase of a row, so
    there must be one. What `new_zeros` made is remembered: FSDP2 pads with it.
    """
    tensor = args[0]
    size = list(tensor.shape) if op is aten.empty_like.default else list(args[1])
    dtype = kwargs.get("dtype") or tensor.dtype
    device = torch.device(kwargs.get("device") or tensor.device)
    is_empty_chunk = size == [0]
    if dtype not in WEIGHT_DTYPES or tensor.view_kind != "rows":
        return like_dense(op, args, kwargs)
    if not is_empty_chunk and (len(size) != tensor.dim() or size[-1] != tensor.shape[-1]):
        return like_dense(op, args, kwargs)
    lead = (0,) if is_empty_chunk else tuple(size[:-1])
    view = "flat" if is_empty_chunk else "rows"
    record = ops.zero_record(lead, tensor.spec, device)
    if kwargs.get("pin_memory"):
        record = record.pin_memory()
    made = tensor.with_record(record, dtype=dtype, view=view)
    made.new_rows = NewRows(op._opname)
    if op is aten.new_zeros.default:
        made.padded = record
    return made


@overrides(F.pad)
def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Decode for modes that torch fills column by column into what `new_empty` made."""
    if mode == "constant" or not isinstance(input, NF4Tensor):
        return NotImplemented
    fallback.warn_decoded(f"{mode} padding")
    return F.pad(input.dequantize(), pad, mode, value)


@implements(aten.constant_pad_nd.default)
def pad(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Add zero rows in front of or behind leading dimensions."""
    bound = bind(op, args, kwargs)
    tensor, padding = bound["self"], list(bound["pad"])
    missing = 2 * tensor.dim() - len(padding)
    if tensor.view_kind != "rows" or any(padding[:2]) or bound["value"] != 0 or missing < 0:
        return fallback.decode(op, args, kwargs)
    if min(padding, default=0) < 0:
        return fallback.decode(op, args, kwargs)
    padding += [0] * missing
    before, after = padding[::2][::-1][:-1], padding[1::2][::-1][:-1]
    lead = tensor.record.shape[:-1]
    padded = ops.zero_record(
        tuple(b + n + a for b, n, a in zip(before, lead, after, strict=True)),
        tensor.spec,
        tensor.device,
    )
    inside = padded
    for dim, (start, length) in enumerate(zip(before, lead, strict=True)):
        inside = inside.narrow(dim, start, length)
    inside.copy_(tensor.record)
    return tensor.with_record(padded)
