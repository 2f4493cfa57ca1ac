"""State of a sharded model: gathered, saved and loaded without changing a byte."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from nf4tensor import NF4Tensor, NF4TensorError
from tests.fsdp.training import make_model, shard
from tests.ranks import Ranks


def records(model) -> dict[str, torch.Tensor]:
    """Return the records that this rank holds."""
    local = {n: getattr(p, "_local_tensor", p) for n, p in model.named_parameters()}
    return {n: t.record for n, t in local.items() if isinstance(t, NF4Tensor)}


def erased(model):
    """Overwrite what this rank holds, so that only loading can bring it back."""
    for parameter in model.parameters():
        local = parameter.to_local()
        (local.record if isinstance(local, NF4Tensor) else local.detach()).fill_(0)
    return model


def assert_equal_records(model, expected: dict[str, torch.Tensor]) -> None:
    found = records(model)
    assert found.keys() == expected.keys()
    assert len(found) == 7
    for name, record in found.items():
        assert torch.equal(record, expected[name]), name


def gather(rank, world_size):
    expected = records(make_model())
    model = shard(make_model())
    full = {n: p.full_tensor() for n, p in model.named_parameters() if n in expected}
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, record in expected.items():
        assert torch.equal(full[name].record, record)
        assert torch.equal(state[name].record, record)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_rank_0 = get_model_state_dict(model, options=options)
    assert set(on_rank_0) == (set(state) if rank == 0 else set())


def test_full_state_holds_the_unsharded_bytes(ranks: Ranks):
    ranks.run(gather)


def load(rank, world_size):
    model = shard(make_model())
    expected = records(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    loaded = erased(shard(make_model()))
    set_model_state_dict(loaded, full, options=StateDictOptions(full_state_dict=True))
    assert_equal_records(loaded, expected)
    loaded = erased(shard(make_model()))
    loaded.load_state_dict(model.state_dict())
    assert_equal_records(loaded, expected)
    inputs = torch.ones(2, 96)
    assert torch.equal(loaded(inputs), model(inputs))


def test_full_and_sharded_states_load(ranks: Ranks):
    ranks.run(load)


def broadcast(rank, world_size):
    model = make_model()
    state = model.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(NF4TensorError, match=r"broadcast_from_rank0"):
        set_model_state_dict(shard(make_model()), state, options=options)
    single = fully_shard(torch.nn.Sequential(make_model().blocks[0].up.base))
    state = {"0.weight": make_model().blocks[0].up.base.weight} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    with pytest.raises(NF4TensorError, match=r"broadcast_from_rank0"):
        set_model_state_dict(single, state, options=options)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_broadcast_of_a_quantized_state_is_refused_on_every_rank(ranks: Ranks):
    ranks.run(broadcast)


def checkpoint(rank, world_size, folder):
    model = shard(make_model())
    dcp.save({"model": model.state_dict()}, checkpoint_id=Path(folder) / str(world_size))
    for saved in sorted(Path(folder).iterdir()):
        loaded = erased(shard(make_model()))
        state = {"model": loaded.state_dict()}
        dcp.load(state, checkpoint_id=saved)
        loaded.load_state_dict(state["model"])
        assert_equal_records(loaded, records(model))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every world size leaves its checkpoint in."""
    return tmp_path_factory.mktemp("checkpoints")


def test_checkpoint_loads_at_its_own_and_smaller_world_sizes_saves(ranks: Ranks, checkpoints):
    ranks.run(checkpoint, str(checkpoints))
