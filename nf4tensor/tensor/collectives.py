"""Collectives that move rows: the same collective on the record.

Gathering, scattering and broadcasting keep every byte; a reduction has no meaning on codes and is
refused by `fallback.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor.dispatch import implements
from nf4tensor.tensor.nf4_tensor import NF4Tensor


@implements("_c10d_functional::all_gather_into_tensor", "_c10d_functional::broadcast")
def functional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Run a functional collective on the record and look at its result in the same way."""
    tensor = args[0]
    return tensor.with_record(op(tensor.record.contiguous(), *args[1:], **kwargs))


@implements("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
def wait(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NF4Tensor:
    """Wait for the record at once, so that none is ever saved or pickled while it is filled."""
    tensor = args[0]
    return tensor.with_record(torch.ops._c10d_functional.wait_tensor.default(tensor.record))


@implements("c10d::broadcast_", "c10d::scatter_", "c10d::allgather_", "c10d::send", "c10d::recv_")
def in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective that fills given tensors on their records; every tensor must be one."""
    strangers: list[Tensor] = []
    tree_map_only(
        Tensor, lambda t: None if isinstance(t, NF4Tensor) else strangers.append(t), (args, kwargs)
    )
    if strangers:
        raise UnsupportedError(
            f"{op} between NF4Tensors and dense tensors would fill one with the bytes of the "
            "other: pass NF4Tensors "
            "on every rank, or dequantize() all"
        )
    specs = set()
    tree_map_only(NF4Tensor, lambda t: specs.add(t.spec), (args, kwargs))
    if len(specs) != 1:
        raise UnsupportedError(f"{op} between different specs: {specs}")
    result = op(*_records(args), **_records(kwargs))
    # The ops return the tensors they filled, then a handle to wait for.
    return (args[0], result[-1]) if isinstance(result, tuple) else result


def _records(tree: Any) -> Any:
    return tree_map_only(NF4Tensor, lambda tensor: tensor.record, tree)
