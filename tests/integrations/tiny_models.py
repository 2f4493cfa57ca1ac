"""Models of Transformers with random weights, small enough to be made and trained in a test.

Row counts divide neither by 2 nor by 3, and widths not by the block size.
"""

from pathlib import Path
from typing import Any

import torch

VOCAB = 131
TOKENS = torch.arange(24).view(2, 12) * 5 % VOCAB
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 133,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 67,
        "head_dim": 24,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 24},
}
EXPERT_MODELS = tuple(_EXPERTS)


def make(kind: str = "llama", **options: Any) -> Any:
    """Return a model in bfloat16; the same each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {**_SIZES, "tie_word_embeddings": False, **_EXPERTS.get(kind, {}), **options}
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 96, "n_layer": 2, "n_head": 4, **options}
    config = AutoConfig.for_model(kind, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def save(folder: Path, kind: str = "llama", **options: Any) -> Path:
    """Save such a model, and return its folder."""
    make(kind, **options).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    """Load a causal language model in the dtype it was saved in."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return what a model makes of `TOKENS`."""
    return model(TOKENS, use_cache=False).logits
