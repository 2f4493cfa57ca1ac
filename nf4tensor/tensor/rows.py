"""Operations that leave the last dimension alone: the same operation on the record.

Views alias the record, copies copy its bytes, and nothing is decoded. What reaches into columns
goes to `columns.py`, what has no meaning on records to `fallback.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import UnsupportedError
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from nf4tensor.tensor import columns, fallback
from nf4tensor.tensor.dispatch import bind, implements
from nf4tensor.tensor.nf4_tensor import NF4Tensor

aten = torch.ops.aten


def normalize_dim(dim: int, num_dims: int) -> int:
    """Return a dimension counted from the front, or refuse it as torch does."""
    if not -num_dims <= dim < num_dims:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-num_dims}, {num_dims - 1}], "
            f"but got {dim})"
        )
    return dim % num_dims


@implements(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.index_select.default,
    aten.unbind.int,
    aten.squeeze.dim,
)
def on_one_dim(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an op along one leading dimension to the record."""
    tensor = args[0]
    bound = bind(op, args, kwargs)
    dim = normalize_dim(bound.pop("dim"), tensor.dim())
    if tensor.view_kind != "rows":
        return fallback.decode(op, args, kwargs)
    if dim == tensor.dim() - 1:
        return columns.on_last_dim(op, args, kwargs)
    result = op(tensor.record, dim=dim, **{k: v for k, v in bound.items() if k != "self"})
    if isinstance(result, Tensor):
        return tensor.with_record(result, padded=_padding_behind(op, tensor, dim, bound))
    return [tensor.with_record(piece) for piece in result]


def _padding_behind(op: Any, tensor: NF4Tensor, dim: int, bound: dict[str, Any]) -> Tensor | None:
    """Keep the padded record behind the first rows of what `new_zeros` made, and of nothing else.

    FSDP2 fills such a tensor and shards its first rows; a user's `q[:10]` never sends the rows of
    its parent.
    """
    if op is aten.slice.Tensor and dim == 0 and not bound["start"] and bound["step"] == 1:
        return tensor.padded
    return None


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Return another tensor over the same record."""
    tensor = args[0]
    return tensor.with_record(op(tensor.record), padded=tensor.padded)


def _copy(
    tensor: NF4Tensor, copy: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> NF4Tensor:
    """Copy or move the record, with the padding behind it."""
    if tensor.padded is None:
        return tensor.with_record(copy(tensor.record), dtype=dtype)
    padded = copy(tensor.padded)
    return tensor.with_record(padded[: tensor.record.shape[0]], dtype=dtype, padded=padded)


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
    """Move the record; float dtypes change the logical dtype and no byte, others decode."""
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in WEIGHT_DTYPES:
        return fallback.decode(op, args, kwargs)
    moving = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
    return _copy(tensor, lambda record: op(record, **moving), dtype)


@implements(aten.is_pinned.default, aten.record_stream.default)
def ask_record(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass a question about memory on to the record."""
    return op(args[0].record, *args[1:], **kwargs)


@implements(aten.unsqueeze.default)
def unsqueeze(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Insert a leading dimension."""
    tensor, dim = args
    dim = normalize_dim(dim, tensor.dim() + 1)
    if tensor.view_kind != "rows" or dim == tensor.dim():
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(op(tensor.record, dim))


@implements(aten.expand.default)
def expand(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Repeat leading dimensions without copying."""
    tensor, size = args[:2]
    if tensor.view_kind != "rows" or size[-1] not in (-1, tensor.shape[-1]):
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(op(tensor.record, (*size[:-1], tensor.spec.pitch)))


@implements(aten.t.default)
def t(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Swap rows and columns as a view."""
    return args[0] if args[0].dim() == 1 else permuted(args[0], (1, 0), op, args, kwargs)


@implements(aten.transpose.int)
def transpose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Swap two dimensions as a view."""
    tensor = args[0]
    order = list(range(tensor.dim()))
    first, second = (normalize_dim(dim, tensor.dim()) for dim in args[1:3])
    order[first], order[second] = order[second], order[first]
    return permuted(tensor, order, op, args, kwargs)


@implements(aten.permute.default)
def permute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reorder dimensions as a view."""
    tensor = args[0]
    order = [normalize_dim(dim, tensor.dim()) for dim in args[1]]
    return permuted(tensor, order, op, args, kwargs)


def permuted(
    tensor: NF4Tensor, order: Sequence[int], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Reorder dimensions: leading ones on the record, the last two as a flag."""
    order = list(order)
    num_dims = tensor.dim()
    identity = list(range(num_dims))
    if tensor.view_kind != "flat":
        if order == identity:
            return tensor.with_record(tensor.record.detach())
        if num_dims > 1 and order == [*identity[:-2], num_dims - 1, num_dims - 2]:
            view = "rows" if tensor.view_kind == "transposed" else "transposed"
            return tensor.with_record(tensor.record.detach(), view=view)
        if tensor.view_kind == "rows" and sorted(order) == identity and order[-1] == num_dims - 1:
            return tensor.with_record(tensor.record.permute(order))
    return fallback.decode(op, args, kwargs)


@implements(aten.view.default, aten._unsafe_view.default)
def view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reshape leading dimensions, flatten to one dimension, or come back from it."""
    tensor, size = args
    size = _infer(list(size), tensor)
    if list(tensor.shape) == size:
        return tensor.with_record(tensor.record.detach(), padded=tensor.padded)
    if tensor.view_kind != "transposed":
        if size == [tensor.numel()] and tensor.record.is_contiguous():
            view = "rows" if tensor.record.dim() == 1 else "flat"
            return tensor.with_record(tensor.record.detach(), view=view, padded=tensor.padded)
        if size and size[-1] == tensor.spec.in_features:
            record = tensor.record.view(*size[:-1], tensor.spec.pitch)
            return tensor.with_record(record, view="rows")
    raise UnsupportedError(
        f"view of an NF4Tensor of shape {tuple(tensor.shape)} as {tuple(size)} would cut its rows "
        "of "
        f"{tensor.spec.in_features}: call dequantize() first, or keep the last dimension"
    )


def _infer(size: list[int], tensor: NF4Tensor) -> list[int]:
    if -1 not in size:
        return size
    known = 1
    for length in size:
        known *= 1 if length == -1 else length
    return [tensor.numel() // max(known, 1) if length == -1 else length for length in size]


@implements(aten.as_strided.default)
def as_strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Take the first rows of a contiguous tensor, which is how FSDP2 drops its padding."""
    bound = bind(op, args, kwargs)
    tensor, size = bound["self"], list(bound["size"])
    contiguous = torch._prims_common.make_contiguous_strides_for(size)
    is_prefix = (
        tensor.view_kind == "rows"
        and tensor.is_contiguous()
        and size[1:] == list(tensor.shape[1:])
        and (not bound["storage_offset"])
        and tuple(bound["stride"]) == tuple(contiguous)
    )
    if not is_prefix or tensor.dim() == 1 or size[0] > tensor.shape[0]:
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(tensor.record[: size[0]])


@implements(aten.index.Tensor)
def index(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Gather rows by indices or masks over leading dimensions."""
    tensor, indices = args
    if not isinstance(tensor, NF4Tensor) or tensor.view_kind != "rows":
        return fallback.decode(op, args, kwargs)
    covered = sum(i.dim() if i is not None and i.dtype == torch.bool else 1 for i in indices)
    if covered >= tensor.dim():
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(op(tensor.record, indices))


@implements(aten.embedding.default)
def embedding(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Gather rows, then decode only those."""
    weight, indices = args[:2]
    if not isinstance(weight, NF4Tensor) or weight.view_kind != "rows":
        return fallback.decode(op, args, kwargs)
    return weight.with_record(op(weight.record, indices)).dequantize()


@implements(aten.cat.default, aten.stack.default)
def cat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Put rows of one spec together; columns are joined by `columns.py`."""
    bound = bind(op, args, kwargs)
    tensors, dim = bound["tensors"], bound["dim"]
    first = tensors[0]
    alike = all(isinstance(t, NF4Tensor) and t.dtype == first.dtype for t in tensors) and all(
        t.view_kind == first.view_kind != "transposed" for t in tensors
    )
    if not alike:
        return fallback.decode(op, args, kwargs)
    dim = normalize_dim(dim, first.dim() + (op is aten.stack.default))
    if first.view_kind == "flat":
        return _cat_flat(op, args, kwargs)
    if op is aten.cat.default and dim == first.dim() - 1:
        return columns.cat(op, args, kwargs)
    if dim >= first.dim() or any(t.spec != first.spec for t in tensors):
        return fallback.decode(op, args, kwargs)
    return first.with_record(op([t.record for t in tensors], dim))


def _cat_flat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensors = args[0]
    if op is not aten.cat.default or any(t.spec != tensors[0].spec for t in tensors):
        return fallback.decode(op, args, kwargs)
    rows = [t.record.view(-1, t.spec.pitch) for t in tensors]
    return tensors[0].with_record(torch.cat(rows))
