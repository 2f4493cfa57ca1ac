"""Models small enough to count their bytes by hand, for the tests of plans."""

import torch
from torch import Tensor, nn

from nf4tensor import to_nf4


def frozen(weight: Tensor) -> nn.Parameter:
    """Make a parameter that does not train."""
    return nn.Parameter(weight, requires_grad=False)


def linear(rows: int, in_features: int = 256) -> nn.Linear:
    """Make a linear layer with a 4-bit weight; 256 columns are records of 160 bytes."""
    layer = nn.Linear(in_features, rows, bias=False)
    layer.weight = frozen(to_nf4(torch.randn(rows, in_features)))
    return layer


def of(**parts: nn.Module | nn.Parameter) -> nn.Module:
    """Make a module of modules and parameters."""
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


class Layered(nn.Module):
    """Two layers of a 4-bit weight and an adapter, and an embedding around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.layers = nn.ModuleList(of(base=linear(rows)) for rows in (5, 9))
        for layer in self.layers:
            layer.adapter = nn.Parameter(torch.zeros(3, 4))
        self.register_buffer("table", torch.zeros(7))
