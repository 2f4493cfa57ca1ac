"""Adapters of PEFT beside 4-bit weights: what its own layers leave to us.

They work as they are: to PEFT a 4-bit linear is a linear. Here is merging without rounding to 4
bits, and an early error for what cannot be trained. Loading a model with `NF4Config` imports this
where PEFT is loaded. Tested with 0.21.2. Called by users.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from nf4tensor.checkpoint.transform import relative_error
from nf4tensor.errors import UnsupportedError
from nf4tensor.nn.convert import dequantize_
from nf4tensor.tensor import NF4Tensor
from nf4tensor.tensor.writes import write

try:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper
except ImportError as error:
    raise ImportError(
        f"nf4tensor.integrations.peft needs PEFT 0.21 or later ({error}): pip install 'peft>=0.21'"
    ) from error

__all__ = ["Merged", "merge_and_unload"]


class Merged(NamedTuple):
    """A model without adapters.

    Attributes:
        model: What `get_peft_model` was given, with the adapters in its weights.
        errors: Of merging into 4 bits, by the name of the weight in that model: the Frobenius norm
            of what rounding changed over that of the merged weight. Empty for dense weights.
    """

    model: nn.Module
    errors: dict[str, float]


def merge_and_unload(
    model: Any,
    *,
    in_4_bits: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Merged:
    """Merge adapters into the base and remove them, without losing small changes.

    PEFT's own `merge_and_unload` writes into the weights as they are, so it rounds to 4 bits.

    Args:
        model: Of `get_peft_model`, not sharded. It is taken apart.
        in_4_bits: Keep 4-bit weights 4-bit, each merged in float32 and quantized once. By default
            the whole model becomes dense, in its own dtype.
        safe_merge: Refuse adapters that give NaN, as PEFT does.
        adapter_names: Which to merge; by default the active ones.

    Raises:
        UnsupportedError: The model is sharded: save the adapters, and merge the files with
            `nf4tensor merge`. Or a weight has nested scales of bitsandbytes, which are not written.
        ValueError: `safe_merge` found NaN.
    """
    options = {"safe_merge": safe_merge, "adapter_names": adapter_names}
    base = model.get_base_model()
    if not in_4_bits:
        if getattr(base, "hf_quantizer", None) is None:
            dequantize_(base)
        else:
            base.dequantize()  # its configuration no longer says that it is quantized
        return Merged(model.merge_and_unload(**options), {})
    errors = {}
    layers = {n: m for n, m in base.named_modules() if isinstance(m, BaseTunerLayer)}
    for name, layer in layers.items():
        key = getattr(layer, "parameter_name", "weight")  # of experts
        error = _merge_in_4_bits(layer, key, options)
        if error is not None:
            errors[f"{name}.{key}".replace(".base_layer", "")] = error
    return Merged(model.unload(), errors)


def _merge_in_4_bits(layer: Any, key: str, options: dict[str, Any]) -> float | None:
    """Merge into one weight; return what it lost, None where it is dense."""
    holder = layer.get_base_layer()
    weight = getattr(holder, key, None)
    local = getattr(weight, "_local_tensor", weight)
    if not isinstance(local, NF4Tensor):
        layer.merge(**options)
        return None
    if local is not weight:
        raise UnsupportedError(
            "the model is sharded: save the adapters, and merge the files with `nf4tensor merge`"
        )
    setattr(holder, key, nn.Parameter(weight.dequantize(torch.float32), requires_grad=False))
    try:
        layer.merge(**options)
        merged = getattr(holder, key).detach()
        write(weight.detach(), merged)
        return relative_error(weight.dequantize(torch.float32), merged)
    finally:
        setattr(holder, key, weight)


def _refuse_4_bit_copies() -> None:
    """Let `modules_to_save` refuse a 4-bit module, of which it would train a copy.

    Remove when PEFT refuses parameters that it cannot train.
    """
    update = ModulesToSaveWrapper.update

    @functools.wraps(update)
    def checked(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.original_module.named_parameters():
            if isinstance(getattr(parameter, "_local_tensor", parameter), NF4Tensor):
                raise UnsupportedError(
                    f"modules_to_save has a {type(self.original_module).__name__} whose {name} is "
                    "4-bit, which is never trained: load the model with NF4Config(skip_modules=...)"
                    ", call dequantize_ on that module first, or name it in target_modules"
                )
        return update(self, adapter_name, *args, **kwargs)

    ModulesToSaveWrapper.update = checked


_refuse_4_bit_copies()
