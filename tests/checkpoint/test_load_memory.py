"""Loading takes a rank's share and a few rows at a time, never a layer, never the whole model."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from nf4tensor import checkpoint, memory_footprint, quantize_
from nf4tensor.checkpoint.load import BLOCK_BYTES
from tests.ranks import Ranks

WIDTH = 4096
LAYERS = {"small": 4, "large": 64}  # of 32 MiB in bfloat16
SLACK_BYTES = 32 << 20


def anonymous_bytes() -> int:
    """Return what this process holds beside mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory while a block runs, above the level before it."""

    def __enter__(self):
        self._start, self.bytes, self._ends = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()

    def _watch(self):
        while not self._ends.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes() - self._start)


def load(rank, world_size, folder, layers):
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        )
    quantize_(model, progress=False)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    start = time.monotonic()
    with Peak() as peak:
        checkpoint.load(model, folder, progress=False)
    return peak.bytes, memory_footprint(model), time.monotonic() - start


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_peak_memory_of_a_rank(ranks: Ranks, tmp_path: Path, size, capsys):
    weights = torch.randn(WIDTH, WIDTH).bfloat16()
    state = {f"{i}.weight": weights.clone() for i in range(LAYERS[size])}
    save_file(state, tmp_path / "model.safetensors")
    del state
    found = ranks.run(load, str(tmp_path), LAYERS[size])
    start = time.monotonic()
    with (tmp_path / "model.safetensors").open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass
    reading = time.monotonic() - start
    with capsys.disabled():
        for rank, (peak, share, seconds) in enumerate(found):
            print(
                f"\n{size} on {ranks.world_size}, rank {rank}: peak {peak >> 20} MiB, share "
                f"{share >> 20} MiB, {seconds:.1f} s; reading the file {reading:.1f} s",
                end="",
            )
    for peak, share, _ in found:
        assert peak <= 1.1 * (share + BLOCK_BYTES) + SLACK_BYTES
