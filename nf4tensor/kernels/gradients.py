"""How the two products are differentiated and batched, in every mode that torch has.

Autograd, forward-mode differentiation and the transforms of torch.func, nested or compiled: all
call the ops again, so that none decodes a weight outside of them. `ops.py` registers this.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from nf4tensor.kernels.schema import library

Modes = tuple[bool, bool]  # whether backward passes, and tangents, are recorded


class _Product(_SingleLevelFunction):
    """One of the ops, linear in input and bias; the adjoint is the other one.

    torch.library.register_autograd would do for backward passes, but its functions lose tangents
    without a word and refuse torch.func. A kernel for autograd is called once for each level of
    nested transforms, hence of a single level. Remove when it does what this class does.
    """

    @staticmethod
    def forward(
        op: Any,
        adjoint: Any,
        input: Tensor,
        record: Tensor,
        op_args: tuple[int, ...],
        bias: Tensor | None,
        modes: Modes,
    ) -> Tensor:
        # Around this function torch turns off what the levels below still need.
        with torch.set_grad_enabled(modes[0]), _set_fwd_grad_enabled(modes[1]):
            return _below_autograd(op, input, record, *op_args, *_optional(bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The record itself, never a copy or a decoded weight: FSDP frees and refills its storage.
        ctx.op, ctx.adjoint, input, record, ctx.op_args, bias, _ = inputs
        ctx.save_for_backward(record)
        ctx.save_for_forward(record)
        ctx.input_shape, ctx.output_shape = input.shape, output.shape
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input_gradient = bias_gradient = None
        if ctx.needs_input_grad[2]:
            input_gradient = _input_gradient(ctx, gradient)
        if ctx.bias is not None and ctx.needs_input_grad[5]:
            shape, dtype = ctx.bias
            bias_gradient = gradient.sum_to_size(shape).to(dtype)
        return None, None, input_gradient, None, None, bias_gradient, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (record,) = ctx.saved_tensors
        input_tangent, bias_tangent = tangents[2], tangents[5]
        if input_tangent is None:
            return bias_tangent.expand(ctx.output_shape)
        product: Tensor = ctx.op(input_tangent, record, *ctx.op_args, *_optional(bias_tangent))
        return product


def _optional(bias: Tensor | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)


def _input_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    (record,) = ctx.saved_tensors
    if len(ctx.input_shape) > 1:
        return ctx.adjoint(gradient, record, *ctx.op_args).sum_to_size(ctx.input_shape)
    # A vector against a stack of weights was broadcast over the stack.
    rows = ctx.adjoint(gradient.unsqueeze(-2), record, *ctx.op_args)
    return rows.sum_to_size((1, *ctx.input_shape)).squeeze(0)


def _differentiable(op: Any, adjoint: Any, input: Tensor, record: Tensor, *rest: Any) -> Any:
    op_args, bias = rest[:6], rest[6] if len(rest) > 6 else None
    modes = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
    is_recorded = modes[0] and (input.requires_grad or (bias is not None and bias.requires_grad))
    if not is_recorded and not _is_transformed():
        return _below_autograd(op, input, record, *rest)
    with enable_single_level_autograd_function():
        return _Product.apply(  # type: ignore[attr-defined]
            op, adjoint, input, record, op_args, bias, modes
        )


def _below_autograd(op: Any, *args: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        product: Tensor = op(*args)
    return product


def _is_transformed() -> bool:
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _batched(
    op: Any, info: Any, dims: tuple[Any, ...], input: Tensor, record: Tensor, *rest: Any
) -> tuple[Tensor, int]:
    """Multiply a batch at once: its dimension becomes the first of the leading ones."""
    op_args, bias = rest[:6], rest[6] if len(rest) > 6 else None
    bias_dim = dims[8] if len(dims) > 8 else None
    is_vector = input.dim() - (dims[0] is not None) == 1
    if is_vector:
        input, dims = input.unsqueeze(0), (dims[0] if dims[0] is None else dims[0] + 1, *dims[1:])
    num_dims = max(input.dim() - (dims[0] is not None), record.dim() - (dims[1] is not None))
    input, record = _in_front(input, dims[0], num_dims), _in_front(record, dims[1], num_dims)
    inner = bias if bias_dim is None else None
    product = op(input, record, *op_args, *_optional(inner))
    if bias is not None and bias_dim is not None:
        if dims[0] is None and dims[1] is None:
            product = product.unsqueeze(0)
        product = product + _in_front(bias, bias_dim, product.dim() - 1)
    return (product.squeeze(-2) if is_vector else product), 0


def _in_front(tensor: Tensor, dim: int | None, num_dims: int) -> Tensor:
    """Move a batch in front of so many dimensions, which are counted from the last."""
    if dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    missing = (1,) * (num_dims + 1 - tensor.dim())
    return tensor.reshape(tensor.shape[0], *missing, *tensor.shape[1:])


def register() -> None:
    """Give both products their gradients and their rule for torch.vmap."""
    linear, matmul = torch.ops.nf4tensor.linear.default, torch.ops.nf4tensor.matmul.default
    for op, adjoint in ((linear, matmul), (matmul, linear)):
        library.impl(op, partial(_differentiable, op, adjoint), "Autograd")
        torch.library.register_vmap(op, partial(_batched, op), lib=library)
