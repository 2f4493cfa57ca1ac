"""`nf4tensor merge`: the merged files compute what PEFT computes with the adapter."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")
pytest.importorskip("peft", reason="the extra `hf` is missing")

import peft

from nf4tensor.checkpoint.transform import merge_files, quantize_files
from nf4tensor.errors import CheckpointError
from tests.integrations.tiny_models import load, logits, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
OPTIONS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}},
    "bias": {"bias": "lora_only"},
}


def adapted(folder, options):
    """Return a PEFT model over the dense base, with adapters of random values, which are saved."""
    model = load(folder / "dense", dtype=torch.float32)
    targets = ["q_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "adapter")
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    """A folder with a dense model in float32."""
    save(tmp_path / "bfloat16")
    load(tmp_path / "bfloat16", dtype=torch.float32).save_pretrained(tmp_path / "dense")
    return tmp_path


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_merged_outputs_are_those_of_the_adapter(folder, options):
    expected = logits(adapted(folder, options))
    merge_files(folder / "dense", folder / "adapter", folder / "merged")
    found = logits(load(folder / "merged", dtype=torch.float32))
    plain = logits(load(folder / "dense", dtype=torch.float32))
    assert (found - expected).norm() < 0.01 * (plain - expected).norm() + 1e-5 * expected.norm()


def test_merged_into_4_bits(folder):
    expected = logits(adapted(folder, {}))
    quantize_files(folder / "dense", folder / "packed")
    changes = merge_files(folder / "dense", folder / "adapter", folder / "merged", in_4_bits=False)
    assert all(change.error is None or change.error < 0.01 for change in changes)
    packed = merge_files(folder / "packed", folder / "adapter", folder / "again", in_4_bits=True)
    errors = [change.error for change in packed if change.error]
    assert errors
    assert max(errors) < 0.2
    assert expected.isfinite().all()


def test_dora_is_refused(folder):
    adapted(folder, {"use_dora": True})
    with pytest.raises(CheckpointError, match="expected plain LORA"):
        merge_files(folder / "dense", folder / "adapter", folder / "merged")
    assert not (folder / "merged").exists()
