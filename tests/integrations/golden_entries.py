"""State-dict entries of the golden weights, as bitsandbytes wrote them."""

import json
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nf4tensor.format.codebook import DYNAMIC_MAP, LEVELS
from tests.golden import make_bitsandbytes as golden

CASES = json.loads((golden.FOLDER / "bitsandbytes.json").read_text())["cases"]


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(golden.FOLDER / "bitsandbytes.npz") as stored:
        return dict(stored)


def table(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def text_entry(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def entries(case: str, prefix: str = "layer.weight") -> dict[str, Tensor]:
    """Return fresh entries of one weight, in the order in which bitsandbytes writes them."""
    description, quant_type = CASES[case], CASES[case]["quant_type"]

    def stored(name: str) -> Tensor:
        return torch.from_numpy(_arrays()[f"{case}/{name}"].copy())

    packed = stored("packed").view(getattr(torch, description["storage"])).view(-1, 1)
    found = {"": packed, ".absmax": stored("absmax"), ".quant_map": table(LEVELS[quant_type])}
    if description["nested"]:
        found[".nested_absmax"] = stored("nested_absmax")
        found[".nested_quant_map"] = table(DYNAMIC_MAP)
    text = text_entry(description["quant_state"])
    found[f".quant_state.bitsandbytes__{quant_type}"] = text
    return {prefix + end: entry for end, entry in found.items()}


def as_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same_entries(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check names, their order, dtypes, shapes and bytes."""
    assert list(actual) == list(expected)
    for name, entry in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (entry.dtype, entry.shape), name
        assert as_bytes(actual[name]) == as_bytes(entry), name
        assert actual[name].is_contiguous(), name
