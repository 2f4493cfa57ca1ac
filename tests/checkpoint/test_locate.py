"""Checkpoints by the id of a repository on the hub, which works offline once it is cached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nf4tensor import checkpoint, quantize_

pytest.importorskip("huggingface_hub", reason="the extra `hf` is missing")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def inspect(name: str, home: Path, where: Path) -> subprocess.CompletedProcess:
    """Run `nf4tensor inspect` offline, with a cache of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    command = [sys.executable, "-W", "ignore", "-m", "nf4tensor", "inspect", name]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )


def test_a_cached_repository_is_found_offline(tmp_path):
    cached = tmp_path / "hub" / "models--someone--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    torch.manual_seed(0)
    model = quantize_(nn.Sequential(nn.Linear(64, 32)), progress=False)
    checkpoint.save(model, cached / "snapshots" / COMMIT, progress=False)
    found = inspect("someone/model", tmp_path, tmp_path)
    assert found.returncode == 0, found.stderr
    assert "nf4 of 64, square8" in found.stdout


def test_what_is_nowhere_is_an_error(tmp_path):
    found = inspect("someone/missing", tmp_path, tmp_path)
    assert found.returncode == 1
    assert "someone/missing is no file or folder here" in found.stderr
    assert "Traceback" not in found.stderr
