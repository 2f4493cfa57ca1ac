"""What torch takes for a view of 4-bit storage, but is a decoded copy: dense, and never written.

A column, a diagonal or a row of the transposed has no bytes of its own in the record, so what is
written into it would be lost. `fallback.py` and `columns.py` return such copies; for everything but
writes they are the dense tensor they hold.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor.dispatch import is_view, viewing, writes_into

_ON_DENSE = (
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__format__,
    torch.Tensor.data_ptr,
    torch.Tensor.is_shared,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.linalg.matrix_rank,  # see fallback.py
)
_ARRAYS = (torch.Tensor.__array__, torch.Tensor.numpy)
_REACH_MEMORY = (
    torch.Tensor.apply_,
    torch.Tensor.data.__set__,
    torch.Tensor.map_,
    torch.Tensor.map2_,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
)


class DecodedView(torch.Tensor):
    """A dense copy of part of an NF4Tensor that raises where it is written into.

    Results of operations are plain dense tensors, those of views are such copies again.
    """

    dense: Tensor

    @staticmethod
    def __new__(cls, dense: Tensor) -> "DecodedView":
        """Wrap a decoded copy; its memory belongs to `dense` alone."""
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            dense.shape,
            strides=dense.stride(),
            storage_offset=dense.storage_offset(),
            dtype=dense.dtype,
            device=dense.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(view)
        return view

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._copied())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self._copied())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def _copied(self) -> Tensor:
        copy = self.dense.detach().clone()
        if hasattr(self, "_is_param"):
            return torch.nn.Parameter(copy, self.requires_grad)
        return copy.requires_grad_(self.requires_grad)

    # What torch.compile asks for

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["dense"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> "DecodedView":
        return DecodedView(inner["dense"])

    # Dispatch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        if func in _REACH_MEMORY or _holds_views(kwargs.get("out")):
            _refuse("data" if func.__name__ == "__set__" else func.__name__)
        if func in _ON_DENSE:
            args, kwargs = _dense(args), _dense(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _ARRAYS:
            result.flags.writeable = False
        return result

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if writes_into(cls, func, args, kwargs):
            _refuse(func)
        if not is_view(func):
            return func(*_dense(args), **_dense(kwargs))
        with viewing(args[0]):
            return decoded(func(*_dense(args), **_dense(kwargs)))


def decoded(result: Any) -> Any:
    """Turn every tensor of a result into one that refuses writes."""
    return tree_map_only(Tensor, DecodedView, result)


def _dense(tree: Any) -> Any:
    return tree_map_only(DecodedView, lambda view: view.dense, tree)


def _holds_views(tree: Any) -> bool:
    return tree_any(lambda leaf: isinstance(leaf, DecodedView), tree)


def _refuse(what: Any) -> None:
    """Stop a write that nobody would see.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{what} would write into a decoded copy of part of an NF4Tensor, and the NF4Tensor would "
        "never see it: clone() that copy, or change dequantize() and quantize it with to_nf4()"
    )
