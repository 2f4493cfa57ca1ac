"""The ranks of the sharding benchmark: how a run is told that fails, dies or hangs."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# In a process of its own: ranks are forked, and pytest's has threads by now.
SCRIPT = """
import json, os, signal, time
import torch.distributed as dist
import sharding_ranks

sharding_ranks.GRACE_SECONDS = 1.0

def all_fail(here):
    here.tell(losses=[dist.get_rank()])
    here.at("save")
    raise ValueError("no room\\nand more")

def one_fails_while_others_wait(here):
    here.at("step 1")
    if dist.get_rank() == 1:
        raise ValueError("odd")
    dist.barrier()

def one_dies(here):
    here.at("load")
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def all_hang(here):
    time.sleep(60)

for case in (all_fail, one_fails_while_others_wait, one_dies, all_hang):
    outcome = sharding_ranks.run(case, 2, 1 if case is all_hang else 60)
    print(json.dumps([outcome.failure, outcome.all("losses")]))
"""


def test_failures_are_told_as_they_happen():
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    result = subprocess.run(
        command, cwd=BENCHMARKS, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    failed, waited, died, hung = map(json.loads, result.stdout.splitlines())
    assert failed == ["save: ValueError: no room", [[0], [1]]]
    assert waited == [
        "rank 1: step 1: ValueError: odd; rank 0: step 1: hung: no answer in 1 s after that",
        None,
    ]
    assert died[0] == "rank 0: load: the process died, exit code -9"
    assert hung[0] == "start: hung: no answer in 1 s"
