"""Distributed checkpoints keep every byte: saved by some ranks, loaded by others, sync or not."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nf4tensor import NF4Tensor, quantize_
from tests.fsdp.training import make_model, shard
from tests.ranks import Ranks

up_to_four = pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)
four_ranks = pytest.mark.parametrize("ranks", [4], indirect=True)


def local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank holds of each parameter, 4-bit ones as their bytes."""
    local = {n: getattr(p, "_local_tensor", p).detach() for n, p in model.named_parameters()}
    return {n: t.record if isinstance(t, NF4Tensor) else t for n, t in local.items()}


def erased(model: nn.Module) -> nn.Module:
    """Overwrite what this rank holds, so that only loading can bring it back."""
    for tensor in local_tensors(model).values():
        tensor.fill_(0)
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found = local_tensors(model)
    for name, tensor in local_tensors(expected).items():
        assert torch.equal(found[name], tensor), name


def saved_by_some(rank, world_size, folder, is_async):
    """Save on N of four ranks, load on M, for all N and M."""
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, world_size + 1)}
    for n, mesh in meshes.items():
        if rank < n:
            options = {"checkpoint_id": Path(folder) / str(n), "process_group": mesh.get_group()}
            model = shard(make_model(), mesh=mesh)
            state = {"model": model.state_dict()}
            if is_async:
                saving = dcp.async_save(state, **options)
                erased(model)  # what was staged is a copy
                saving.result()
            else:
                dcp.save(state, **options)
    dist.barrier()
    for m, mesh in meshes.items():
        if rank >= m:
            continue
        expected = shard(make_model(), mesh=mesh)
        for n in meshes:
            model = erased(shard(make_model(), mesh=mesh))
            state = {"model": model.state_dict()}
            path = Path(folder) / str(n)
            dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
            model.load_state_dict(state["model"])
            assert_equal(model, expected)


@four_ranks
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_any_number_of_ranks_loads_what_any_other_saved(ranks: Ranks, tmp_path, is_async):
    ranks.run(saved_by_some, str(tmp_path), is_async)


def saved_on_another_mesh(rank, world_size, folder):
    flat = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for saving, loading in ((flat, hybrid), (hybrid, flat)):
        path = Path(folder) / f"{saving.ndim}d"
        dcp.save({"model": shard(make_model(), mesh=saving).state_dict()}, checkpoint_id=path)
        model = erased(shard(make_model(), mesh=loading))
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        assert_equal(model, shard(make_model(), mesh=loading))


@four_ranks
def test_meshes_of_other_dimensions_load_each_others_checkpoints(ranks: Ranks, tmp_path):
    ranks.run(saved_on_another_mesh, str(tmp_path))


def sizes(rank, world_size, folder):
    model = nn.Sequential(nn.Linear(1024, 1000, bias=False), nn.Linear(1000, 1024, bias=False))
    model = shard_all(quantize_(model, progress=False))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    shard_file = Path(folder) / f"shard{rank}.pt"
    torch.save(model[0].weight.to_local(), shard_file)
    record = model[0].weight.to_local().record
    assert record.nbytes <= shard_file.stat().st_size <= record.nbytes + 4096
    return sum(p.full_tensor().nbytes for p in model.parameters())


def shard_all(model: nn.Sequential) -> nn.Sequential:
    model.blocks = []
    return shard(model)


@up_to_four
def test_files_are_as_large_as_the_packed_bytes(ranks: Ranks, tmp_path):
    packed_bytes = ranks.run(sizes, str(tmp_path))[0]
    file_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert packed_bytes <= file_bytes <= 1.02 * packed_bytes


def loaded_into_meta(rank, world_size, folder):
    expected = shard(make_model())
    dcp.save({"model": expected.state_dict()}, checkpoint_id=folder)
    with torch.device("meta"):
        model = make_model()
    assert all(p.is_meta for p in model.parameters())
    shard(model).to_empty(device="cpu")
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_equal(model, expected)
    inputs = torch.ones(2, 96)
    assert torch.equal(model(inputs), expected(inputs))


@up_to_four
def test_meta_model_takes_memory_and_loads(ranks: Ranks, tmp_path):
    ranks.run(loaded_into_meta, str(tmp_path))


def columns(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    weight = make_model(hidden=(192,), block_size=16).blocks[0].down.base.weight.detach()
    for saved in (Shard(0), Shard(1)):
        path = Path(folder) / str(saved)
        dcp.save({"w": distribute_tensor(weight, mesh, [saved])}, checkpoint_id=path)
        state = {"w": distribute_tensor(weight.new_zeros(weight.shape), mesh, [Shard(1)])}
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(state["w"].full_tensor().dequantize(), weight.dequantize())
    if world_size > 1:  # whose pairs a row has is not known before all of its columns are there
        state = {"w": distribute_tensor(weight.new_zeros(weight.shape), mesh, [Shard(0)])}
        with pytest.raises(dcp.api.CheckpointException, match="loads into the same column shards"):
            dcp.load(state, checkpoint_id=path)


@up_to_four
def test_columns_load_rows_and_rows_refuse_columns(ranks: Ranks, tmp_path):
    ranks.run(columns, str(tmp_path))
