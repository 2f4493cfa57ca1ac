"""Choosing and joining rows: the same operation on the record.

Nothing is decoded. What reaches into columns goes to `columns.py`, what has no meaning on records
to `fallback.py`; views of all rows are in `views.py`, copies in `copies.py`.
"""

from typing import Any

import torch
from torch import Tensor

from nf4tensor import _versions
from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor import collectives, columns, fallback
from nf4tensor.tensor.dispatch import bind, implements
from nf4tensor.tensor.nf4_tensor import NF4Tensor
from nf4tensor.tensor.views import normalize_dim

aten = torch.ops.aten
# Pieces of the first of each pair would not tell autograd what is written into them.
_SAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


@implements(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.index_select.default,
    aten.unbind.int,
)
def on_one_dim(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an op along one leading dimension to the record."""
    op = _SAFE.get(op, op)
    tensor = args[0]
    bound = bind(op, args, kwargs)
    dim = normalize_dim(bound.pop("dim"), tensor.dim())
    if tensor.view_kind == "flat":
        return _on_flat(op, args, kwargs)
    if tensor.view_kind == "transposed" and dim >= tensor.dim() - 2:
        return fallback.decode(op, args, kwargs)
    if dim == tensor.dim() - 1:
        return columns.on_last_dim(op, args, kwargs)
    result = op(tensor.record, dim=dim, **{k: v for k, v in bound.items() if k != "self"})
    if isinstance(result, Tensor):
        return tensor.with_record(result, padded=_padding_behind(op, tensor, dim, bound))
    return [tensor.with_record(piece) for piece in result]


def _padding_behind(op: Any, tensor: NF4Tensor, dim: int, bound: dict[str, Any]) -> Tensor | None:
    """Keep the padded record behind the first rows of what `new_zeros` made, and of nothing else.

    FSDP2 fills such a tensor and shards its first rows, and may slice all rows of a shard again; a
    user's `q[:10]` never sends the rows of its parent.
    """
    if op is not aten.slice.Tensor or dim != 0 or bound["start"] or bound["step"] != 1:
        return None
    takes_all = bound["end"] is None or bound["end"] >= tensor.shape[0]
    return tensor.padded if takes_all or tensor.padded is tensor.record else None


def _on_flat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slice or split a flat view between rows; anything else decodes.

    DistributedDataParallel takes apart in this way what it broadcast.
    """
    bound = bind(op, args, kwargs)
    tensor = bound["self"]
    num_columns, num_weights = tensor.spec.in_features, tensor.numel()
    rows = tensor.record.view(-1, tensor.spec.pitch)
    if op is aten.slice.Tensor and bound["step"] == 1:
        start, stop, _ = slice(bound["start"], bound["end"]).indices(num_weights)
        if start % num_columns == 0 and (stop % num_columns == 0 or stop <= start):
            return tensor.with_record(rows[start // num_columns : stop // num_columns])
    if op is aten.split_with_sizes.default:
        sizes = bound["split_sizes"]
        if sum(sizes) == num_weights and all(size % num_columns == 0 for size in sizes):
            pieces = rows.split([size // num_columns for size in sizes])
            return [tensor.with_record(piece) for piece in pieces]
    return fallback.decode(op, args, kwargs)


@implements(aten.index.Tensor)
def index(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Gather rows by indices or masks over leading dimensions."""
    tensor, indices = args
    if not isinstance(tensor, NF4Tensor) or tensor.view_kind != "rows":
        return fallback.decode(op, args, kwargs)
    covered = sum(
        i.dim() if i is not None and i.dtype in (torch.bool, torch.uint8) else 1 for i in indices
    )
    if covered >= tensor.dim():
        return fallback.decode(op, args, kwargs)
    return tensor.with_record(op(tensor.record, indices))


@implements(aten.embedding.default)
def embedding(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Gather rows, then decode only those."""
    weight, indices = args[:2]
    if not isinstance(weight, NF4Tensor) or weight.view_kind != "rows" or weight.dim() != 2:
        return fallback.decode(op, args, kwargs)
    return weight.with_record(op(weight.record, indices)).decode()


@implements(aten.cat.default, aten.stack.default)
def cat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Put rows of one spec together; columns are joined by `columns.py`."""
    bound = bind(op, args, kwargs)
    tensors, dim = bound["tensors"], bound["dim"]
    if op is aten.cat.default:  # which passes over empty tensors of one dimension
        tensors = [t for t in tensors if t.shape != (0,)] or tensors
    quantized = [tensor for tensor in tensors if isinstance(tensor, NF4Tensor)]
    if not quantized or len({tensor.dtype for tensor in bound["tensors"]}) > 1:
        return fallback.decode(op, args, kwargs)
    first = quantized[0]
    if op is aten.cat.default and any(tensor.view_kind == "flat" for tensor in quantized):
        return _cat_flat(op, tensors)
    alike = len(quantized) == len(tensors) and all(
        tensor.dim() == first.dim() and tensor.view_kind == "rows" for tensor in quantized
    )
    if not alike:
        return fallback.decode(op, args, kwargs)
    dim = normalize_dim(dim, first.dim() + (op is aten.stack.default))
    if op is aten.cat.default and dim == first.dim() - 1:
        return columns.cat(tensors)
    if dim >= first.dim() or any(t.spec != first.spec for t in tensors):
        return fallback.decode(op, args, kwargs)
    return first.with_record(op([t.record for t in tensors], dim))


def _cat_flat(op: Any, tensors: list[Tensor]) -> NF4Tensor:
    """Put flat views together, which is how DistributedDataParallel broadcasts.

    Raises:
        UnsupportedError: They are not all of one spec: what is made of them would be quantized
            again when it is taken apart.
    """
    kinds = {(t.view_kind, t.spec) if isinstance(t, NF4Tensor) else None for t in tensors}
    if len(kinds) > 1 and _versions.is_broadcasting_state():
        return op(collectives.poisoned(tensors))  # refused on arrival, by every rank
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{op} of a flat NF4Tensor with dense tensors or other specs would have to decode it: "
            "pass init_sync=False to DistributedDataParallel, use fully_shard in place of "
            "FullyShardedDataParallel, or call dequantize() first"
        )
    rows = [tensor.record.view(-1, tensor.spec.pitch) for tensor in tensors]
    return tensors[0].with_record(torch.cat(rows))
