"""Processes of the fine-tuning example: one a rank, started, set up and watched.

`launch` starts a script once a rank, as torchrun does; a script that torchrun itself started needs
only `session`. Nothing here knows about models or data.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

PARENT = os.getppid()


def launch(script: str, argv: list[str], ranks: int) -> None:
    """Run `script` in `ranks` processes of this machine and wait for them.

    Raises:
        SystemExit: a rank failed. It has said why itself, unless a signal ended it.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # ranks that spin starve each other
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say enough
    arguments = ["--standalone", f"--nproc-per-node={ranks}", script, *argv]
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(
                f"rank {failure.local_rank} was ended by signal {-failure.exitcode} (9 is often a "
                "lack of memory). --resume continues from the last checkpoint.",
                file=sys.stderr,
            )
        raise SystemExit(1) from None


@contextlib.contextmanager
def session(kind: str, prepare: Callable[[], object]) -> Iterator[torch.device]:
    """Join the other ranks: gloo on the CPU; on GPUs NCCL, with gloo for tensors in CPU memory.

    One process a machine calls `prepare` (downloads) while the others wait. An error that all
    ranks meet is shown by rank 0 alone.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        if os.environ["LOCAL_RANK"] == "0":
            prepare()
        dist.barrier()
        yield device
    except SystemExit as error:
        raise SystemExit(1 if dist.get_rank() else error.code) from None
    finally:
        dist.destroy_process_group()


def stop_without_launcher() -> None:
    """End this rank when the process that started it is gone: nobody would end it any more."""
    if os.getppid() != PARENT:
        raise SystemExit("the launcher is gone: stopping here; --resume continues")


def mean(value: torch.Tensor) -> float:
    """Average a scalar over the ranks."""
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def quickest_dtype(device: torch.device) -> str:
    """Return the compute dtype: bfloat16 on a GPU, the quicker one, measured by rank 0, on a CPU.

    A CPU without bfloat16 instructions emulates them, many times slower than float32.
    """
    answer = ["bfloat16"]
    if device.type == "cpu" and dist.get_rank() == 0:
        seconds = {}
        for name in ("float32", "bfloat16"):
            x, w = (torch.ones(128, 512, dtype=getattr(torch, name)) for _ in range(2))
            x.requires_grad_()
            trials = []
            for _ in range(3):
                start = time.perf_counter()
                torch.nn.functional.linear(x, w).sum().backward()
                trials.append(time.perf_counter() - start)
            seconds[name] = min(trials)
        answer = ["bfloat16" if seconds["bfloat16"] < 0.8 * seconds["float32"] else "float32"]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]
