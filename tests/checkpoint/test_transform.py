"""Checkpoints are quantized and merged without a model: what PEFT and `quantize_` would give."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nf4tensor import NF4Tensor, checkpoint, quantize_, to_nf4
from nf4tensor.checkpoint.transform import merge_files, quantize_files
from nf4tensor.checkpoint.write import WriteOptions
from nf4tensor.errors import CheckpointError, WeightError

QUIET = WriteOptions(progress=False)
RANK, ALPHA = 4, 6


class Tiny(nn.Module):
    """Names and shapes such as language models have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(10, 96)
        self.up_proj = nn.Linear(96, 130)
        self.down_proj = nn.Linear(130, 96, bias=False)
        self.norm = nn.LayerNorm(96)
        self.lm_head = nn.Linear(96, 10, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.lm_head(self.norm(self.down_proj(self.up_proj(x).relu())))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A dense checkpoint, with a configuration and a tokenizer beside it."""
    checkpoint.save(Tiny(), tmp_path / "dense", progress=False)
    return tmp_path / "dense"


def adapter(folder: Path, rank: int = RANK, **config) -> Path:
    """Write adapters as PEFT does."""
    folder.mkdir()
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    generator = torch.Generator().manual_seed(1)
    prefix = "base_model.model."
    state = {
        f"{prefix}up_proj.lora_A.weight": torch.randn(rank, 96, generator=generator) / 10,
        f"{prefix}up_proj.lora_B.weight": torch.randn(130, rank, generator=generator) / 10,
        f"{prefix}down_proj.lora_A.weight": torch.randn(rank, 130, generator=generator) / 10,
        f"{prefix}down_proj.lora_B.weight": torch.randn(96, rank, generator=generator) / 10,
    }
    save_file(state, folder / "adapter_model.safetensors")
    return folder


def test_quantized_files_are_those_of_a_quantized_model(dense: Path, tmp_path: Path):
    changes = quantize_files(dense, tmp_path / "packed", options=QUIET)
    checkpoint.save(quantize_(Tiny(), progress=False), tmp_path / "expected", progress=False)
    name = "model.safetensors"
    assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    found = {change.name: change for change in changes}
    assert {n for n, c in found.items() if c.what == "quantized"} == {
        "up_proj.weight",
        "down_proj.weight",
    }
    weight = Tiny().up_proj.weight.detach()
    error = (to_nf4(weight).dequantize().float() - weight.float()).norm() / weight.float().norm()
    assert found["up_proj.weight"].error == pytest.approx(error.item(), rel=1e-2)
    assert found["up_proj.weight"].after_bytes == to_nf4(weight).nbytes


def test_a_dry_run_writes_nothing(dense: Path, tmp_path: Path):
    changes = quantize_files(dense, tmp_path / "packed", options=QUIET, dry_run=True)
    assert not (tmp_path / "packed").exists()
    assert [change.what for change in changes].count("quantized") == 2


def test_weights_that_cannot_be_quantized_leave_nothing_behind(tmp_path: Path):
    model = Tiny()
    model.up_proj.weight.data[3, 4] = torch.nan
    checkpoint.save(model, tmp_path / "dense", progress=False)
    with pytest.raises(WeightError, match=r"up_proj.weight.*NaN"):
        quantize_files(tmp_path / "dense", tmp_path / "packed", options=QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_merged_outputs_are_those_of_the_adapters(dense: Path, tmp_path: Path, is_packed, rslora):
    base = dense
    if is_packed:
        quantize_files(dense, base := tmp_path / "packed", options=QUIET)
    folder = adapter(tmp_path / "adapter", use_rslora=rslora)
    changes = merge_files(base, folder, tmp_path / "merged", options=QUIET)
    assert {c.name for c in changes if c.what == "merged"} == {"up_proj.weight", "down_proj.weight"}
    model, merged = Tiny(), Tiny()
    checkpoint.load(model, base, progress=False)
    checkpoint.load(merged, tmp_path / "merged", progress=False)
    state = load_file(folder / "adapter_model.safetensors")
    model.float()
    for name in ("up_proj", "down_proj"):
        a, b = (state[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        scale = ALPHA / (RANK**0.5 if rslora else RANK)
        with torch.no_grad():
            model.get_submodule(name).weight += scale * b @ a
        found, expected = (m.get_submodule(name).weight.float() for m in (merged, model))
        # One rounding to bfloat16 of the sum, and one of what the model decodes to.
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)


def test_merging_into_4_bits_says_the_error_that_it_makes(dense: Path, tmp_path: Path):
    quantize_files(dense, tmp_path / "packed", options=QUIET)
    folder = adapter(tmp_path / "adapter")
    changes = merge_files(
        tmp_path / "packed", folder, tmp_path / "merged", in_4_bits=True, options=QUIET
    )
    errors = {c.name: c.error for c in changes if c.what == "merged in 4 bits"}
    assert errors.keys() == {"up_proj.weight", "down_proj.weight"}
    assert all(0.01 < error < 0.2 for error in errors.values())
    merged = quantize_(Tiny(), progress=False)
    checkpoint.load(merged, tmp_path / "merged", progress=False)
    assert isinstance(merged.up_proj.weight, NF4Tensor)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "IA3, expected plain LORA: merge it with PEFT"),
        ({"use_dora": True}, "LORA, use_dora"),
        ({"lora_alpha": "6"}, "no number lora_alpha"),
    ],
)
def test_other_adapters_are_refused(dense: Path, tmp_path: Path, config, message):
    folder = adapter(tmp_path / "adapter", **config)
    with pytest.raises(CheckpointError, match=message):
        merge_files(dense, folder, tmp_path / "merged", options=QUIET)


def test_adapters_of_another_model_are_refused(tmp_path: Path):
    other = nn.Module()
    other.up_proj = nn.Linear(64, 130)
    checkpoint.save(other, tmp_path / "other", progress=False)
    folder = adapter(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="for another model"):
        merge_files(tmp_path / "other", folder, tmp_path / "merged", options=QUIET)
    with pytest.raises(CheckpointError, match="is no adapter"):
        merge_files(tmp_path / "other", tmp_path / "other", tmp_path / "merged", options=QUIET)
