"""Turn the weights of a model into 4-bit tensors and back, one at a time.

Only parameters are replaced: modules, names, hooks and `forward` stay as they are. Called by users
and integrations.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from nf4tensor.errors import NF4TensorError, UnsupportedError
from nf4tensor.tensor import NF4Tensor, to_nf4
from nf4tensor.tensor.memory import storage_bytes

logger = logging.getLogger("nf4tensor")
ModuleFilter = Callable[[nn.Module, str], bool]
Slot = tuple[nn.Module, str, str]  # module, key in its _parameters, full name
_BFLOAT16_BYTES = 2


def quantize_(
    model: nn.Module,
    *,
    filter_fn: ModuleFilter | None = None,
    skip: Sequence[str] = ("lm_head",),
    freeze_base: bool = False,
    progress: bool = True,
    **to_nf4_options: Any,
) -> nn.Module:
    """Replace weights of a model by frozen 4-bit ones, in place.

    Args:
        model: Any module, not sharded yet: `fully_shard` comes after.
        filter_fn: `(module, name) -> bool`: whose floating parameters of two or more dimensions,
            biases excepted, to quantize. By default the weight of every `nn.Linear`, and the 3-D
            ones of modules with "expert" in their class name.
        skip: Last components of module names to leave alone.
        freeze_base: Freeze every other parameter too, so that only adapters added later train.
        progress: Show a progress bar.
        **to_nf4_options: Passed to `to_nf4`.

    Returns:
        The model. Weights that would not get smaller than in bfloat16, and weights that a module
        outside the choice shares, stay as they are and are listed in the log.

    Raises:
        UnsupportedError: A weight is sharded already.
        NF4TensorError: `to_nf4` refused a weight; the class is its own, and the message names it.
    """
    chosen, others = [], set()
    for slot in _slots(model):
        module, key, name = slot
        if _is_chosen(slot, filter_fn, [skip] if isinstance(skip, str) else skip):
            chosen.append(slot)
        else:
            others.add(id(module._parameters[key]))
    left = []
    for slots in tqdm(_by_parameter(chosen), "quantize", disable=not progress, unit="weight"):
        module, key, name = slots[0]
        weight, quantized = module._parameters[key], None
        if id(weight) not in others:
            quantized = _quantize_parameter(weight, name, to_nf4_options)
        if quantized is None:
            left.append(name)
            continue
        for module, key, _ in slots:
            module._parameters[key] = quantized
    if not chosen:
        logger.warning("no weight of this model was chosen: see filter_fn and skip")
    if left:
        logger.warning("left in their own dtype (too narrow, or shared): %s", ", ".join(left))
    if freeze_base:
        model.requires_grad_(False)
    return model


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace every 4-bit weight of a model by a dense one, in place.

    Args:
        model: Any module, not sharded.
        dtype: float32, bfloat16 or float16; by default each weight's logical dtype.

    Returns:
        The model. The dense weights stay frozen.

    Raises:
        UnsupportedError: A 4-bit weight is sharded.
    """
    slots = []
    for module, key, name in _slots(model):
        weight = module._parameters[key]
        if isinstance(getattr(weight, "_local_tensor", None), NF4Tensor):
            raise UnsupportedError(f"{name} is sharded: call dequantize_ on a model that is not")
        if isinstance(weight, NF4Tensor):
            slots.append((module, key, name))
    for group in _by_parameter(slots):
        module, key, _ = group[0]
        dense = nn.Parameter(
            module._parameters[key].detach().dequantize(dtype), requires_grad=False
        )
        for module, key, _ in group:
            module._parameters[key] = dense
    return model


def memory_footprint(model: nn.Module, *, buffers: bool = True) -> int:
    """Return the bytes that parameters and buffers take on this rank.

    4-bit weights count their records, sharded ones this rank's part, and memory that several
    tensors share counts once.

    Args:
        model: Any module, sharded or not.
        buffers: Count buffers too.
    """
    counted = (*model.parameters(), *(model.buffers() if buffers else ()))
    return sum(storage_bytes(counted).values())


def _slots(model: nn.Module) -> Iterator[Slot]:
    """List every place in the model that holds a parameter, shared ones at each place."""
    for prefix, module in model.named_modules(remove_duplicate=True):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module, key, f"{prefix}.{key}" if prefix else key


def _by_parameter(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Group the places that hold one and the same parameter, while all parameters are alive."""
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(id(slot[0]._parameters[slot[1]]), []).append(slot)
    return list(groups.values())


def _is_chosen(slot: Slot, filter_fn: ModuleFilter | None, skip: Sequence[str]) -> bool:
    module, key, name = slot
    weight = module._parameters[key]
    module_name = name.rpartition(".")[0]
    if isinstance(weight, NF4Tensor) or weight.dim() < 2 or not weight.is_floating_point():
        return False
    if module_name.rpartition(".")[2] in skip:
        return False
    if filter_fn is not None:
        return "bias" not in key and bool(filter_fn(module, module_name))
    if isinstance(module, nn.Linear):
        return key == "weight"  # not adapters that a subclass holds beside it
    # Biases of experts have two dimensions.
    return weight.dim() == 3 and "expert" in type(module).__name__.lower()


def _quantize_parameter(
    weight: nn.Parameter, name: str, to_nf4_options: dict[str, Any]
) -> nn.Parameter | None:
    """Return the 4-bit parameter, or None where it would not be smaller than bfloat16."""
    if _is_sharded(weight):
        raise UnsupportedError(f"{name} is sharded already: call quantize_ first, then fully_shard")
    try:
        quantized = to_nf4(weight, **to_nf4_options)
    except NF4TensorError as error:
        raise type(error)(f"{name}: {error}") from error
    if quantized.nbytes >= _BFLOAT16_BYTES * weight.numel():
        return None
    return nn.Parameter(quantized, requires_grad=False)


def _is_sharded(weight: nn.Parameter) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(weight, distributed.DTensor)
