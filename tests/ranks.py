"""A pool of gloo ranks that is started once and runs many cases.

Tests ask the `ranks` fixture for it. A case is a top-level function `case(rank, world_size,
*args)`; its results come back in the order of ranks. What one rank raises is raised here, with that
rank's traceback.
"""

import datetime
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 120
PRELOAD = [
    "nf4tensor",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
]


class RankError(AssertionError):
    """A case failed on at least one rank."""


class Ranks:
    """World of `world_size` processes that stays up between cases."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []

    def run(self, case: Callable[..., Any], *args: Any, killed: int | None = None) -> list[Any]:
        """Run a case on every rank and return its results by rank.

        Args:
            case: A function of a module.
            *args: Passed to it, after rank and world size.
            killed: A rank that the case kills. Its result is None, and the world ends.
        """
        if not self._processes:
            self._start()
        for inbox in self._inboxes:
            inbox.put((case, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        if killed is not None:
            results[killed] = None
        while len(results) + len(errors) < self.world_size:
            try:
                rank, result, error = self._outbox.get(
                    timeout=TIMEOUT_SECONDS if not errors else 15
                )
            except queue.Empty:
                break
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
        if killed is not None:
            self.stop()
        silent = set(range(self.world_size)) - set(results) - set(errors)
        if errors or silent:
            self.stop()
            told = "\n".join(f"rank {rank}:\n{error}" for rank, error in sorted(errors.items()))
            raise RankError(f"{case.__name__} failed; silent ranks {sorted(silent)}\n{told}")
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []

    def _start(self) -> None:
        # Ranks are forked from one server that has imported torch, not each from nothing.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._inboxes = [context.SimpleQueue() for _ in range(self.world_size)]
        self._outbox = context.Queue()
        store = tempfile.NamedTemporaryFile(prefix="nf4tensor-ranks-", delete=False)
        store.close()
        os.unlink(store.name)
        for rank, inbox in enumerate(self._inboxes):
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, store.name, inbox, self._outbox),
                daemon=True,
            )
            process.start()
            self._processes.append(process)


def _serve(rank: int, world_size: int, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    size = str(world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=size)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
    )
    while True:
        case, args = inbox.get()
        torch.manual_seed(0)
        try:
            outbox.put((rank, case(rank, world_size, *args), None))
        except BaseException:
            outbox.put((rank, None, traceback.format_exc()))
