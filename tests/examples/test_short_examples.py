"""The short examples, run with a tiny model: they train, and write what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")
from safetensors.torch import load_file

from tests.examples.test_finetune import _make_model

pytestmark = [pytest.mark.hf, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    _make_model(str(folder))
    return folder


def run(script: str, *arguments: str, num_ranks: int = 1) -> str:
    """Run an example and return what it printed."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, "-W", "ignore", *(launch if num_ranks > 1 else ())]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("packing", [[], ["--packing"]])
def test_sft_trainer(model, tmp_path, num_ranks, packing):
    pytest.importorskip("trl", reason="the extra `hf` is missing")
    options = ["--steps", "6", "--seq-len", "32", "--batch", "2", "--lora-rank", "4", *packing]
    out = tmp_path / "out"
    printed = run(
        "sft_trainer.py", "--model", str(model), "--out", str(out), *options, num_ranks=num_ranks
    )
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) >= 6
    assert losses[-1] < losses[0]
    adapter = load_file(out / "adapter_model.safetensors")
    assert len(adapter) == 2 * 14
    assert all(tensor.isfinite().all() for tensor in adapter.values())
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


def test_plain_fsdp2(model):
    options = ["--steps", "16", "--seq-len", "32", "--batch", "4"]
    printed = run("plain_fsdp2.py", "--model", str(model), *options, num_ranks=2)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 16
    assert sum(losses[-4:]) < sum(losses[:4])  # each step has other text
    assert "2 ranks" in printed


def test_from_bitsandbytes(model, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the extra `bnb` is missing")
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    theirs, out = tmp_path / "theirs", tmp_path / "out"
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(
        model, quantization_config=config, device_map="cpu"
    ).save_pretrained(theirs)
    AutoTokenizer.from_pretrained(model).save_pretrained(theirs)
    run("from_bitsandbytes.py", "--model", str(theirs), "--out", str(out))
    before = load_file(theirs / "model.safetensors")
    after = load_file(out / "bitsandbytes" / "model.safetensors")
    packed = [name for name in before if ".weight." in name]
    assert len(packed) >= 14
    assert all(torch.equal(before[name], after[name]) for name in packed)
