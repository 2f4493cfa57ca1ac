"""What happens to an op that no family implements: decode, or refuse.

Out-of-place ops decode and warn once. Everything that would write into 4-bit storage, and every
reduction over ranks, raises, naming the op and the way out.
"""

import os
import warnings
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from nf4tensor.errors import NF4TensorWarning, UnsupportedError
from nf4tensor.tensor.decoded import decoded
from nf4tensor.tensor.dispatch import default, is_view, overrides, writes_into
from nf4tensor.tensor.nf4_tensor import NF4Tensor

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warn at the first call with this key, or raise where `NF4TENSOR_STRICT=1`."""
    if os.environ.get("NF4TENSOR_STRICT") == "1":
        raise UnsupportedError(f"{message} (NF4TENSOR_STRICT=1)")
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, NF4TensorWarning, stacklevel=2)


def warn_decoded(what: str, is_view: bool = False) -> None:
    """Warn once that something needed a dense copy of a 4-bit tensor."""
    lost = ", which cannot be written into" if is_view else ""
    warn_once(
        f"decode {what}",
        f"{what} decodes an NF4Tensor to a dense tensor each time{lost}; call dequantize() once "
        "if that is wanted",
    )


def decode(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on decoded copies of its NF4Tensor arguments."""
    warn_decoded(str(op), is_view(op))
    result = op(*dense(args), **dense(kwargs))
    return decoded(result) if is_view(op) else result


def dense(tree: Any) -> Any:
    """Decode every NF4Tensor in a tree of arguments."""
    return tree_map_only(NF4Tensor, lambda tensor: tensor.decode(), tree)


def _decodes_above(function: Any) -> None:
    """Let a function have decoded tensors: torch makes it of others where one has its own class."""

    @overrides(function)
    def of_decoded(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("out"), NF4Tensor):
            refuse_write(function.__name__)
        warn_decoded(function.__name__)
        args, kwargs = tree_map_only(NF4Tensor, lambda tensor: tensor.dequantize(), (args, kwargs))
        return function(*args, **kwargs)


_decodes_above(torch.linalg.matrix_rank)  # which forgets to write `out`
_decodes_above(F.scaled_dot_product_attention)  # which rounds to bfloat16 in between


@default
def unimplemented(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decode, or refuse."""
    if op.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        raise UnsupportedError(
            f"{op} on an NF4Tensor: 4-bit rows can be gathered, scattered and broadcast, not "
            "reduced; call dequantize() first"
        )
    if writes_into(NF4Tensor, op, args, kwargs):
        refuse_write(op)
    return decode(op, args, kwargs)


def refuse_write(op: Any) -> NoReturn:
    """Stop an op that would write into 4-bit storage what rows cannot take.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{op} would write into the 4-bit storage of an NF4Tensor: compute on dequantize() and "
        "quantize the result with to_nf4()"
    )
