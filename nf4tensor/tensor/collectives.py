"""Collectives that move rows: the same collective on the record.

Gathering, scattering and broadcasting keep every byte; a reduction has no meaning on codes and is
refused by `fallback.py`. What is refused here is refused on every rank, before anything is sent.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nf4tensor import _versions
from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor.dispatch import implements
from nf4tensor.tensor.nf4_tensor import NF4Tensor
from nf4tensor.tensor.writes import refuse_cut


@implements("_c10d_functional::all_gather_into_tensor")
def all_gather(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Gather the records of all ranks, one below the other."""
    _check_can_be_stacked(op, args[0])
    return functional(op, args, kwargs)


@implements("_c10d_functional::broadcast")
def functional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Run a functional collective on the record and look at its result in the same way."""
    tensor = args[0]
    return tensor.with_record(op(tensor.record.contiguous(), *args[1:], **kwargs))


@implements("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
def wait(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Wait for the record at once, so that none is ever saved or pickled while it is filled."""
    tensor = args[0]
    return tensor.with_record(torch.ops._c10d_functional.wait_tensor.default(tensor.record))


@implements("c10d::_allgather_base_")
def all_gather_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the records of all ranks into one tensor."""
    for tensor in args[:2]:
        if isinstance(tensor, NF4Tensor):
            _check_can_be_stacked(op, tensor)
    return in_place(op, args, kwargs)


@implements(
    "c10d::broadcast_",
    "c10d::scatter_",
    "c10d::gather_",
    "c10d::allgather_",
    "c10d::alltoall_",
    "c10d::send",
    "c10d::recv_",
    "c10d::recv_any_source_",
)
def in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective that fills given tensors on their records; every tensor must be one.

    Raises:
        UnsupportedError: Some are dense, or cuts, which are copies, or of another view or spec.
    """
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, (args, kwargs))
    if not all(isinstance(tensor, NF4Tensor) for tensor in tensors):
        raise UnsupportedError(
            f"{op} between NF4Tensors and dense tensors would fill one with the bytes of the "
            "other: pass NF4Tensors on every rank, or dequantize() all"
        )
    if op.name() == "c10d::broadcast_" and _versions.is_broadcasting_state():
        _refuse_state_broadcast(op, args, kwargs)
    if op.name() != "c10d::send":
        tree_map_only(NF4Tensor, refuse_cut, args[0])
    kinds = {(tensor.view_kind, tensor.spec) for tensor in tensors}
    if len(kinds) != 1:
        raise UnsupportedError(f"{op} between different views or specs: {kinds}")
    result = op(*_records(args), **_records(kwargs))
    for tensor in tensors:
        if tensor.new_rows is not None:
            tensor.new_rows.is_filled = True
    # The ops return the tensors they filled, then a handle to wait for.
    return (args[0], result[-1]) if isinstance(result, tuple) else result


def _refuse_state_broadcast(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Stop a broadcast of a 4-bit state dict on every rank.

    The other ranks wait for dense tensors: they get NaN, which no 4-bit weight takes.

    Raises:
        UnsupportedError: Always, on the sending rank.
    """
    op(*poisoned(args), **kwargs)[-1].wait()
    raise UnsupportedError(
        "broadcast_from_rank0 cannot send a 4-bit state dict: torch receives it into dense "
        "tensors. Pass the state on every rank, or a dense one"
    )


def poisoned(tree: Any) -> Any:
    """Replace NF4Tensors by dense tensors of NaN of the same shape and dtype."""
    return tree_map_only(
        NF4Tensor, lambda t: torch.full(t.shape, torch.nan, dtype=t.dtype, device=t.device), tree
    )


def _records(tree: Any) -> Any:
    return tree_map_only(NF4Tensor, lambda tensor: tensor.record, tree)


def _check_can_be_stacked(op: Any, tensor: NF4Tensor) -> None:
    """Refuse what cannot be put together along its first dimension.

    Raises:
        UnsupportedError: It is transposed, or a single row.
    """
    if tensor.view_kind == "transposed" or tensor.record.dim() < 2:
        raise UnsupportedError(
            f"{op} of a {tensor.view_kind} NF4Tensor of shape {tuple(tensor.shape)} would put "
            "columns together: gather rows, of two or more dimensions, or dequantize() first"
        )
