"""4-bit weights of torchao: its NF4Tensor made into ours.

torchao need not be imported: the tensor itself is asked. Called by users.
"""

from typing import Any

import torch

from nf4tensor.errors import DTypeError, UnsupportedError
from nf4tensor.format.spec import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from nf4tensor.integrations import flat_blocks
from nf4tensor.kernels.schema import check_dtype
from nf4tensor.tensor import NF4Tensor

_ATTRIBUTES = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean")


def from_torchao(weight: Any) -> NF4Tensor:
    """Make the tensor of a torchao NF4Tensor, with its codes and the scales that it decodes to.

    Codes keep their bits. So does the scale of every block as torchao decodes it, in the weight's
    dtype; it is stored as float32 then, so the weight grows by 3 bytes a block.

    Decoded weights are close and not equal: torchao rounds the levels of NF4 to four decimals and
    then to the weight's dtype, in which it also multiplies, while here levels are float32. That is
    a difference of at most 5.5e-4 of a weight in float32, 2.1e-3 in float16, 1.3e-2 in bfloat16.
    To keep torchao's values rather than its codes, quantize `weight.get_original_weight()`.

    Args:
        weight: Any device, `[*lead, in_features]`, float32, bfloat16 or float16.

    Returns:
        A detached tensor of the same shape and dtype, with `float32` scales. Where blocks cross
        rows, its blocks are the largest that do not, with the scales repeated.

    Raises:
        DTypeError: This is no torchao NF4Tensor, or of another dtype.
        UnsupportedError: It is a transposed or cut view, its block size is no power of two from
            16 to 4096, or blocks cross rows in pieces of less than 16 weights.
    """
    if not all(hasattr(weight, name) for name in _ATTRIBUTES):
        raise DTypeError(f"expected an NF4Tensor of torchao, got {type(weight).__name__}")
    check_dtype(weight.dtype, "weight.dtype")
    way_out = "pass weight.get_original_weight() to to_nf4 instead"
    packed = weight.quantized_data.detach()
    if not weight.is_contiguous() or 2 * packed.numel() != weight.numel():
        raise UnsupportedError(
            f"a torchao NF4Tensor of shape {tuple(weight.shape)} and strides {weight.stride()} "
            f"over {2 * packed.numel()} weights is a view: {way_out}"
        )
    block_size = weight.block_size
    if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise UnsupportedError(
            f"weight.block_size is {block_size}, not a power of two from {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE}: {way_out}"
        )
    shape = tuple(weight.shape)
    if flat_blocks.block_size_in_rows(shape, block_size) < MIN_BLOCK_SIZE:
        raise UnsupportedError(
            f"rows of {shape[-1]} weights cut blocks of {block_size} into pieces of less than "
            f"{MIN_BLOCK_SIZE}: {way_out}"
        )
    with torch.no_grad():
        scales = weight.dequantize_scalers(
            weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
        )
    flat = flat_blocks.FlatWeight(shape, block_size, "nf4", packed, scales.float())
    return flat_blocks.to_rows(flat, weight.dtype)
