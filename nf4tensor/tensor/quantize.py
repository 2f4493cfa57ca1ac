"""From a dense tensor to a 4-bit one, and what every write must check first.

The way in for users (`to_nf4`) and for the families that write into existing records.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from nf4tensor.errors import DTypeError, ShapeError, UnsupportedError, WeightError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from nf4tensor.kernels.schema import check_dtype
from nf4tensor.tensor.nf4_tensor import NF4Tensor


def to_nf4(
    tensor: Tensor,
    block_size: int = 64,
    scale_block_size: int | None = 256,
    *,
    quant_type: str = "nf4",
    scaler_block_size: int | None = None,
) -> NF4Tensor:
    """Quantize a weight to 4 bits.

    Args:
        tensor: `[*lead, in_features]`, float32, bfloat16 or float16, any strides; its dtype becomes
            the logical one.
        block_size: Elements that share a scale, a power of two from 16 to 4096.
        scale_block_size: At most so many 8-bit scales share a float32 pair ("double quantization");
            None keeps float32 scales.
        quant_type: "nf4" or "fp4".
        scaler_block_size: torchao's name for `scale_block_size`.

    Returns:
        A detached NF4Tensor of the same shape, dtype and device.

    Raises:
        DTypeError: The dtype is another one, or this is no dense tensor.
        ShapeError: The tensor has no dimension or no columns.
        SpecError: A size or name is outside its range.
        UnsupportedError: The tensor is quantized already.
        WeightError: The tensor has NaN or infinite elements.
    """
    if isinstance(tensor, NF4Tensor):
        raise UnsupportedError(
            f"the tensor is quantized already ({tensor.spec}): to quantize it in another way, pass "
            "tensor.dequantize()"
        )
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_nested:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise DTypeError(f"expected a dense torch.Tensor, got {kind}: convert it first")
    check_dtype(tensor.dtype, "tensor.dtype")
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise ShapeError(
            f"tensor has shape {tuple(tensor.shape)}, expected at least one dimension and one "
            "column"
        )
    if scaler_block_size is not None:
        scale_block_size = scaler_block_size
    spec = NF4Spec.for_weight(tensor.shape[-1], block_size, scale_block_size, quant_type)
    tensor = tensor.detach()
    check_finite(tensor)
    return NF4Tensor(ops.quantize(tensor, spec), spec, tensor.dtype)


def check_finite(tensor: Tensor) -> None:
    """Refuse a weight with NaN or infinite elements.

    Raises:
        WeightError: There are some; the message has their number and the first place.
    """
    if torch.compiler.is_compiling() or tensor.numel() == 0 or tensor.is_meta or is_fake(tensor):
        return
    lowest, highest = tensor.aminmax()  # both are NaN where one element is
    if torch.stack([lowest, highest]).isfinite().all():
        return
    places = (~tensor.isfinite()).nonzero()
    first = tuple(places[0].tolist())
    if len(places) == tensor.numel():
        raise WeightError(
            f"every element of the weight of shape {tuple(tensor.shape)} is NaN or infinite: fix "
            "the checkpoint; or, where broadcast_from_rank0 sent a 4-bit state dict, pass the "
            "state on every rank"
        )
    raise WeightError(
        f"the weight of shape {tuple(tensor.shape)} has {len(places)} NaN or infinite elements, "
        f"the first at {first}: {tensor[first].item()}: 4-bit blocks cannot hold them; fix the "
        "checkpoint, or use torch.nan_to_num(weight) if zeros there are right"
    )
