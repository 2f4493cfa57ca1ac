"""Matrix products with a 4-bit weight, forward and backward.

Every form ends in one of two ops: `input @ W.T + bias` and `input @ W`, each the other's gradient.
W is decoded to the input's dtype inside the op, so that autograd keeps the record and never a dense
weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nf4tensor.errors import GradientError
from nf4tensor.kernels import ops
from nf4tensor.tensor import fallback
from nf4tensor.tensor.dispatch import implements, overrides
from nf4tensor.tensor.nf4_tensor import NF4Tensor

aten = torch.ops.aten


def _refuse_gradient(*_: Any) -> None:
    """Stop a backward pass that reached a 4-bit weight.

    Raises:
        GradientError: Always.
    """
    raise GradientError(
        "a backward pass reached an NF4Tensor: 4-bit weights are frozen and cannot be trained; "
        "call "
        "weight.requires_grad_(False) and train adapters beside it"
    )


class _RefuseWeightGradient(torch.autograd.Function):
    """Pass the output on, and raise when a backward pass would have to train the weight."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _refuse_gradient()


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


@overrides(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _is_weight(weight) or weight.dim() != 2 or isinstance(input, NF4Tensor):
        return NotImplemented
    input, bias = _autocast(input, weight), bias if bias is None else _autocast(bias, weight)
    return _finish(_times_weight(input, weight.mT, bias), weight)


@overrides(
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.Tensor.mm,
    torch.bmm,
    torch.Tensor.bmm,
    torch.mv,
    torch.Tensor.mv,
)
def _matmul(input: Tensor, other: Tensor | None = None, **kwargs: Any) -> Tensor:
    other = _other(other, kwargs)
    if other is None or kwargs:
        return NotImplemented
    return _product(input, other)


@overrides(torch.Tensor.__rmatmul__)
def _rmatmul(other: Tensor, input: Tensor) -> Tensor:
    return _product(input, other)


@overrides(torch.addmm, torch.Tensor.addmm)
def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> Tensor:
    if out is not None or isinstance(input, NF4Tensor):
        return NotImplemented
    product = _product(mat1, mat2)
    return product if product is NotImplemented else _add(input, product, beta, alpha)


def _other(other: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """Take the second factor from whichever keyword torch's own function calls it by."""
    for name in ("other", "mat2", "vec"):
        other = kwargs.pop(name, other)
    return other


def _add(input: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return (input if beta == 1 else input * beta).to(product.dtype) + product


def _product(input: Tensor, other: Tensor) -> Tensor:
    """Multiply where one factor is a 4-bit weight; decline what is better decoded."""
    if _is_weight(other) and not isinstance(input, NF4Tensor):
        weight = other
        if input.dim() == 0 or input.shape[-1] != weight.shape[-2]:
            return NotImplemented  # torch's own error
        output = _times_weight(_autocast(input, weight), weight)
    elif _is_weight(input) and not isinstance(other, NF4Tensor):
        weight = input
        if other.dim() == 0 or other.shape[0 if other.dim() == 1 else -2] != weight.shape[-1]:
            return NotImplemented
        other = _autocast(other, weight)
        if other.dim() == 1:
            output = _times_weight(other, weight.mT)
        else:
            output = _times_weight(other.mT, weight.mT).mT
    else:
        return NotImplemented
    return _finish(output, weight)


def _times_weight(input: Tensor, weight: NF4Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight` for a weight in either view."""
    if weight.view_kind == "transposed":
        return ops.linear(input, weight.record, weight.spec, bias)
    assert bias is None
    return ops.matmul(input, weight.record, weight.spec)


def _is_weight(tensor: Any) -> bool:
    return isinstance(tensor, NF4Tensor) and tensor.view_kind != "flat" and tensor.dim() >= 2


def _autocast(tensor: Tensor, weight: Tensor) -> Tensor:
    """Cast as autocast would: `__torch_function__` runs above it."""
    device = weight.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _finish(output: Tensor, weight: NF4Tensor) -> Tensor:
    if weight.requires_grad and torch.is_grad_enabled():
        return _RefuseWeightGradient.apply(output, weight)
    return output


# The same products where they arrive below autograd: from C++, from DTensor, and in inference mode.


@implements(
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.matmul.default,
    aten.linear.default,
    aten.addmm.default,
)
def product_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Multiply without decoding outside the kernel."""
    if op is aten.linear.default:
        result = _linear(*args, **kwargs)
    elif op is aten.addmm.default:
        result = _addmm(*args, **kwargs)
    else:
        result = _product(*args)
    return fallback.decode(op, args, kwargs) if result is NotImplemented else result


@overrides(torch.Tensor.requires_grad_)
def _requires_grad_(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """Accept the flag, as loaders set it, and raise when a gradient arrives."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(requires_grad)
        if requires_grad and isinstance(tensor, NF4Tensor) and not tensor._backward_hooks:
            tensor.register_hook(_refuse_gradient)
    return tensor


@overrides(torch.Tensor.requires_grad.__set__)
def _set_requires_grad(tensor: Tensor, requires_grad: bool) -> None:
    _requires_grad_(tensor, requires_grad)
