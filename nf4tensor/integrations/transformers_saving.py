"""A model of Transformers as the tensors that safetensors files hold.

`save_pretrained` writes what is returned here, under the names that the tensors have in memory, so
that its files are what `nf4tensor.checkpoint` reads. Called by the quantizer.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from nf4tensor.checkpoint.entries import Weight
from nf4tensor.checkpoint.model import slots, whole_spec
from nf4tensor.checkpoint.write import metadata
from nf4tensor.tensor import NF4Tensor


def state_and_metadata(
    model: Any, layouts: dict[str, dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state of a model, 4-bit weights as records, and what files say of them.

    A sharded model is gathered a tensor at a time, so every rank must call this; the first has the
    result, on the CPU, and the others nothing. Of a model that Transformers put adapters into, only
    those are saved: 4-bit weights are left out.

    Args:
        model: Sharded or not.
        layouts: What another package's file had beside a weight, by name.
    """
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    state: dict[str, Tensor] = {}
    weights: dict[str, Weight] = {}
    for slot in slots(model):
        is_quantized = isinstance(getattr(slot.tensor, "_local_tensor", slot.tensor), NF4Tensor)
        if is_quantized and has_adapters:
            continue
        if is_quantized:
            spec, layout = whole_spec(slot.tensor), layouts.get(slot.name)
            described = Weight(spec, slot.tensor.dtype, layout)
            weights |= {slot.name: described}
        whole = _whole(slot.tensor)
        if whole is not None:
            tensor = whole.record if isinstance(whole, NF4Tensor) else whole
            state |= dict.fromkeys(slot.names, tensor)
    return state, metadata(weights, {}) if weights else {}


def _whole(tensor: Tensor) -> Tensor | None:
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    whole = gather()
    return whole.cpu() if dist.get_rank() == 0 else None
