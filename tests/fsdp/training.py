"""A small LoRA model and its training loop, sharded or not, for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from nf4tensor import NF4Tensor, quantize_

GLOBAL_BATCH = 24
WIDTH = 96


class LoRALinear(nn.Module):
    """A frozen linear with trainable low-rank factors beside it."""

    def __init__(self, in_features: int, out_features: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features)
        self.lora_a = nn.Linear(in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class Block(nn.Module):
    """Norm, up, down; the row counts are what makes sharding hard."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = LoRALinear(WIDTH, hidden)
        self.down = LoRALinear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks of awkward widths and a head of a single row."""

    def __init__(
        self, hidden: tuple[int, ...] = (67, 130, 33), checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(h) for h in hidden)
        self.head = LoRALinear(WIDTH, 1)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


def is_base(module: nn.Module, name: str) -> bool:
    """Choose the frozen linears, not the adapters."""
    return name.endswith("base")


def make_model(quantize: bool = True, **options: Any) -> Model:
    """Build the same model on every rank, its base in 4 bits or dense with the same values."""
    torch.manual_seed(1)
    model = Model(**options)
    quantize_(model, filter_fn=is_base, progress=False)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.base.requires_grad_(False)
            if not quantize and isinstance(module.base.weight, NF4Tensor):
                dense = module.base.weight.dequantize()
                module.base.weight = nn.Parameter(dense, requires_grad=False)
    return model


def shard(model: Model, **options: Any) -> Model:
    """Shard every block and the root, as users do."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(
    model: nn.Module,
    steps: int = 10,
    rank: int = 0,
    world_size: int = 1,
    accumulate: int = 1,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """Train with AdamW on a fixed stream of data and return the global loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        step_loss = torch.zeros(())
        for _ in range(accumulate):
            inputs = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
            targets = inputs[:, :1].sin() + inputs[:, 1:2]
            mine = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
            loss = F.mse_loss(model(inputs[mine]).float(), targets[mine]) / accumulate
            loss.backward()
            step_loss += loss.detach()
        if world_size > 1:
            dist.all_reduce(step_loss)
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss.item() / world_size)
    return losses
