"""Which weights of a model of Transformers become 4-bit, and what cannot work, before any is read.

Called by the quantizer.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from nf4tensor.errors import UnsupportedError
from nf4tensor.integrations.transformers_versions import Conv1D, should_convert_module

logger = logging.getLogger("nf4tensor")
_BFLOAT16_BYTES = 2


def check_distribution(model: Any, is_from_bitsandbytes: bool) -> None:
    """Refuse ways of distributing a model that cut other things than rows.

    Raises:
        UnsupportedError: Its `DistributedConfig` asks for one. The same on every rank.
    """
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return
    wrong = [name for name in ("tp_size", "ep_size", "pp_size") if (getattr(config, name) or 1) > 1]
    if wrong:
        raise UnsupportedError(
            f"DistributedConfig({wrong[0]}={getattr(config, wrong[0])}) with NF4Config: loading "
            "shards 4-bit weights by rows only; pass fsdp_size and dp_replicate_size, or load on "
            "every rank and call parallelize_module then"
        )
    if is_from_bitsandbytes and config.dp_size > 1:
        raise UnsupportedError(
            "weights of bitsandbytes have no rows that ranks could read: convert the checkpoint "
            "once, with `nf4tensor convert PATH NEW --to nf4tensor`, and load NEW"
        )


def choose(model: Any, config: Any, skip: Iterable[str]) -> set[str]:
    """Return the names of the parameters to quantize.

    Args:
        model: On meta.
        config: The user's `NF4Config`.
        skip: What Transformers leaves alone by default: the output layer, what is tied to it, what
            is kept in float32.

    Raises:
        UnsupportedError: Only one of embeddings and a tied output layer would be quantized.
    """
    head = model.get_output_embeddings()
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    heads = {name for name, module in model.named_modules() if module is head and head is not None}
    is_tied = any(f"{name}.weight" in tied for name in heads)
    if is_tied and config.quantize_embeddings != config.quantize_lm_head:
        raise UnsupportedError(
            "the output layer of this model is tied to its input embeddings: set both or none of "
            "quantize_embeddings and quantize_lm_head"
        )
    allowed = set(heads) if config.quantize_lm_head else set()
    if config.quantize_embeddings:
        allowed |= {name.removesuffix(".weight") for name in tied}
    skip = {*(set(skip) - allowed), *(config.skip_modules or ())}
    chosen, left = set(), []
    for name, module, key in _slots(model):
        is_allowed = should_convert_module(name.rpartition(".")[0], skip)
        if not is_allowed or not _is_wanted(module, key, config):
            continue
        in_features = module._parameters[key].shape[-1]
        if config.spec(in_features).pitch < _BFLOAT16_BYTES * in_features:
            chosen.add(name)
        else:
            left.append(name)
    if left:
        logger.warning("left in their own dtype (too narrow): %s", ", ".join(left))
    if not chosen:
        logger.warning("no weight of this model was chosen: see NF4Config(skip_modules=...)")
    return chosen


def _slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None and weight.dim() >= 2 and weight.is_floating_point():
                yield f"{prefix}.{key}" if prefix else key, module, key


def _is_wanted(module: nn.Module, key: str, config: Any) -> bool:
    if isinstance(module, nn.Embedding):
        return config.quantize_embeddings
    if isinstance(module, nn.Linear | Conv1D):
        return key == "weight"
    is_expert = "expert" in type(module).__name__.lower()
    return config.quantize_experts and is_expert and module._parameters[key].dim() == 3


def decode_experts_singly(model: Any, names: Iterable[str]) -> bool:
    """Let a model with 4-bit experts use those that tokens are sent to, one at a time.

    Its other ways to use them take the weights of all experts, which would be decoded at once.

    Returns:
        Whether there are some.
    """
    has_experts = any(model.get_parameter(name).dim() == 3 for name in names)
    if has_experts:
        model.set_experts_implementation("eager")
    return has_experts
