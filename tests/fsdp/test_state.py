"""State of a sharded model: gathered, saved and loaded without changing a byte."""

import itertools
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
from tests.fsdp.training import Model, make_model, shard
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


def options_of_states(rank, world_size):
    model = shard(make_model())
    expected = {n: local_bytes(p) for n, p in model.named_parameters()}
    for full, offload, only_trained in itertools.product((False, True), repeat=3):
        options = StateDictOptions(
            full_state_dict=full,
            cpu_offload=offload,
            ignore_frozen_params=only_trained,
            strict=not only_trained,
        )
        state = get_model_state_dict(model, options=options)
        if full and offload:  # only rank 0 has it, and only dense tensors can be sent from there
            assert bool(state) == (rank == 0)
            continue
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert set(state) == (trained if only_trained else set(expected))
        loaded = erased(shard(make_model()))
        set_model_state_dict(loaded, dict(state), options=options)
        for name, parameter in loaded.named_parameters():
            if name in state:
                assert torch.equal(local_bytes(parameter), expected[name]), (name, options)


def local_bytes(parameter) -> torch.Tensor:
    """Return what this rank holds of a parameter, a 4-bit one as its record."""
    local = parameter.to_local().detach()
    return local.record if isinstance(local, NF4Tensor) else local


def test_states_with_every_option(ranks: Ranks):
    ranks.run(options_of_states)


def dense_state(rank, world_size):
    """The weights before they were quantized load as they were quantized, wherever they are."""
    torch.manual_seed(1)
    state = Model().state_dict()
    expected = records(shard(make_model()))
    for from_rank_0 in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        loaded = erased(shard(make_model()))
        given = state if rank == 0 or not from_rank_0 else {}
        set_model_state_dict(loaded, dict(given), options=options)
        assert_equal_records(loaded, expected)


def test_dense_states_are_quantized_as_they_load(ranks: Ranks):
    ranks.run(dense_state)


def quantized_state_of_dense_model(rank, world_size):
    model, state = make_model(quantize=False), make_model().state_dict()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def test_quantized_states_are_decoded_by_a_dense_model(ranks: Ranks):
    ranks.run(quantized_state_of_dense_model)


def other_dtypes(rank, world_size):
    model = shard(make_model())
    before = records(model)
    model.bfloat16()
    assert_equal_records(model, before)
    for convert in (model.double, lambda: model.to(torch.float64)):
        with pytest.raises(NF4TensorError, match=r"dequantize_\(model\) before model.to\(dtype\)"):
            convert()
    assert_equal_records(model, before)


def test_other_dtypes_change_no_byte_or_are_refused(ranks: Ranks):
    ranks.run(other_dtypes)


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
