"""What happens to an op that no family implements: decode, write through, or refuse.

Out-of-place ops decode and warn once. A few in-place ops decode, compute and quantize again, and
warn once that they round. Everything else that would write into 4-bit storage raises, naming the op
and the way out.
"""

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from nf4tensor.errors import NF4TensorWarning, ShapeError, SpecError, UnsupportedError
from nf4tensor.kernels import ops
from nf4tensor.tensor.dispatch import bind, default, implements, overrides
from nf4tensor.tensor.nf4_tensor import NF4Tensor
from nf4tensor.tensor.quantize import check_finite

aten = torch.ops.aten
_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warn at the first call with this key, or raise where `NF4TENSOR_STRICT=1`."""
    if os.environ.get("NF4TENSOR_STRICT") == "1":
        raise UnsupportedError(f"{message} (NF4TENSOR_STRICT=1)")
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, NF4TensorWarning, stacklevel=2)


def warn_decoded(what: str) -> None:
    """Warn once that something needed a dense copy of a 4-bit tensor."""
    warn_once(
        f"decode {what}",
        f"{what} decodes an NF4Tensor to a dense tensor each time; call dequantize() once if that "
        "is wanted",
    )


def decode(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on decoded copies of its NF4Tensor arguments."""
    warn_decoded(str(op))
    return op(*_dense(args), **_dense(kwargs))


def _dense(tree: Any) -> Any:
    return tree_map_only(NF4Tensor, lambda tensor: tensor.dequantize(), tree)


@default
def unimplemented(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decompose, decode, or refuse."""
    result = op.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    if op.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        raise UnsupportedError(
            f"{op} on an NF4Tensor: 4-bit rows can be gathered, scattered and broadcast, not "
            "reduced; call "
            "dequantize() first"
        )
    if _writes_into_record(op, args, kwargs):
        raise UnsupportedError(
            f"{op} would write into the 4-bit storage of an NF4Tensor: compute on dequantize() and "
            "quantize the "
            "result with to_nf4()"
        )
    return decode(op, args, kwargs)


def _writes_into_record(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    bound = bind(op, args, kwargs)
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and tree_any(lambda leaf: isinstance(leaf, NF4Tensor), bound[argument.name])
        for argument in op._schema.arguments
    )


# Writing


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
        return decode(op, args, kwargs)
    if target.padded is target.record:
        raise UnsupportedError(
            f"{op} into what new_zeros made of an NF4Tensor would quantize at every step: make the "
            "accumulator with "
            "torch.zeros"
        )
    warn_rounds(str(op))
    write(target, op(target.dequantize(), *_dense(args[1:]), **_dense(kwargs)))
    return target


@implements(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
def fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fill whole rows with one value."""
    target = args[0]
    write(target, op(target.dequantize(), *args[1:]))
    return target


@implements(aten.copy_.default)
def copy_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy bytes between equal specs, quantize a float source, decode into a dense target.

    Raises:
        SpecError: Both are quantized, with different specs.
    """
    target, source = args[:2]
    if not isinstance(target, NF4Tensor):
        return op(target, source.dequantize(), *args[2:], **kwargs)
    if not isinstance(source, NF4Tensor):
        warn_rounds("copy_ of a float tensor")
        write(target, source)
        return target
    if source.spec != target.spec:
        raise SpecError(
            f"cannot copy {source.spec} into {target.spec} without quantizing again: load with "
            "assign=True, or "
            "copy source.dequantize()"
        )
    if source.view_kind != target.view_kind:
        raise UnsupportedError(
            f"cannot copy a {source.view_kind} view into a {target.view_kind} view of an "
            "NF4Tensor: copy the tensors "
            "that they are views of"
        )
    op(target.record, source.record, *args[2:], **kwargs)
    return target


def warn_rounds(what: str) -> None:
    """Warn once that a float write into 4-bit storage loses small changes."""
    warn_once(
        f"round {what}",
        f"{what} into an NF4Tensor rounds to 4 bits and loses small changes; to merge adapters, "
        "merge into "
        "dequantize()",
    )


def write(target: NF4Tensor, source: Tensor) -> None:
    """Quantize a float tensor into the rows of a target.

    Raises:
        ShapeError: The source does not broadcast to the target.
        UnsupportedError: The target is a cut, a copy that nobody would see changed.
        WeightError: The source has NaN or infinite elements.
    """
    if target.is_cut and not hasattr(target, "_is_param"):
        raise UnsupportedError(
            "writing into a column slice of an NF4Tensor would change a copy: clone() it first, or "
            "write whole rows"
        )
    try:
        source = source.expand(target.shape)
    except RuntimeError as error:
        raise ShapeError(
            f"cannot write a tensor of shape {tuple(source.shape)} into an NF4Tensor of shape "
            f"{tuple(target.shape)}"
        ) from error
    source = source.mT if target.view_kind == "transposed" else source
    source = source.to(device=target.device).reshape(
        *target.record.shape[:-1], target.spec.in_features
    )
    if not source.is_floating_point():
        source = source.to(target.dtype)
    check_finite(source)
    ops.quantize_into(source, target.spec, target.record)


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
            "rows: assign whole "
            "rows, or change dequantize() and quantize that"
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
