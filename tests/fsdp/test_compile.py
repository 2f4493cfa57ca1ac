"""Compiled and sharded: the losses of eager mode, and no more graphs than a dense base has."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.fsdp.training import Model, make_model, shard, train
from tests.ranks import Ranks

STEPS = 5
TOLERANCE = 1e-5
ALIKE = (67, 67, 67)  # layers of one shape share their graphs
# Inductor's own partitioner, which decides what backward keeps; then the graphs run as they are.
PARTITIONED = "aot_eager_decomp_partition"


def blocks_then_shard(model: Model, backend) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    shard(model)


def shard_then_blocks(model: Model, backend) -> None:
    shard(model)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def shard_then_whole(model: Model, backend) -> None:
    # FSDP2's own hooks break the graph.
    shard(model).compile(backend=backend)


def train_compiled(rank, world_size, prepare, backend, options):
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    model = make_model(hidden=ALIKE, **options)
    prepare(model, counter)
    losses = train(model, STEPS, rank, world_size)
    return losses, (counter.frame_count, sum(counters["graph_break"].values()))


@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("backend", [PARTITIONED, pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("prepare", [blocks_then_shard, shard_then_blocks, shard_then_whole])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_graphs(ranks: Ranks, prepare, backend, checkpointing):
    options = {"checkpointing": checkpointing}
    expected = train(make_model(hidden=ALIKE, **options), STEPS)
    found = ranks.run(train_compiled, prepare, backend, options)
    dense = ranks.run(train_compiled, prepare, backend, options | {"quantize": False})
    for (losses, counts), (_, dense_counts) in zip(found, dense, strict=True):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert counts <= dense_counts
        if prepare is not shard_then_whole:
            assert counts[1] == 0
