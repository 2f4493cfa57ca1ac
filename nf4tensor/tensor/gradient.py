"""What keeps a 4-bit weight from being trained without anybody noticing.

`requires_grad=True` is accepted, since loaders set it; a backward pass that reaches the weight
raises. Used by the class and by the families; knows neither.
"""

from typing import Any

import torch
from torch import Tensor

from nf4tensor import _versions
from nf4tensor.errors import GradientError
from nf4tensor.tensor.dispatch import overrides


def _refuse(*_: Any) -> None:
    """Stop a backward pass that reached a 4-bit weight.

    Raises:
        GradientError: Always.
    """
    raise GradientError(
        "a backward pass reached an NF4Tensor: 4-bit weights are frozen and cannot be trained; "
        "call weight.requires_grad_(False) and train adapters beside it"
    )


class _ReachWeight(torch.autograd.Function):
    """Pass the output on, and let a backward pass go on to the weight, whose hook raises.

    Raising here would also stop a backward pass that only other inputs are asked for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, weight: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        weight = inputs[1]
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        nothing = gradient.new_zeros((), dtype=ctx.weight_dtype)
        return gradient, nothing.expand(ctx.weight_shape)


def guard(output: Tensor, weight: Tensor) -> Tensor:
    """Return what was computed from a weight, such that a backward pass to the weight raises."""
    if weight.requires_grad and torch.is_grad_enabled():
        return _ReachWeight.apply(output, weight)
    return output


def count_write(tensor: Tensor) -> None:
    """Tell autograd of a write below it: a backward pass that saved the old values raises."""
    if not (torch.compiler.is_compiling() or tensor.is_inference()):
        torch.autograd.graph.increment_version(tensor)


def check_out(out: Tensor) -> None:
    """Refuse an output that a gradient would have to go through.

    Raises:
        GradientError: It requires a gradient, in a mode that records gradients.
    """
    if out.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            "out requires a gradient, which nothing written into it can pass on: give out.detach() "
            "or call this under torch.no_grad()"
        )


@overrides(torch.Tensor.requires_grad_)
def _requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
    """Accept the flag and raise when a gradient arrives."""
    if tensor.is_cut:
        tensor.is_cut = _versions.calling_module() not in _versions.OWNERS
    _set_requires_grad(tensor, requires_grad)
    return tensor


@overrides(torch.Tensor.requires_grad.__set__)
def _set_requires_grad(tensor: Any, requires_grad: bool) -> None:
    """Set the attribute, as torch.compile does on its copies of a graph's inputs."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(requires_grad)
        if requires_grad and not tensor._backward_hooks:
            tensor.register_hook(_refuse)
