"""Sections of `gpu_check.py` that train: Llama-shaped layers in plain torch, with LoRA.

The frozen base is ours, the same weights decoded, or another package's. Sections compare losses
with those of the plain model, and time steps.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import harness
import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_timing import cells, race
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from nf4tensor import NF4Tensor, dequantize_, quantize_

RANK = 16
STEPS = 3
# Of losses: sums in another order, and what comes of them in a few steps.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
OTHER_SCALES = 2e-2  # of the first loss over another package's base


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer and of its input."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    tokens: int = 2048


LLAMA_8B = Sizes()
SMALL = Sizes(1024, 3584, 8, 2, 256)
QUICK = Sizes(128, 192, 4, 2, 16)


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank factors."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features, bias=False)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, in_features) / in_features**0.5)
        self.up = nn.Parameter(torch.randn(out_features, RANK) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Layer(nn.Module):
    """Attention with shared keys and values, and a gated feed-forward; no rotary embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.hidden // sizes.heads
        kv = self.head * sizes.kv_heads
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.hidden) for _ in range(2))
        self.q, self.o = (Adapted(sizes.hidden, sizes.hidden) for _ in range(2))
        self.k, self.v = (Adapted(sizes.hidden, kv) for _ in range(2))
        self.gate, self.up = (Adapted(sizes.hidden, sizes.ffn) for _ in range(2))
        self.down = Adapted(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_model(check, sizes: Sizes, layers: int, dtype: torch.dtype) -> nn.Module:
    """Return layers with a 4-bit base, the same at every call."""
    torch.manual_seed(0)
    with torch.device(check.device):
        model = nn.Sequential(*(Layer(sizes) for _ in range(layers))).to(dtype)
    return quantize_(model, progress=False)


def make_input(check, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """Return an input that wants its gradient, as that of any layer but the first."""
    shape = (1, sizes.tokens, sizes.hidden)
    return torch.randn(shape, dtype=dtype, device=check.device, requires_grad=True)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return what is trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss: of an output that should be the input, turned round."""
    return F.mse_loss(model(x).float(), x.detach().flip(1).float())


def stepper(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Return a function that takes one step and returns the loss before it, waiting for none."""
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3, foreach=True)

    def step() -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        return loss.detach()

    return step


def compare(check, title: str, dtype: torch.dtype, losses: dict[str, list[Tensor]]) -> None:
    """Report losses and compare all with the first ones.

    Raises:
        AssertionError: They are farther from each other than sums in another order explain.
    """
    expected, *others = (torch.stack(values).cpu().double() for values in losses.values())
    for name, values in losses.items():
        told = ", ".join(f"{value:.6f}" for value in values)
        check.row(title, {"dtype": str(dtype).removeprefix("torch."), "model": name, "loss": told})
    for name, found in zip(list(losses)[1:], others, strict=True):
        distance = ((found - expected).abs() / expected.abs()).max().item()
        bound = TOLERANCES[dtype]
        assert distance <= bound, f"{title}: {name} is {distance:.2g} off, more than {bound:.2g}"


# Sections


def step(check) -> None:
    """Time a step of a layer over our base, a dense one and those of the other packages."""
    sizes, dtype = (QUICK if check.quick else LLAMA_8B), torch.bfloat16
    x = make_input(check, sizes, dtype)
    check.at("making the bases")
    models = bases(check, make_model(check, sizes, 1, dtype), dtype)
    first = {name: loss_of(model, x).item() for name, model in models.items()}
    for name, loss in first.items():
        bound = TOLERANCES[dtype] if name == "dense" else OTHER_SCALES
        assert abs(loss - first["ours"]) <= bound * first["ours"], f"{name}: loss {loss}, {first}"

    def gradients(model: nn.Module, number: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(model, x), [x, *trainable(model)])

    check.at("forward and backward")
    calls = {name: partial(gradients, model) for name, model in models.items()}
    report(check, "forward and backward, as a graph", race(check, calls))
    check.at("steps")
    steps = {name: stepper(model, x) for name, model in models.items()}
    calls = {name: lambda number, step=step: step() for name, step in steps.items()}
    report(check, "step with AdamW, call by call", race(check, calls, is_captured=False))


def report(check, what: str, times: dict[str, harness.Timing]) -> None:
    """Add a row for each model."""
    for name, timing in times.items():
        row = {"of a layer": what, "base": name, **cells(timing)}
        if name != "ours":
            row["theirs / ours"] = timing["median_ms"] / times["ours"]["median_ms"]
        check.row("training", row)


class TorchaoLinear(nn.Module):
    """torchao's product as a layer."""

    def __init__(self, torchao, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(peers.torchao_weight(torchao, weight), requires_grad=False)
        self.product = torchao.linear_nf4

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, weight=self.weight)


def bases(check, ours: nn.Module, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return the model over each kind of base; the others quantize our decoded weights."""
    dense = dequantize_(copy.deepcopy(ours), dtype)
    models = {"ours": ours, "dense": dense}
    bnb = peers.load("bitsandbytes", check, check.left_out)
    if bnb is not None:
        make = partial(peers.bitsandbytes_linear, bnb, dtype=dtype)
        models["bitsandbytes"] = with_base(dense, make)
    smallest = dense[0].k.base.weight
    if (torchao := peers.load_torchao(smallest, check, check.left_out)) is not None:
        models["torchao"] = with_base(dense, partial(TorchaoLinear, torchao))
    return models


def with_base(dense: nn.Module, make: Callable[[Tensor], nn.Module]) -> nn.Module:
    """Return a copy of a model with other layers as its base."""
    model = copy.deepcopy(dense)
    for module in model.modules():
        if isinstance(module, Adapted):
            module.base = make(module.base.weight.data)
    return model


@contextlib.contextmanager
def one_rank(check) -> Iterator[DeviceMesh]:
    """Yield a mesh of this process alone."""
    backend = "nccl" if check.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh(check.device, (1,))
        finally:
            dist.destroy_process_group()


def fsdp(check) -> None:
    """Train under FSDP2, one rank, as without it."""
    train_sharded(check, "fsdp, one rank")


def offload(check) -> None:
    """The same with parameters in the CPU's memory, pinned where there is a GPU."""
    check_pinned(check)
    policy = CPUOffloadPolicy(pin_memory=check.device == "cuda")
    train_sharded(check, "fsdp, offloaded", offload_policy=policy)


def train_sharded(check, title: str, **options) -> None:
    """Compare the losses of a plain and a sharded model."""
    sizes = QUICK if check.quick else SMALL
    with one_rank(check) as mesh:
        for dtype in TOLERANCES:
            check.at(f"{title}, {dtype}")
            x = make_input(check, sizes, dtype)
            plain = stepper(make_model(check, sizes, 2, dtype), x)
            model = make_model(check, sizes, 2, dtype)
            for layer in model:
                fully_shard(layer, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
            sharded = stepper(model, x)
            losses = {"plain": [plain() for _ in range(STEPS)]}
            losses["sharded"] = [sharded() for _ in range(STEPS)]
            compare(check, title, dtype, losses)
            weight = model[0].q.base.weight.to_local()
            assert isinstance(weight, NF4Tensor), f"sharding made a {type(weight).__name__}"
            if "offload_policy" in options:
                assert weight.device.type == "cpu", f"the offloaded weight is on {weight.device}"
                assert weight.record.is_pinned() == (check.device == "cuda"), "pinned memory"


def check_pinned(check) -> None:
    """Move a weight from pinned memory: its bytes stay."""
    weight = make_model(check, QUICK, 1, torch.bfloat16)[0].q.base.weight.detach()
    there = weight.cpu()
    there = there.pin_memory() if check.device == "cuda" else there
    back = there.to(check.device, non_blocking=True)
    assert torch.equal(back.record, weight.record), "moving changed a record"


def compiled(check) -> None:
    """Compile each layer as one graph: as without, and only once for all layers."""
    sizes, dtype = (QUICK if check.quick else LLAMA_8B), torch.bfloat16
    # Inductor takes minutes of a small CPU; what it is given is the same.
    backend = "inductor" if check.device == "cuda" else "aot_eager"
    from torch._dynamo.utils import counters

    counters.clear()
    x = make_input(check, sizes, dtype)
    plain, model = (make_model(check, sizes, 2, dtype) for _ in range(2))
    for layer in model:
        layer.compile(fullgraph=True, backend=backend)
    check.at(f"compiling by {backend}")
    steps = {"plain": stepper(plain, x), "compiled": stepper(model, x)}
    losses = {name: [step() for _ in range(STEPS)] for name, step in steps.items()}
    compare(check, f"compiled by {backend}", dtype, losses)
    check.at("timing")
    calls = {name: lambda number, step=step: step() for name, step in steps.items()}
    times = race(check, calls, is_captured=False)
    for name, timing in times.items():
        row = {"two layers": name, **cells(timing)}
        check.row("step with AdamW, call by call", row)
    graphs = counters["stats"]["unique_graphs"]
    check.row("graphs of two layers", {"graphs": graphs})
    assert graphs == 1, f"two layers of one shape were compiled into {graphs} graphs"
