"""Folders that bitsandbytes quantized, loaded as 4-bit tensors: the same codes and scales."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="the extra `hf` is missing")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("bitsandbytes", reason="the extra `bnb` is missing")

from nf4tensor import NF4Tensor
from nf4tensor.errors import CheckpointError
from nf4tensor.integrations import bitsandbytes
from nf4tensor.integrations.convert import convert_files
from nf4tensor.integrations.transformers import NF4Config
from tests.integrations.tiny_models import load, logits, make, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=["nested", "plain", "mixtral"])
def folder(request, tmp_path_factory):
    """What Transformers saves of a model that bitsandbytes quantized."""
    from transformers import BitsAndBytesConfig

    dense, packed = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("bitsandbytes")
    kind = "mixtral" if request.param == "mixtral" else "llama"
    save(dense, kind, intermediate_size=144)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=request.param != "plain",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    load(dense, quantization_config=config, device_map="cpu").save_pretrained(packed)
    return packed


def tensors_of(folder):
    """Return the entries of a checkpoint as they are stored."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_loads_the_same_codes_and_scales(folder):
    model = load(folder, quantization_config=NF4Config())
    stored = tensors_of(folder)
    grouped = bitsandbytes.prefixes(stored)
    assert len(grouped) >= 8
    for name, names in grouped.items():
        expected, _ = bitsandbytes.from_state_dict({n: stored[n] for n in names}, name)
        weight = model.get_parameter(name)
        assert isinstance(weight, NF4Tensor)
        assert torch.equal(weight.record, expected.record), name
        assert weight.spec == expected.spec
        assert not weight.requires_grad


def test_saves_as_ours_and_back_as_theirs(folder, tmp_path):
    """With every byte that bitsandbytes had."""
    model = load(folder, quantization_config=NF4Config())
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert torch.equal(logits(model), logits(again))
    again.save_pretrained(tmp_path / "packed again")
    convert_files(tmp_path / "packed again", tmp_path / "back", "bitsandbytes")
    before, after = tensors_of(folder), tensors_of(tmp_path / "back")
    grouped = bitsandbytes.prefixes(before)
    assert len(grouped) >= 8
    for name in (name for names in grouped.values() for name in names):
        assert torch.equal(after[name], before[name]), name


def test_logits_are_those_of_bitsandbytes(folder):
    theirs = load(folder, device_map="cpu").train()  # in eval mode it may repack weights
    ours = load(folder, quantization_config=NF4Config())
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=3e-2)


def test_a_weight_that_rows_cannot_hold(tmp_path):
    """133 columns in blocks of 64: rows would be cut into pieces of one weight."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    save(tmp_path / "dense", intermediate_size=133 + 1)
    theirs = load(tmp_path / "dense", quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "bitsandbytes")
    with pytest.raises(Exception, match="conversion"):
        load(tmp_path / "bitsandbytes", quantization_config=NF4Config())


def test_experts_that_it_quantized_one_by_one(tmp_path):
    """They have to be put together as rows, so they are converted first."""
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import load_file, save_file

    dense = save(tmp_path / "dense", "mixtral", intermediate_size=144)
    tensors = load_file(dense / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        packed, state = quantize_4bit(
            tensors.pop(name), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        entries = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        tensors |= {name: packed, **entries}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match="whose blocks have no rows: `nf4tensor convert PATH NEW"
    ):
        load(dense, quantization_config=NF4Config())
    convert_files(dense, tmp_path / "packed", "nf4tensor")
    experts = load(tmp_path / "packed").model.layers[1].mlp.experts
    name = "model.layers.1.block_sparse_moe.experts.3.{}.weight".format
    for key, weight in (("w1", experts.gate_up_proj[3, :144]), ("w2", experts.down_proj[3])):
        found = {n: t for n, t in tensors.items() if n.startswith(name(key))}
        expected, _ = bitsandbytes.from_state_dict(found, name(key))
        assert weight.spec == expected.spec
        assert torch.equal(weight.record, expected.record)


def test_ordinary_checkpoints_are_merged_as_before(tmp_path):
    """The change of Transformers that lets the above work touches nothing else."""
    from transformers import BitsAndBytesConfig

    save(tmp_path / "dense")
    load(tmp_path / "dense", quantization_config=NF4Config()).save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match="quantized with NF4Config but you are passing a BitsAnd"):
        load(tmp_path / "packed", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert make().config.model_type == "llama"
