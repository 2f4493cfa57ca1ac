"""What a compiled step keeps for its backward pass, and holds at most: never dense weights.

Inductor's partitioner is asked, since that of "aot_eager" keeps other things.
"""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from nf4tensor import quantize_
from tests.tensor.weights import dense

# torch's own, at its first compilation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
WIDTH, LAYERS, ROWS = 512, 6, 8
DENSE_BYTES = WIDTH * WIDTH * 4


class Model(nn.Module):
    """Frozen layers of which each but the first is differentiated."""

    def __init__(self, quantize: bool, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers.requires_grad_(False)
        self.checkpointing = checkpointing
        if quantize:
            quantize_(self, progress=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = (
                checkpoint(self.block, x, layer, use_reentrant=False)
                if self.checkpointing
                else (self.block(x, layer))
            )
        return x.square().mean()

    def block(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return torch.tanh(layer(x)) + x


def graphs_of(model: nn.Module, x: torch.Tensor) -> dict[str, torch.fx.GraphModule]:
    """Train one step and return both graphs."""
    graphs = {}

    def keep(name: str):
        def compiler(graph, _):
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(model, fullgraph=True, backend=backend)(x).backward()
    return graphs


def tensors_in(graph: torch.fx.GraphModule, *ops: str) -> list[torch.Tensor]:
    """Return the fake tensors that nodes of some kinds stand for."""
    values = (node.meta.get("val") for node in graph.graph.nodes if not ops or node.op in ops)
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_backward_keeps_records_and_no_graph_has_a_dense_weight(checkpointing):
    model = Model(quantize=True, checkpointing=checkpointing)
    graphs = graphs_of(model, dense(ROWS, WIDTH))
    for graph in graphs.values():
        assert not any(t.shape == (WIDTH, WIDTH) for t in tensors_in(graph))
    kept = tensors_in(graphs["backward"], "placeholder")
    records = [t for t in kept if t.dtype == torch.uint8]
    assert len(records) == LAYERS
    activations = sum(t.nbytes for t in kept) - sum(t.nbytes for t in records)
    assert activations <= (2 * LAYERS + 4) * ROWS * WIDTH * 4


def peak_bytes(run) -> int:
    """Return the most memory that torch's allocator gave out at once while something ran."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_peak_memory_of_a_step_is_that_of_eager_mode(checkpointing, rows):
    torch._dynamo.reset()
    model, x = Model(quantize=True, checkpointing=checkpointing), dense(rows, WIDTH)
    compiled = torch.compile(model, fullgraph=True)
    peaks = {}
    for name, run in (("eager", model), ("compiled", compiled)):
        for _ in range(2):
            run(x).backward()
        peaks[name] = peak_bytes(lambda run=run: run(x).backward())
    assert 0 < peaks["compiled"] <= peaks["eager"] + DENSE_BYTES
