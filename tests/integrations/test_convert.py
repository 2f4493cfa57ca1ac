"""Checkpoints of bitsandbytes become ours and go back, byte for byte."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nf4tensor import checkpoint, cli, to_nf4
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.errors import CheckpointError, UnsupportedError
from nf4tensor.integrations.bitsandbytes import from_state_dict
from nf4tensor.integrations.convert import convert_files
from tests.integrations.golden_entries import CASES, as_bytes, entries


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A file with every golden weight of bitsandbytes, and a dense one."""
    state = {"norm.weight": torch.ones(5, dtype=torch.bfloat16)}
    for case in CASES:
        state |= entries(case, f"{case}.weight")
    (tmp_path / "theirs").mkdir()
    save_file(state, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path / "theirs"


def test_there_and_back(theirs: Path, tmp_path: Path, capsys):
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert cli.main(["convert", str(theirs), str(ours), "--to", "nf4tensor"]) == 0
    stored = Checkpoint(ours)
    assert stored.entries.keys() == {"norm.weight", *(f"{case}.weight" for case in CASES)}
    for case in CASES:
        expected, _ = from_state_dict(entries(case), "layer.weight")
        entry = stored.entries[f"{case}.weight"]
        assert (entry.weight.spec, entry.weight.dtype) == (expected.spec, expected.dtype)
        assert torch.equal(stored.rows(entry, (slice(None),)), expected.record)
    assert cli.main(["convert", str(ours), str(back), "--to", "bitsandbytes", "--json"]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (theirs, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        found = after[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert as_bytes(found) == as_bytes(tensor), name
    config = json.loads((back / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["load_in_4bit"] is True


def test_converted_weights_load_into_a_model(theirs: Path, tmp_path: Path):
    case = next(iter(CASES))
    convert_files(theirs, tmp_path / "ours", "nf4tensor")
    expected, _ = from_state_dict(entries(case), "layer.weight")
    model = nn.Module()
    layer = nn.Module()
    model.add_module(case, layer)
    layer.weight = nn.Parameter(expected.new_empty(expected.shape), requires_grad=False)
    checkpoint.load(model, tmp_path / "ours", strict=False, progress=False)
    assert torch.equal(layer.weight.record, expected.record)


def test_a_dry_run_writes_nothing(theirs: Path, tmp_path: Path):
    changes = convert_files(theirs, tmp_path / "ours", "nf4tensor", dry_run=True)
    assert not (tmp_path / "ours").exists()
    assert [change.what for change in changes].count("converted") == len(CASES)


def test_what_cannot_be_converted_is_refused_before_anything_is_written(tmp_path: Path):
    model = nn.Module()
    model.weight = nn.Parameter(to_nf4(torch.randn(4, 80), 16), requires_grad=False)
    checkpoint.save(model, tmp_path / "ours", progress=False)
    with pytest.raises(UnsupportedError, match=r"weight: .*blocks of 16"):
        convert_files(tmp_path / "ours", tmp_path / "theirs", "bitsandbytes")
    with pytest.raises(CheckpointError, match="has no weights of bitsandbytes"):
        convert_files(tmp_path / "ours", tmp_path / "again", "nf4tensor")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
