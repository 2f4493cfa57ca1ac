"""Models from their configurations, without weights: for plans of what would not fit in here.

Transformers makes the model and PEFT its adapters, both on the meta device. Called by `nf4tensor
plan`.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nf4tensor.errors import NF4TensorError
from nf4tensor.nn.convert import quantize_

ATTENTION = "nf4tensor_plan"


class ModelConfigError(NF4TensorError, ValueError):
    """A configuration that no model can be made from."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Args:
        lora_rank: Of the adapters.
        targets: Names of layers that get adapters, or "all-linear".
        checkpointing: Keep only the inputs of layers, and compute the rest again in backward.
    """

    lora_rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    checkpointing: bool = True


def load_config(source: str) -> Any:
    """Read a configuration.

    Args:
        source: A `config.json`, a folder with one, or a hub id.

    Raises:
        ModelConfigError: There is none, or Transformers does not know such a model.
    """
    AutoConfig = _import("transformers").AutoConfig
    path = Path(source)
    try:
        return AutoConfig.from_pretrained(path.parent if path.is_file() else source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelConfigError(
            f"{source}: no configuration of a model: {str(error).splitlines()[0]}; pass a "
            "config.json, a folder with one, or a hub id"
        ) from error


def make_model(config: Any, recipe: Recipe) -> nn.Module:
    """Make the model with a frozen 4-bit base and adapters, all on the meta device.

    Args:
        config: From `load_config`.
        recipe: How it is trained.

    Raises:
        ModelConfigError: No causal language model has this configuration, or adapters do not fit.
    """
    transformers, peft = _import("transformers"), _import("peft")
    transformers.AttentionInterface.register(ATTENTION, _attention)
    kinds = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    if kind is None:
        raise ModelConfigError(f"{type(config).__name__} is of no causal language model")
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    quantize_(model.requires_grad_(False), progress=False)
    if recipe.checkpointing:
        # Named `gradient_checkpointing_enable` before Transformers 5.
        model.activation_checkpointing_enable({"use_reentrant": False})
    targets = _linear_names(model) if recipe.targets == "all-linear" else list(recipe.targets)
    options = peft.LoraConfig(r=recipe.lora_rank, target_modules=targets, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 asks Transformers 5.24 for a property by its old name.
            warnings.simplefilter("ignore", FutureWarning)
            adapted = peft.get_peft_model(model, options, low_cpu_mem_usage=True).train()
    except ValueError as error:
        raise ModelConfigError(str(error)) from error
    experts = [n for n, m in adapted.named_modules() if type(m).__name__ == "ParamWrapper"]
    if experts:
        raise ModelConfigError(
            f"PEFT would add adapters to the weights of all experts ({experts[0]} and others), and "
            "decode them in every step: choose other layers, for example --targets q_proj o_proj"
        )
    return adapted


def _linear_names(model: nn.Module) -> list[str]:
    """Name the layers that "all-linear" means; PEFT itself would add experts, which it decodes."""
    head = model.get_output_embeddings()
    layers = model.named_modules()
    names = [name for name, m in layers if isinstance(m, nn.Linear) and m is not head]
    if not names:
        raise ModelConfigError(f"{type(model).__name__} has no nn.Linear to put adapters on")
    return names


def loss_of(model: nn.Module, batch_size: int, seq_len: int) -> Tensor:
    """Return the loss of a batch without values, a scalar on the meta device.

    Args:
        model: From `make_model`.
        batch_size: Sequences.
        seq_len: Tokens of each.
    """
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta")
    # A mask that is ready: whether one is needed would be asked of the values.
    mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool, device="meta")
    return model(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False).loss


class _FlashAttention(torch.autograd.Function):
    """What fused attention keeps for its backward pass: inputs, output and a sum for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    return _FlashAttention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ModelConfigError(f'{error}: pip install "nf4tensor[hf]"') from None
