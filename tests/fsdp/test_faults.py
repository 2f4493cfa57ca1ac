"""A rank that dies ends the others, with a message that says what was under way."""

import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nf4tensor import NF4Tensor
from tests.fsdp.training import make_model, shard, train
from tests.ranks import TIMEOUT_SECONDS, Ranks

VICTIM = 1
three_ranks = pytest.mark.parametrize("ranks", [3], indirect=True)


def die(*_):
    """End this process as the kernel does when memory is out."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingWriter(dcp.FileSystemWriter):
    """Dies when it should write."""

    write_data = die


class DyingReader(dcp.FileSystemReader):
    """Dies when it should read."""

    read_data = die


def what_ends(action) -> tuple[str, float]:
    """Return the traceback of an action that another rank's death ends, and its seconds."""
    start = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011 - torch's own, of several classes
        action()
    lines = traceback.format_exception(raised.type, raised.value, raised.tb)
    return "".join(lines), time.monotonic() - start


def assert_ended(found, what: str) -> None:
    """Check what the survivors report."""
    survivors = [result for rank, result in enumerate(found) if rank != VICTIM]
    assert len(survivors) == 2
    for message, seconds in survivors:
        assert what in message
        assert seconds < TIMEOUT_SECONDS


def step(rank, world_size, direction):
    model = shard(make_model())
    if rank == VICTIM and direction == "forward":
        model.blocks[1].register_forward_hook(die)
    elif rank == VICTIM:
        model.blocks[1].register_full_backward_hook(die)
    return what_ends(lambda: train(model, 1, rank, world_size))


@three_ranks
@pytest.mark.parametrize(
    ("direction", "what"), [("forward", "all_gather"), ("backward", "loss.backward()")]
)
def test_death_in_a_step(ranks: Ranks, direction, what):
    assert_ended(ranks.run(step, direction, killed=VICTIM), what)


def save_twice(rank, world_size, folder):
    state = {"model": shard(make_model()).state_dict()}
    dcp.save(state, checkpoint_id=Path(folder) / "first")
    writer = DyingWriter if rank == VICTIM else dcp.FileSystemWriter
    return what_ends(lambda: dcp.save(state, storage_writer=writer(Path(folder) / "second")))


def load(rank, world_size, folder):
    expected = shard(make_model()).state_dict()
    model = shard(make_model())
    for parameter in model.parameters():
        local = parameter.to_local()
        (local.record if isinstance(local, NF4Tensor) else local.detach()).fill_(0)
    state = {"model": model.state_dict()}
    with pytest.raises(dcp.api.CheckpointException, match="metadata"):
        dcp.load(state, checkpoint_id=Path(folder) / "second")
    dcp.load(state, checkpoint_id=Path(folder) / "first")
    for name, tensor in state["model"].items():
        found, saved = tensor.to_local(), expected[name].to_local()
        if isinstance(found, NF4Tensor):
            found, saved = found.record, saved.record
        assert torch.equal(found, saved), name
    reader = DyingReader if rank == VICTIM else dcp.FileSystemReader
    return what_ends(lambda: dcp.load(state, storage_reader=reader(Path(folder) / "first")))


@three_ranks
def test_death_in_a_save_leaves_what_was_saved_before(ranks: Ranks, tmp_path):
    assert_ended(ranks.run(save_twice, str(tmp_path), killed=VICTIM), "dcp.save")
    assert_ended(ranks.run(load, str(tmp_path), killed=VICTIM), "dcp.load")
