"""Processes of `bench_sharding.py`: what a rank measures, and how a run that dies or hangs is told.

Each run has processes of its own, forked from one that has imported everything and computed
nothing. A rank that failed stays until all have answered: what the others then do, and whether
they ever answer, is theirs.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

import sharding_models as models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

GLOBAL_BATCH, SEQ_LEN = 12, 16  # sequences that 1, 2, 3 and 4 ranks share evenly
LR = 1e-2
GRACE_SECONDS = 10.0  # for the others once a rank has failed


@dataclass
class Outcome:
    """What came of a run: what each rank found, and why it found no more."""

    found: list[dict]
    failure: str

    def all(self, key: str) -> list | None:
        """Return what the ranks found under a key, unless some did not get there."""
        return [rank[key] for rank in self.found] if all(key in r for r in self.found) else None


class CountGathers(TorchDispatchMode):
    """Add up what all-gathers receive."""

    received_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.received_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


class Rank:
    """This process, which tells the one that started it how far it is and what it found."""

    def __init__(self, connection: Connection) -> None:
        self.at = lambda stage: connection.send(("stage", stage))
        self.tell = lambda **found: connection.send(("found", found))


def reference(here: Rank, contestant: models.Contestant, sizes: models.Sizes, steps: int) -> None:
    """Train with the decoded weights dense and unsharded."""
    here.at("quantize")
    _train(here, models.build(contestant, sizes, decoded=True), steps)


def measure(here: Rank, contestant: models.Contestant, sizes: models.Sizes, *more) -> None:
    """Shard, train, save, and load into a model of other weights.

    Args:
        here: this rank.
        contestant: who holds the base.
        sizes: of the model.
        *more: the number of steps, and a folder for the checkpoint.
    """
    steps, folder = more
    here.at("quantize")
    model = models.build(contestant, sizes)
    here.at("fully_shard")
    models.shard(model)
    _train(here, model, steps)
    here.tell(base_bytes=models.held_bytes(model))
    here.at("save")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    here.at("load")
    loaded = models.shard(models.build(contestant, sizes, seed=1))
    state = {"model": get_model_state_dict(loaded)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state["model"])
    here.tell(differing=models.differing_parts(model, loaded))


def _train(here: Rank, model: nn.Module, steps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    batch = torch.randint(models.VOCABULARY, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    tokens = batch.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW(models.trainable(model), lr=LR)
    gathers, losses, seconds, cpu_seconds = CountGathers(), [], [], []
    for step in range(steps):
        here.at(f"step {step + 1}")
        start, cpu_start = time.perf_counter(), time.process_time()
        # The first step is not timed: it also sets up.
        with contextlib.nullcontext() if step else gathers:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        losses.append(_mean(loss))
    here.at("evaluate")
    with torch.no_grad():
        losses.append(_mean(model(input_ids=tokens, labels=tokens).loss))
    here.tell(losses=losses, gathered_bytes=gathers.received_bytes)
    here.tell(seconds=seconds[1:] or seconds, cpu_seconds=cpu_seconds[1:] or cpu_seconds)


def _mean(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def run(case: Callable[..., None], num_ranks: int, limit: float, *args) -> Outcome:
    """Run a case on ranks of its own, and end them.

    Args:
        case: called with a Rank and the arguments.
        num_ranks: how many.
        limit: seconds that it may take.
        *args: of the case.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes, connections = [], []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            place = {"rank": rank, "world_size": num_ranks, "init_method": f"file://{folder}/store"}
            serve = partial(_serve, theirs, place, partial(case, Rank(theirs), *args))
            processes.append(context.Process(target=serve, daemon=True))
            processes[-1].start()
            theirs.close()
            connections.append(mine)
        try:
            return _collect(processes, connections, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(connection: Connection, place: dict, case: Callable[[], None]) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # remarks of gloo, torch and the packages
        os.dup2(silence, stream)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", **place)
        case()
        connection.send(("done", None))
    except BaseException as error:
        connection.send(("failure", _describe(error)))
    signal.pause()  # until it is killed


def _describe(error: BaseException) -> str:
    """Return an exception's class and the first line of its message."""
    if isinstance(error, dcp.api.CheckpointException):  # around the real ones
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _collect(processes: list, connections: list[Connection], limit: float) -> Outcome:
    until = time.monotonic() + limit
    stages = ["start"] * len(processes)
    found: list[dict] = [{} for _ in processes]
    failures: dict[int, str] = {}
    running = dict(zip(connections, range(len(processes)), strict=True))
    while running and (ready := wait(list(running), until - time.monotonic())):
        for connection in ready:
            rank = running[connection]
            try:
                kind, content = connection.recv()
            except EOFError:
                processes[rank].join()
                kind, content = "failure", f"the process died, exit code {processes[rank].exitcode}"
            if kind == "stage":
                stages[rank] = content
            elif kind == "found":
                found[rank] |= content
            else:
                del running[connection]
            if kind == "failure":
                failures[rank] = f"{stages[rank]}: {content}"
                until = min(until, time.monotonic() + GRACE_SECONDS)
    waited = f"{GRACE_SECONDS:.0f} s after that" if failures else f"{limit:.0f} s"
    failures |= {r: f"{stages[r]}: hung: no answer in {waited}" for r in running.values()}
    return Outcome(found, _join(failures, len(processes)))


def _join(failures: dict[int, str], num_ranks: int) -> str:
    """Say which ranks failed and how, once for those that failed alike."""
    alike: dict[str, list[int]] = {}
    for rank, text in failures.items():
        alike.setdefault(text, []).append(rank)
    if len(alike) == 1 and len(failures) == num_ranks:
        return next(iter(alike))
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}: {text}"
        for text, ranks in alike.items()
    )
