"""The weights of a sharded 4-bit model, dense and whole, one after the other.

For whoever takes weights from a model that trains, such as an inference engine beside it. Called by
users.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nf4tensor.tensor import NF4Tensor

# What wrappers put into the names of parameters: checkpoint_wrapper and torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def full_weights(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a model whole, 4-bit ones decoded, holding one at a time.

    Gathers them as records, so every rank of a sharded model must go through all of them.

    Args:
        model: Sharded or not.
        dtype: Of what is yielded, float32, bfloat16 or float16 where there are 4-bit weights; by
            default each parameter's own.

    Yields:
        Names as the model has them without wrappers, and detached tensors `[*shape]`. They are the
        model's own memory where nothing had to be gathered, decoded or cast.

    Raises:
        DTypeError: A 4-bit weight does not decode to the dtype.
    """
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()
        if isinstance(whole, NF4Tensor):
            whole = whole.dequantize(dtype)
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, whole if dtype is None else whole.to(dtype)
