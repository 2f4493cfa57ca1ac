"""The Python of docs/huggingface.md, run as it stands."""

import inspect
import os
import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is missing")
pytest.importorskip("peft", reason="the extra `hf` is missing")
pytest.importorskip("accelerate", reason="the extra `hf` is missing")

from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.integrations.transformers import NF4Config
from tests.integrations.tiny_models import TOKENS, load, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SHARDED = [block for block in BLOCKS if "torchrun" in block]


def run(blocks: list[str], folder: Path, names: dict) -> dict:
    """Run blocks one after the other, in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        os.chdir(before)
    return names


def test_on_one_process(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes", reason="the extra `bnb` is missing")
    from transformers import BitsAndBytesConfig

    save(tmp_path / "dense", intermediate_size=144)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = load(tmp_path / "dense", quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "of bitsandbytes")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    alone = [block for block in BLOCKS if block not in SHARDED]
    names = {"dense": "dense", "of_bitsandbytes": "of bitsandbytes", "tokens": TOKENS}
    found = run(alone, tmp_path, names)
    assert len(alone) >= 4
    packed = Checkpoint(tmp_path / "packed").entries
    assert sum(entry.weight is not None for entry in packed.values()) == 14
    assert Checkpoint(tmp_path / "packed too").entries.keys() == packed.keys()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    merged = Checkpoint(tmp_path / "merged").entries
    assert merged.keys() == packed.keys()
    assert not any(entry.weight for entry in merged.values())
    assert found["errors"] == {}


def case_sharded(rank: int, world_size: int, folder: Path) -> None:
    """Run the blocks that say how to start them."""
    warnings.simplefilter("ignore")
    run(SHARDED, folder, {"dense": "dense", "tokens": TOKENS})


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_on_two_ranks(ranks, tmp_path):
    save(tmp_path / "dense")
    assert len(SHARDED) == 1
    ranks.run(case_sharded, tmp_path)
    packed = Checkpoint(tmp_path / "sharded packed").entries
    assert sum(entry.weight is not None for entry in packed.values()) == 14
    adapter = Checkpoint(tmp_path / "sharded adapter" / "adapter_model.safetensors").entries
    assert len(adapter) == 2 * 14


def test_options_in_the_table_are_those_of_the_configuration():
    for name in inspect.signature(NF4Config).parameters:
        assert f"`{name}" in PAGE.read_text(), name
