"""New tensors that look like an NF4Tensor: rows of the same spec where a size has such rows.

Zeros are zero rows of the format, which decode to +0.0, never records of zero bytes. What has no
rows of this spec becomes a dense tensor, without decoding anything.
"""

from typing import Any

import torch
from torch import Tensor

from nf4tensor.kernels import ops
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from nf4tensor.tensor import fallback
from nf4tensor.tensor.dispatch import bind, implements

aten = torch.ops.aten


def like_dense(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make a new dense tensor like an NF4Tensor, without decoding it."""
    tensor, *rest = args
    template = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return op(template, *rest, **kwargs)


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

    `new_zeros` writes zero rows, which decode to +0.0, and remembers that it made them.
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
    if op is aten.new_zeros.default:
        record = ops.zero_record(lead, tensor.spec, device)
        return tensor.with_record(record, dtype=dtype, view=view, padded=record)
    record = torch.empty(*lead, tensor.spec.pitch, dtype=torch.uint8, device=device)
    return tensor.with_record(record, dtype=dtype, view=view)


@implements(aten.constant_pad_nd.default)
def pad(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Add zero rows in front of or behind leading dimensions."""
    bound = bind(op, args, kwargs)
    tensor, padding = bound["self"], list(bound["pad"])
    if tensor.view_kind != "rows" or any(padding[:2]) or bound["value"] != 0 or min(padding) < 0:
        return fallback.decode(op, args, kwargs)
    padding += [0] * (2 * tensor.dim() - len(padding))
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
