"""What depends on a release of Transformers: its names, and the three places where it is changed.

Tested with 5.24. Everything else in the integration uses documented parts. Called by the other
files of the integration.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import Tensor, nn

from nf4tensor.checkpoint.entries import Weight
from nf4tensor.errors import CheckpointError
from nf4tensor.nn.convert import memory_footprint

try:
    from transformers.core_model_loading import (
        ConversionOps,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import register_quantization_config, register_quantizer
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"nf4tensor.integrations.transformers needs Transformers 5.24 or later ({error}): "
        "pip install 'transformers>=5.24'"
    ) from error

__all__ = [
    "Conv1D",
    "ConversionOps",
    "HfQuantizer",
    "QuantizationConfigMixin",
    "WeightConverter",
    "accept_bitsandbytes",
    "names_in_model",
    "register_quantization_config",
    "register_quantizer",
    "save_as_in_memory",
    "should_convert_module",
]


def accept_bitsandbytes(config_class: type) -> None:
    """Let a checkpoint of bitsandbytes be loaded where the user passed our configuration.

    Transformers refuses a configuration of another class than the checkpoint's, before any
    quantizer is asked. Remove when a configuration can say what it takes.
    """
    merge = AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merge_quantization_configs(stored: Any, given: Any = None) -> Any:
        if isinstance(given, config_class) and _is_of_bitsandbytes(stored):
            taken = copy.copy(given)
            taken.source = "bitsandbytes"
            return taken
        return merge(stored, given)

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge_quantization_configs)


def _is_of_bitsandbytes(config: Any) -> bool:
    if isinstance(config, Mapping):
        return bool(config.get("load_in_4bit"))
    return isinstance(config, BitsAndBytesConfig) and config.load_in_4bit


def names_in_model(
    stored: Mapping[str, Weight | None], conversions: Sequence[Any], model: Any
) -> dict[str, Weight | None]:
    """Return what is stored by the names that it will have in the model.

    Several that become one, as the weights of experts do, must be known and alike.

    Raises:
        CheckpointError: They are not.
    """
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state = model.state_dict()
    found: dict[str, Weight | None] = {}
    for name, weight in stored.items():
        for rules in ((renamings, converters), ([], [])):  # as `convert_and_load_...` does
            target, _ = rename_source_key(name, *rules, model.base_model_prefix, state)
            if target in state or name not in state:
                break
        found[target] = _joined(target, found[target], weight) if target in found else weight
    return found


def _joined(target: str, first: Weight | None, second: Weight | None) -> Weight:
    if first is None or second is None:
        raise CheckpointError(
            f"{target} would be put together from weights of bitsandbytes, whose blocks have no "
            "rows: `nf4tensor convert PATH NEW --to nf4tensor`, and load NEW"
        )
    if (first.spec, first.dtype) != (second.spec, second.dtype):
        raise CheckpointError(
            f"{target} would be put together from weights with {first.spec} and {second.spec}: "
            "quantize them with the same options"
        )
    return replace(first, layout=None)  # which is each weight's own


def save_as_in_memory(model: Any) -> None:
    """Let `save_pretrained` write the tensors that our quantizer gives it, as they are.

    It would put dense weights back into the layout of the original checkpoint, which may cut or
    transpose what a record holds, and gather a sharded model anew, as tensors that safetensors
    files lack. It also counts bytes by dtypes. Remove when a quantizer is asked for these.
    """
    model._weight_conversions = []
    model.gather_sharded_state_dict_for_save = _as_given
    model.get_memory_footprint = MethodType(_memory_footprint, model)


def _as_given(
    model: nn.Module, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    return state_dict


def _memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Return the bytes of parameters and buffers on this rank: see `nf4tensor.memory_footprint`."""
    return memory_footprint(model, buffers=return_buffers)
