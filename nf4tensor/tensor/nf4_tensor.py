"""`NF4Tensor`: a weight of which only its 4-bit record exists.

The class holds a record, a spec and a way of looking at them; every operation lives in the families
beside this file. `to_nf4` (`quantize.py`) is the way in, `NF4Tensor.dequantize` the way out.
"""

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import DTypeError, ShapeError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from nf4tensor.kernels.schema import WEIGHT_DTYPES, check_dtype, check_record
from nf4tensor.tensor import all_gather, gradient
from nf4tensor.tensor.dispatch import call, call_function

VIEWS = ("rows", "transposed", "flat")


@dataclass
class NewRows:
    """Shared by every view of rows that some op made, until rows are copied into one of them."""

    maker: str
    is_filled: bool = False


class NF4Tensor(torch.Tensor):
    """A weight `[*lead, in_features]` stored as one uint8 record `[*lead, pitch]`.

    Made by `to_nf4`; the constructor takes bytes that are a record already.

    Args:
        record: uint8 `[*lead, pitch]`, each row with its codes and scales (`format/README.md`).
        spec: Geometry of a row.
        dtype: Logical dtype: float32, bfloat16 or float16. It says what `dequantize()` returns and
            is no property of the bytes.
        view: "rows"; "transposed", of size `[*, in_features, out_features]`; or "flat", of size
            `[numel]`.
        padded: The record of which `record` is the first rows, where FSDP2 padded a shard; `record`
            itself in what FSDP2 pads one with; else None.
    """

    record: Tensor
    spec: NF4Spec
    view_kind: str
    padded: Tensor | None
    is_cut: bool  # a copied column slice, which nobody would see changed
    new_rows: NewRows | None

    @staticmethod
    def __new__(
        cls,
        record: Tensor,
        spec: NF4Spec,
        dtype: torch.dtype,
        *,
        view: str = "rows",
        padded: Tensor | None = None,
    ) -> "NF4Tensor":
        """Make the wrapper: its size and strides are the decoded weight's."""
        assert view in VIEWS, view
        assert record.shape[-1] == spec.pitch, (record.shape, spec)
        size = (*record.shape[:-1], spec.in_features)
        stride = (*(s // spec.pitch * spec.in_features for s in record.stride()[:-1]), 1)
        if view == "transposed":
            size = (*size[:-2], size[-1], size[-2])
            stride = (*stride[:-2], stride[-1], stride[-2])
        elif view == "flat":
            num_elements = spec.in_features
            for rows in record.shape[:-1]:
                num_elements *= rows
            size, stride = (num_elements,), (1,)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=record.device
        )
        # No memory has the decoded size: without this, C++ that asks for it reads address 0.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        return tensor

    def __init__(
        self,
        record: Tensor,
        spec: NF4Spec,
        dtype: torch.dtype,
        *,
        view: str = "rows",
        padded: Tensor | None = None,
    ) -> None:
        self.record = record
        self.spec = spec
        self.view_kind = view
        self.padded = padded
        self.is_cut = False
        self.new_rows = None

    def with_record(
        self,
        record: Tensor,
        *,
        dtype: torch.dtype | None = None,
        view: str | None = None,
        padded: Tensor | None = None,
    ) -> "NF4Tensor":
        """Return a tensor alike over another record, but for what is given."""
        tensor = NF4Tensor(
            record, self.spec, dtype or self.dtype, view=view or self.view_kind, padded=padded
        )
        if (self.is_cut or self.new_rows) and _same_storage(record, self.record):
            tensor.is_cut, tensor.new_rows = self.is_cut, self.new_rows
        return tensor

    def dequantize(self, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
        """Decode to a dense tensor of this tensor's shape.

        Args:
            dtype: float32, bfloat16 or float16; by default the logical dtype.
            out: Where to write, of this tensor's shape; its dtype is the one decoded to.

        Returns:
            A new tensor, or `out`.

        Raises:
            DTypeError: The dtype is another one.
            ShapeError: `out` has another shape.
            GradientError: `out` requires a gradient.
        """
        if out is not None:
            return self._dequantize_into(dtype, out)
        return gradient.guard(self.decode(dtype), self)

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Do what `dequantize` does, for handlers of operations, which run below autograd."""
        weight = ops.dequantize(self.record, self.spec, dtype or self.dtype)
        if self.view_kind == "transposed":
            return weight.mT
        return weight.view(-1) if self.view_kind == "flat" else weight

    def _dequantize_into(self, dtype: torch.dtype | None, out: Tensor) -> Tensor:
        if dtype not in (None, out.dtype):
            raise DTypeError(
                f"out.dtype is {out.dtype}, but dtype={dtype} was asked for: pass one of them"
            )
        if out.shape != self.shape:
            raise ShapeError(f"out has shape {tuple(out.shape)}, expected {tuple(self.shape)}")
        gradient.check_out(out)
        target = out.mT if self.view_kind == "transposed" else out
        if self.view_kind == "flat":
            target = out.view(*self.record.shape[:-1], self.spec.in_features)
        ops.dequantize_into(self.record, self.spec, target)
        gradient.count_write(out)
        return out

    def get_original_weight(self) -> Tensor:
        """Decode to the logical dtype: the name that torchao's NF4Tensor has for `dequantize`."""
        return self.dequantize()

    @property
    def nbytes(self) -> int:
        """Bytes of the record: what the tensor really takes."""
        return self.record.nbytes

    @property
    def data(self) -> Tensor:
        """The tensor without its history; assigning to it writes in place."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.device != self.device or value.shape != self.shape:
            raise ShapeError(
                f"cannot assign data of shape {tuple(value.shape)} on {value.device} to an "
                f"NF4Tensor of shape {tuple(self.shape)} on {self.device}: replace the parameter "
                "instead"
            )
        if value.dtype not in WEIGHT_DTYPES:
            raise DTypeError(
                f"cannot assign {value.dtype} data to an NF4Tensor, expected float32, bfloat16 or "
                "float16: cast it, or call dequantize_(model) before model.to(dtype)"
            )
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        view = "" if self.view_kind == "rows" else f", view={self.view_kind}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"NF4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"nbytes={self.nbytes}{view}{grad}, {self.spec})"
        )

    # Copies and files

    def __copy__(self) -> "NF4Tensor":
        return _as_parameter(self.detach(), hasattr(self, "_is_param"), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> "NF4Tensor":
        if id(self) not in memo:
            copy = self.detach().clone()
            is_parameter = hasattr(self, "_is_param")
            memo[id(self)] = _as_parameter(copy, is_parameter, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        record = self.record.detach()
        if record.untyped_storage().nbytes() != record.nbytes:
            record = record.clone()  # a file of a shard holds the shard, not the storage around it
        state = (astuple(self.spec), record, self.dtype, self.view_kind)
        return _rebuild, (*state, hasattr(self, "_is_param"), self.requires_grad)

    # What torch.compile asks for

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        new = self.new_rows
        maker = None if new is None or new.is_filled else new.maker
        return ["record"], (self.spec, self.dtype, self.view_kind, self.is_cut, maker)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> "NF4Tensor":
        spec, dtype, view, is_cut, maker = context
        tensor = NF4Tensor(inner["record"], spec, dtype, view=view)
        tensor.is_cut, tensor.new_rows = is_cut, NewRows(maker) if maker else None
        return tensor

    def _stable_hash_for_caching(self) -> str:
        """Name everything that changes compiled code: two specs may share a record's shape."""
        record = (self.record.shape, self.record.stride(), self.device)
        return repr((self.__tensor_flatten__(), record, self.requires_grad))

    # FSDP2

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], Any]:
        """Give FSDP2 the padded record of this shard to gather (see `all_gather.py`)."""
        return all_gather.pre_all_gather(self, mesh)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Make the unsharded tensor of what was gathered (see `all_gather.py`)."""
        record = all_gather.post_all_gather(all_gather_outputs[0], metadata)
        if out is not None:
            return all_gather.check_aliases(out, record)
        return NF4Tensor(record, metadata.spec, param_dtype, view=metadata.view), (record,)

    # Dispatch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {})


def _same_storage(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _as_parameter(tensor: NF4Tensor, is_parameter: bool, requires_grad: bool) -> NF4Tensor:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _rebuild(
    spec_fields: tuple[Any, ...],
    record: Tensor,
    dtype: torch.dtype,
    view: str,
    is_parameter: bool,
    requires_grad: bool,
) -> NF4Tensor:
    """Undo `__reduce_ex__`; what cannot be a record is refused here, as files may be damaged."""
    spec = NF4Spec(*spec_fields)
    check_record(record, spec)
    check_dtype(dtype, "the saved dtype")
    tensor = NF4Tensor(record, spec, dtype, view=view)
    return _as_parameter(tensor, is_parameter, requires_grad)


torch.serialization.add_safe_globals([_rebuild])
