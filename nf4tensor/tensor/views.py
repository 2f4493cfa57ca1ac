"""Other looks at the same rows: nothing is copied or decoded.

Leading dimensions are reshaped on the record. That the last two are swapped, or all are flattened,
is a flag of the tensor (`NF4Tensor.view_kind`). What would cut a row raises.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor import fallback
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


def _all_of(tensor: NF4Tensor, view: str | None = None) -> NF4Tensor:
    """Return another tensor over the same record, with the padding behind it."""
    record = tensor.record.detach()
    padded = record if tensor.padded is tensor.record else tensor.padded
    return tensor.with_record(record, view=view, padded=padded)


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Return another tensor over the same record."""
    return _all_of(args[0])


@implements(aten.unsqueeze.default)
def unsqueeze(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Insert a leading dimension."""
    tensor, dim = args
    dim = normalize_dim(dim, tensor.dim() + 1)
    num_leading = {"rows": tensor.dim(), "transposed": tensor.dim() - 1, "flat": 0}
    if dim >= num_leading[tensor.view_kind]:
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(op(tensor.record, dim))


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Remove leading dimensions of length 1."""
    tensor = args[0]
    dims = args[1] if len(args) > 1 else range(tensor.dim())
    dims = (dims,) if isinstance(dims, int) else dims
    dims = {normalize_dim(dim, tensor.dim()) for dim in dims}
    dims = {dim for dim in dims if tensor.shape[dim] == 1}
    num_leading = {"rows": tensor.dim() - 1, "transposed": tensor.dim() - 2, "flat": 0}
    if any(dim >= num_leading[tensor.view_kind] for dim in dims):
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(tensor.record.squeeze(tuple(dims)))


@implements(aten.expand.default)
def expand(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Repeat leading dimensions without copying."""
    tensor, size = args[:2]
    if tensor.view_kind != "rows" or not size or size[-1] not in (-1, tensor.shape[-1]):
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(op(tensor.record, (*size[:-1], tensor.spec.pitch)))


@implements(aten.t.default)
def t(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Swap rows and columns as a view."""
    tensor = args[0]
    return _all_of(tensor) if tensor.dim() == 1 else permuted(tensor, (1, 0), op, args, kwargs)


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
    num_dims = tensor.dim()
    if sorted(order) != list(range(num_dims)):
        return fallback.decode(op, args, kwargs)  # torch's own error
    if list(order) == list(range(num_dims)):
        return _all_of(tensor)
    if tensor.view_kind == "transposed":  # in terms of the record's own dimensions
        swap = [*range(num_dims - 2), num_dims - 1, num_dims - 2]
        order = [swap[dim] for dim in order]
    columns = num_dims - 1
    if columns not in order[-2:]:
        return fallback.decode(op, args, kwargs)
    view = "rows" if order[-1] == columns else "transposed"
    leading = [dim for dim in order if dim != columns]
    return tensor.with_record(tensor.record.permute([*leading, columns]), view=view)


@implements(aten.view.default, aten._unsafe_view.default)
def view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Reshape leading dimensions, flatten to one dimension, or come back from it."""
    tensor, size = args
    size = _infer(list(size), tensor)
    if list(tensor.shape) == size:
        return _all_of(tensor)
    if tensor.view_kind != "transposed":
        if size and size[-1] == tensor.spec.in_features:
            record = tensor.record.view(*size[:-1], tensor.spec.pitch)
            return tensor.with_record(record, view="rows")
        if size == [tensor.numel()] and tensor.record.is_contiguous():
            return _all_of(tensor, view="flat")
    raise UnsupportedError(
        f"view of an NF4Tensor of shape {tuple(tensor.shape)} as {tuple(size)} would cut its rows "
        f"of {tensor.spec.in_features}: call dequantize() first, or keep the last dimension"
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
    starts_at_first = not bound["storage_offset"] and tuple(bound["stride"]) == tuple(contiguous)
    if tensor.view_kind == "rows" and tensor.is_contiguous() and starts_at_first:
        if size == list(tensor.shape):
            return _all_of(tensor)
        if tensor.dim() > 1 and size[1:] == list(tensor.shape[1:]) and size[0] < tensor.shape[0]:
            return tensor.with_record(tensor.record[: size[0]])
    return fallback.decode(op, args, kwargs)
