"""Collectives between ranks move bytes; reductions and mixtures are refused on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    broadcast,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nf4tensor import NF4Tensor
from nf4tensor.errors import UnsupportedError
from tests.fsdp.training import make_model, train
from tests.ranks import Ranks
from tests.tensor.weights import make, make_dynamic8


def same(found: NF4Tensor, expected: NF4Tensor) -> bool:
    """Compare bytes."""
    return torch.equal(found.record, expected.record)


def moves(rank, world_size):
    q, first = make(6, 65, seed=rank), make(6, 65, seed=0)
    every = [make(6, 65, seed=other) for other in range(world_size)]

    received = q.clone()
    dist.broadcast(received, 0)
    assert same(received, first)
    for view in (lambda w: w.view(-1), lambda w: w.t(), lambda w: w[2:4]):
        received = q.clone()
        dist.broadcast(view(received), 0)
        assert same(view(received), view(first))

    outputs = [torch.empty_like(q) for _ in range(world_size)]
    dist.all_gather(outputs, q)
    assert all(map(same, outputs, every))

    received = torch.empty_like(q)
    dist.scatter(received, every if rank == 0 else None, 0)
    assert same(received, q)

    outputs = [q.new_zeros(6, 65) for _ in range(world_size)] if rank == 0 else None
    dist.gather(q, outputs, 0)
    assert rank != 0 or all(map(same, outputs, every))

    if world_size > 1:
        received = q.new_zeros(6, 65)
        if rank == 0:
            dist.send(q, 1)
        elif rank == 1:
            dist.recv(received, 0)
            assert same(received, first)
            received.zero_()

    objects = [first if rank == 0 else None]
    dist.broadcast_object_list(objects, 0)
    assert same(objects[0], first)


def test_rows_are_moved_as_bytes(ranks: Ranks):
    ranks.run(moves)


def functional(rank, world_size):
    q, first = make(6, 65, seed=rank), make(6, 65, seed=0)
    every = torch.cat([make(6, 65, seed=other) for other in range(world_size)])
    group = dist.group.WORLD
    assert same(broadcast(q, 0, group), first)
    for view in (lambda w: w, lambda w: w.view(3, 2, 65), lambda w: w.view(-1)):
        gathered = all_gather_tensor(view(q), 0, group)
        assert isinstance(gathered, NF4Tensor)
        assert torch.equal(gathered.record.flatten(0, -2), every.record)
        assert gathered.shape[0] == world_size * view(q).shape[0]
    strided = torch.cat([q, q])[::2]
    assert torch.equal(
        all_gather_tensor(strided, 0, group)[:6].record, torch.cat([first, first])[::2].record
    )


def test_functional_collectives(ranks: Ranks):
    ranks.run(functional)


def refusals(rank, world_size):
    q = make(6, 65)
    group = dist.group.WORLD
    reductions = (
        lambda: dist.all_reduce(q),
        lambda: dist.reduce(q, 0),
        lambda: all_reduce(q, "sum", group),
    )
    for reduction in reductions:
        with pytest.raises(UnsupportedError, match=r"not reduced; call dequantize\(\) first"):
            reduction()
    dense = [torch.empty(6, 65) for _ in range(world_size)]
    for mixture in (
        lambda: dist.all_gather(dense, q),
        lambda: dist.gather(q, dense, 0) if rank == 0 else dist.gather(q, dense, rank),
    ):
        with pytest.raises(UnsupportedError, match="pass NF4Tensors on every rank"):
            mixture()
    other = [make(6, 65, block_size=32) for _ in range(world_size)]
    with pytest.raises(UnsupportedError, match="between different views or specs"):
        dist.all_gather(other, q)
    with pytest.raises(UnsupportedError, match=r"clone\(\) it first"):
        dist.broadcast(make(6, 128)[:, :64], 0)
    square = make(64, 64)
    with pytest.raises(UnsupportedError, match="between different views or specs"):
        dist.all_gather([square.t() for _ in range(world_size)], square)
    for columns in (q.t(), q[0]):
        with pytest.raises(UnsupportedError, match="gather rows, of two or more dimensions"):
            all_gather_tensor(columns, 0, group)


def test_reductions_and_mixtures_are_refused_before_anything_is_sent(ranks: Ranks):
    ranks.run(refusals)


def parallel_training(rank, world_size):
    model = make_model()
    with pytest.raises(UnsupportedError, match="pass init_sync=False to DistributedDataParallel"):
        DistributedDataParallel(model)
    records = [p.record.clone() for p in model.parameters() if isinstance(p, NF4Tensor)]
    losses = train(
        DistributedDataParallel(model, init_sync=False), steps=4, rank=rank, world_size=world_size
    )
    after = [p.record for p in model.parameters() if isinstance(p, NF4Tensor)]
    assert all(map(torch.equal, records, after))
    return losses


def test_distributed_data_parallel_trains_without_its_first_broadcast(ranks: Ranks):
    expected = train(make_model(), steps=4)
    for losses in ranks.run(parallel_training):
        assert losses == pytest.approx(expected, rel=1e-5)


def coalesced(rank, world_size):
    weights = [make(6, 65, seed=rank), make(2, 3, 65, seed=rank + 9)]
    dist._broadcast_coalesced(dist.group.WORLD, weights, 1 << 20, 0)
    assert same(weights[0], make(6, 65))
    assert same(weights[1], make(2, 3, 65, seed=9))
    imported = [make_dynamic8(3), make_dynamic8(2)]
    imported[0].record.fill_(rank)
    dist._broadcast_coalesced(dist.group.WORLD, imported, 1 << 20, 0)
    assert not imported[0].record.any()


def test_what_distributed_data_parallel_broadcasts_keeps_its_bytes(ranks: Ranks):
    ranks.run(coalesced)


def distributed(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    q = make(33, 384)
    for placement in (Shard(0), Shard(1), Replicate()):
        for source in (0, None):
            placed = distribute_tensor(q.clone(), mesh, [placement], src_data_rank=source)
            assert isinstance(placed.to_local(), NF4Tensor)
            whole = placed.full_tensor()
            assert torch.equal(whole.dequantize(), q.dequantize())
            if whole.spec == q.spec:
                assert same(whole, q)
            placed.zero_()  # a local tensor that was cut is a tensor of its own
            assert not placed.full_tensor().dequantize().any()


def test_distributed_tensors_keep_values_and_take_writes(ranks: Ranks):
    ranks.run(distributed)
