"""Writing into 4-bit storage: bytes between equal specs, and floats that are quantized.

Whatever cannot be written through raises: into columns of a row, into a copied cut, into another
spec. Float writes warn once that they round.
"""

from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import ShapeError, SpecError, UnsupportedError
from nf4tensor.kernels import ops
from nf4tensor.tensor import fallback, gradient
from nf4tensor.tensor.dispatch import bind, implements, overrides
from nf4tensor.tensor.nf4_tensor import NF4Tensor
from nf4tensor.tensor.quantize import check_finite

aten = torch.ops.aten


@implements(
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.add_.Scalar,
    aten.sub_.Scalar,
    aten.mul_.Scalar,
    aten.div_.Scalar,
)
def arithmetic_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Decode, compute and quantize again, keeping the phase of each row."""
    target = args[0]
    if not isinstance(target, NF4Tensor):
        return fallback.decode(op, args, kwargs)
    _prepare_float_write(str(op), target)
    rest, kwargs = fallback.dense(args[1:]), fallback.dense(kwargs)
    write(target, op(target.decode(), *rest, **kwargs))
    return target


@implements(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
def fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fill whole rows with one value."""
    target = args[0]
    if not isinstance(target, NF4Tensor):
        return fallback.decode(op, args, kwargs)
    write(target, op(target.decode(), *fallback.dense(args[1:])))
    return target


@implements(aten.index_put_.default)
def index_put_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Write whole rows, chosen by indices or masks over leading dimensions.

    Raises:
        UnsupportedError: The indices reach into columns, or rows would be added up.
    """
    bound = bind(op, args, kwargs)
    target, indices, values = bound["self"], bound["indices"], bound["values"]
    if not isinstance(target, NF4Tensor):
        return fallback.decode(op, args, kwargs)
    refuse_cut(target)
    key = tuple(slice(None) if index is None else index for index in indices)
    if target.view_kind != "rows" or _reaches_columns(key, target) or bound["accumulate"]:
        fallback.refuse_write(op)
    rows = target[key].clone()
    rows.copy_(values)
    op(target.record, indices, rows.record)
    gradient.count_write(target.record)
    _mark_filled(target)
    return target


@implements(aten.copy_.default)
def copy_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy bytes between equal specs, quantize a float source, decode into a dense target.

    Raises:
        SpecError: Both are quantized, with different specs.
        UnsupportedError: The views differ, or a float source would be accumulated.
    """
    target, source = args[:2]
    if not isinstance(target, NF4Tensor):
        return op(target, source.decode(), *args[2:], **kwargs)
    if not isinstance(source, NF4Tensor):
        _prepare_float_write("copy_ of a float tensor", target, copies=True)
        write(target, source)
        _mark_filled(target)
        return target
    _check_same_kind(target, source)
    refuse_cut(target)
    records = [target.record, source.record]
    if target.view_kind == "flat":
        records = [record.view(-1, target.spec.pitch) for record in records]
    op(*records, *args[2:], **kwargs)
    gradient.count_write(target.record)
    _mark_filled(target)
    return target


def _mark_filled(target: NF4Tensor) -> None:
    if target.new_rows is not None:
        target.new_rows.is_filled = True


def _check_same_kind(target: NF4Tensor, source: NF4Tensor) -> None:
    if source.spec != target.spec:
        raise SpecError(
            f"cannot copy {source.spec} into {target.spec} without quantizing again: load with "
            "assign=True, or copy source.dequantize()"
        )
    if source.view_kind != target.view_kind:
        raise UnsupportedError(
            f"cannot copy a {source.view_kind} view into a {target.view_kind} view of an "
            "NF4Tensor: copy the tensors that they are views of"
        )
    if target.view_kind == "flat" and source.shape != target.shape:
        raise ShapeError(
            f"cannot copy {source.numel()} flat weights into {target.numel()}: flat views are "
            "never broadcast"
        )


def _prepare_float_write(what: str, target: NF4Tensor, copies: bool = False) -> None:
    """Refuse cuts and accumulators, and warn once that a float write loses small changes."""
    refuse_cut(target)
    new = target.new_rows
    # Not of the empty shard of one rank, where the others' shards are filled; and `to_empty` makes
    # what is to be loaded, while zeros are made to be added to.
    if new is not None and not new.is_filled and target.numel() > 0:
        if not copies or new.maker == "new_zeros":
            raise UnsupportedError(
                f"{what} into what {new.maker} made of an NF4Tensor would quantize at every step: "
                "make the accumulator with torch.zeros, or compute on dequantize()"
            )
    fallback.warn_once(
        f"round {what}",
        f"{what} into an NF4Tensor rounds to 4 bits and loses small changes; to merge adapters, "
        "merge into dequantize()",
    )


def refuse_cut(target: NF4Tensor) -> None:
    """Stop a write into a copy of some columns, which nobody would see.

    Raises:
        UnsupportedError: The target is such a cut.
    """
    if target.is_cut:
        raise UnsupportedError(
            "writing into a column slice of an NF4Tensor would change a copy: clone() it first, or "
            "write whole rows (a checkpoint of column shards loads into the same column shards)"
        )


def write(target: NF4Tensor, source: Tensor) -> None:
    """Quantize a float tensor into the rows of a target.

    Raises:
        ShapeError: The source does not broadcast to the target.
        UnsupportedError: The target is a cut, a copy that nobody would see changed.
        WeightError: The source has NaN or infinite elements.
    """
    refuse_cut(target)
    if _has_shared_rows(target.record):
        raise UnsupportedError(
            "writing into an expanded NF4Tensor, where more than one element refers to one place "
            "in memory: clone() it first"
        )
    try:
        source = source.expand(target.shape)
    except RuntimeError as error:
        raise ShapeError(
            f"cannot write a tensor of shape {tuple(source.shape)} into an NF4Tensor of shape "
            f"{tuple(target.shape)}"
        ) from error
    source = source.mT if target.view_kind == "transposed" else source
    size = (*target.record.shape[:-1], target.spec.in_features)
    source = source.to(device=target.device).reshape(size)
    if not source.is_floating_point():
        source = source.to(target.dtype)
    check_finite(source)
    ops.quantize_into(source, target.spec, target.record)
    gradient.count_write(target.record)


def _has_shared_rows(record: Tensor) -> bool:
    sizes_and_strides = zip(record.shape, record.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in sizes_and_strides)


@overrides(torch.Tensor.__setitem__)
def setitem(tensor: Any, key: Any, value: Any) -> Any:
    """Let whole rows be assigned and refuse anything that would write into a decoded copy.

    Raises:
        UnsupportedError: The key reaches into columns.
    """
    if not isinstance(tensor, NF4Tensor):
        return NotImplemented
    if tensor.view_kind != "rows" or _reaches_columns(key, tensor):
        raise UnsupportedError(
            f"assigning to {key} of an NF4Tensor of shape {tuple(tensor.shape)} would cut its "
            "rows: assign whole rows, or change dequantize() and quantize that"
        )
    return NotImplemented


def _reaches_columns(key: Any, tensor: NF4Tensor) -> bool:
    keys = [k for k in (key if isinstance(key, tuple) else (key,)) if k is not None]
    num_indexed = sum(
        k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else k is not Ellipsis
        for k in keys
    )
    has_ellipsis = any(k is Ellipsis for k in keys)
    if not keys or keys[-1] is Ellipsis or (num_indexed < tensor.dim() and not has_ellipsis):
        return False
    last, num_columns = keys[-1], tensor.shape[-1]
    return not isinstance(last, slice) or last.indices(num_columns) != (0, num_columns, 1)
