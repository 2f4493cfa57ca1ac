"""Matrix products with a 4-bit weight, forward and backward.

Every form ends in one of two ops: `input @ W.T + bias` and `input @ W`, each the other's gradient.
W is decoded to the input's dtype inside the op, so that autograd keeps the record and never a dense
weight. `einsum.py` brings its equations here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nf4tensor.errors import DTypeError, UnsupportedError
from nf4tensor.kernels import ops
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from nf4tensor.tensor import fallback, gradient
from nf4tensor.tensor.dispatch import implements, overrides
from nf4tensor.tensor.nf4_tensor import NF4Tensor

aten = torch.ops.aten


def linear_nf4(input: Tensor, weight: NF4Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`, the same as `F.linear`.

    Args:
        input: `[*, in_features]`, float32, bfloat16 or float16; the weight is decoded to its dtype,
            or to autocast's.
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.

    Returns:
        `[*, out_features]` in the input's dtype, or autocast's. Its backward gives gradients to
        input and bias.

    Raises:
        DTypeError, ShapeError: The input does not fit the weight.
        GradientError: In backward, where the weight requires a gradient.
    """
    return F.linear(input, weight, bias)


def is_weight(tensor: Any) -> bool:
    """Tell whether a factor is one that the ops can multiply with."""
    return isinstance(tensor, NF4Tensor) and tensor.view_kind != "flat" and tensor.dim() >= 2


def multiply(
    input: Tensor, weight: NF4Tensor, *, transposed: bool, bias: Tensor | None = None
) -> Tensor:
    """Return `input @ weight`, or `input @ weight.mT`, plus bias, as autocast would."""
    input = autocast(input)
    bias = bias if bias is None else autocast(bias)
    if transposed == (weight.view_kind == "rows"):
        if bias is None or bias.shape == weight.record.shape[-2:-1]:
            return gradient.guard(ops.linear(input, weight.record, weight.spec, bias), weight)
        output = ops.linear(input, weight.record, weight.spec)
    else:
        output = ops.matmul(input, weight.record, weight.spec)
    return gradient.guard(output if bias is None else output + bias, weight)


def autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast would: `__torch_function__` runs above it."""
    device = tensor.device.type
    if (
        tensor.dtype in WEIGHT_DTYPES
        and torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
    ):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


@overrides(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
    if kwargs or not is_weight(weight) or weight.dim() != 2 or isinstance(input, NF4Tensor):
        return NotImplemented
    return multiply(input, weight, transposed=True, bias=bias)


@overrides(torch.matmul, torch.Tensor.matmul)
def _matmul(input: Tensor, other: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Multiply where one factor is a 4-bit weight; decline what is better decoded."""
    other = kwargs.pop("other", other)
    if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    if is_weight(other) and not isinstance(input, NF4Tensor):
        if input.dim() == 0 or input.shape[-1] != other.shape[-2]:
            return NotImplemented  # torch's own error
        return multiply(input, other, transposed=False)
    if is_weight(input) and not isinstance(other, NF4Tensor):
        if other.dim() == 0 or other.shape[0 if other.dim() == 1 else -2] != input.shape[-1]:
            return NotImplemented
        if other.dim() == 1:
            return multiply(other, input, transposed=True)
        return multiply(other.mT, input, transposed=True).mT.contiguous()
    return NotImplemented


@overrides(torch.Tensor.__matmul__)
def _at(input: Tensor, other: Tensor) -> Tensor:
    """Multiply with `@`, which turns a TypeError into "unsupported operand"."""
    for factor in (input, other):
        if isinstance(factor, Tensor) and factor.dtype not in WEIGHT_DTYPES:
            raise UnsupportedError(
                f"cannot multiply a {factor.dtype} tensor with an NF4Tensor, expected float32, "
                "bfloat16 or float16: cast it first, for example with .to(torch.float32)"
            )
    return _matmul(input, other)


@overrides(torch.Tensor.__rmatmul__)
def _rmatmul(other: Tensor, input: Tensor) -> Tensor:
    return _at(input, other)


@overrides(torch.mm, torch.Tensor.mm)
def _mm(input: Tensor, mat2: Tensor | None = None, **kwargs: Any) -> Tensor:
    mat2 = kwargs.pop("mat2", mat2)
    return _matmul(input, mat2, **kwargs) if _have_dims(2, input, 2, mat2) else NotImplemented


@overrides(torch.bmm, torch.Tensor.bmm)
def _bmm(input: Tensor, mat2: Tensor | None = None, **kwargs: Any) -> Tensor:
    mat2 = kwargs.pop("mat2", mat2)
    if not _have_dims(3, input, 3, mat2) or input.shape[0] != mat2.shape[0]:
        return NotImplemented
    return _matmul(input, mat2, **kwargs)


@overrides(torch.mv, torch.Tensor.mv)
def _mv(input: Tensor, vec: Tensor | None = None, **kwargs: Any) -> Tensor:
    vec = kwargs.pop("vec", vec)
    return _matmul(input, vec, **kwargs) if _have_dims(2, input, 1, vec) else NotImplemented


def _have_dims(num_dims: int, input: Any, num_other_dims: int, other: Any) -> bool:
    """Tell whether the factors are what a function takes that, unlike matmul, never broadcasts."""
    are_tensors = isinstance(input, Tensor) and isinstance(other, Tensor)
    return are_tensors and input.dim() == num_dims and other.dim() == num_other_dims


@overrides(torch.addmm, torch.Tensor.addmm)
def _addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *deprecated: Any,
    beta: Any = 1,
    alpha: Any = 1,
    **kwargs: Any,
) -> Tensor:
    if deprecated or kwargs or isinstance(input, NF4Tensor) or not _have_dims(2, mat1, 2, mat2):
        return NotImplemented
    if is_weight(mat2) and mat2.view_kind == "transposed" and beta == alpha == 1:
        fits = mat1.shape[-1] == mat2.shape[-2] and input.shape == mat2.shape[-1:]
        if fits and not isinstance(mat1, NF4Tensor):  # the bias of a linear
            return multiply(mat1, mat2, transposed=False, bias=input)
    product = _matmul(mat1, mat2)
    if product is NotImplemented:
        return NotImplemented
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    input = autocast(input).expand(product.shape)
    if input.dtype != product.dtype:
        raise DTypeError(f"input is {input.dtype}, expected the product's {product.dtype}: cast it")
    return (input if beta == 1 else input * beta) + product


# The same products where they arrive below autograd: from C++, from DTensor, and in inference mode.

_PRODUCTS = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.matmul.default: _matmul,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: _mv,
}


@implements(*_PRODUCTS)
def product_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Multiply without decoding outside the kernel."""
    result = _PRODUCTS[op](*args, **kwargs)
    return fallback.decode(op, args, kwargs) if result is NotImplemented else result
