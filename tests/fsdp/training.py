"""A small LoRA model and its training loop, sharded or not, for the tests of this folder."""

from collections.abc import Callable, Iterator
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
LR = 1e-2


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


def make_model(quantize: bool = True, block_size: int = 64, **options: Any) -> Model:
    """Build the same model on every rank, its base in 4 bits or dense with the same values."""
    torch.manual_seed(1)
    model = Model(**options)
    quantize_(model, filter_fn=is_base, progress=False, block_size=block_size)
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


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an endless stream of inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    while True:
        inputs = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
        yield inputs, inputs[:, :1].sin() + inputs[:, 1:2]


def train(
    model: nn.Module,
    steps: int = 10,
    rank: int = 0,
    world_size: int = 1,
    accumulate: int = 1,
    max_norm: float | None = 0.5,
    before_pass: Callable[[nn.Module, bool], None] | None = None,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """Train with AdamW on a fixed stream of data and return the global loss of each step.

    Args:
        model: What to train.
        steps: How many.
        rank, world_size: Of the data parallel group that shares each batch.
        accumulate: Passes before each step.
        max_norm: Of the gradients, which are clipped to it; None to leave them.
        before_pass: Called with the model and whether it is the last pass before a step.
        after_backward: Called with the model before each step.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses, data = [], batches()
    for _ in range(steps):
        step_loss = torch.zeros(())
        for turn in range(accumulate):
            if before_pass is not None:
                before_pass(model, turn == accumulate - 1)
            inputs, targets = (part.chunk(world_size)[rank] for part in next(data))
            loss = F.mse_loss(model(inputs).float(), targets) / accumulate
            loss.backward()
            step_loss += loss.detach()
        if world_size > 1:
            dist.all_reduce(step_loss)
        if after_backward is not None:
            after_backward(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss.item() / world_size)
    return losses
