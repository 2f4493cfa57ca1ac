"""The example for TRL, run on one and two processes: loss falls, and the adapter is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the extra `hf` is missing")
from safetensors.torch import load_file

from tests.examples.test_finetune import _make_model

pytestmark = [pytest.mark.hf, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).parents[2] / "examples" / "sft_trainer.py"
SMALL = "--steps 6 --seq-len 32 --batch 2 --lora-rank 4"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    _make_model(str(folder))
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("packing", [[], ["--packing"]])
def test_trains_and_saves(model, tmp_path, num_ranks, packing):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, "-W", "ignore", *(launch if num_ranks > 1 else ()), str(SCRIPT)]
    command += ["--model", str(model), "--out", str(tmp_path / "out"), *SMALL.split(), *packing]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env=environment
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", result.stdout)]
    assert len(losses) >= 6
    assert losses[-1] < losses[0]
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 14
    assert all(tensor.isfinite().all() for tensor in adapter.values())
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
