"""`NF4Config`: what it quantizes, and that files and models come back bit for bit."""

import copy
import json
import logging

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")

from nf4tensor import NF4Tensor, checkpoint, memory_footprint, quantize_
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.checkpoint.transform import quantize_files
from nf4tensor.integrations.transformers import NF4Config
from tests.integrations.tiny_models import TOKENS, load, logits, make, save

pytestmark = [
    pytest.mark.hf,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::nf4tensor.errors.NF4TensorWarning"),
]
LINEARS = 7  # of a layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def quantized(folder):
    return load(folder, quantization_config=NF4Config())


def stored(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.record if isinstance(parameter, NF4Tensor) else parameter


def assert_same_weights(model, other):
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        other = theirs[name]
        assert isinstance(parameter, NF4Tensor) == isinstance(other, NF4Tensor), name
        assert torch.equal(stored(parameter), stored(other)), name
        if isinstance(parameter, NF4Tensor):
            assert parameter.spec == other.spec


def names_of(model) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, weight in named if isinstance(weight, NF4Tensor)}


def test_quantizes_as_quantize_does(folder, quantized):
    assert_same_weights(quantized, quantize_(load(folder), progress=False))
    assert quantized.dtype == torch.bfloat16
    assert not any(w.requires_grad for w in quantized.parameters() if isinstance(w, NF4Tensor))
    assert quantized.model.norm.weight.requires_grad
    assert len(names_of(quantized)) == 2 * LINEARS


@pytest.mark.parametrize(
    "options",
    [
        {"quant_type": "fp4"},
        {"block_size": 32, "scale_block_size": None},
        {"skip_modules": ["down_proj", "model.layers.0.self_attn"]},
        {"skip_modules": "lm_head", "quantize_lm_head": True, "quantize_embeddings": True},
        {"compute_dtype": "float32"},
    ],
    ids=str,
)
def test_options(folder, tmp_path, options):
    model = load(folder, quantization_config=NF4Config(**options))
    names = names_of(model)
    assert ("model.embed_tokens.weight" in names) == options.get("quantize_embeddings", False)
    assert "lm_head.weight" not in names
    if options.get("skip_modules", "lm_head") != "lm_head":
        assert len(names) == LINEARS - 1 + LINEARS - 5
    spec = model.model.layers[1].self_attn.q_proj.weight.spec
    assert spec.quant_type == options.get("quant_type", "nf4")
    assert spec.block_size == options.get("block_size", 64)
    assert (spec.scale_kind == "float32") == ("scale_block_size" in options)
    assert (model.dtype == torch.float32) == ("compute_dtype" in options)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_weights(model, again)
    assert torch.equal(logits(model), logits(again))
    assert again.config.quantization_config.to_dict() == NF4Config(**options).to_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head(tmp_path, tied):
    save(tmp_path / "dense", tie_word_embeddings=tied)
    both = {"quantize_embeddings": True, "quantize_lm_head": True}
    model = load(tmp_path / "dense", quantization_config=NF4Config(**both))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names_of(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path / "packed")
    names = Checkpoint(tmp_path / "packed").entries
    assert ("lm_head.weight" in names) != tied
    again = load(tmp_path / "packed")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(logits(model), logits(again))
    dense = copy.deepcopy(model).dequantize()
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=2e-2)


def test_a_tied_head_is_quantized_with_its_embeddings(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    with pytest.raises(NotImplementedError, match="set both or none of quantize_embeddings"):
        load(tmp_path, quantization_config=NF4Config(quantize_lm_head=True))
    assert len(names_of(load(tmp_path, quantization_config=NF4Config()))) == 2 * LINEARS


def test_conv1d_of_gpt2(tmp_path):
    save(tmp_path / "dense", "gpt2")
    model = load(tmp_path / "dense", quantization_config=NF4Config())
    assert len(names_of(model)) == 2 * 4
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(model), logits(load(tmp_path / "packed")))
    dense = copy.deepcopy(model).dequantize()
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=2e-2)


def test_narrow_weights_are_left(tmp_path, caplog):
    save(tmp_path, intermediate_size=16)
    with caplog.at_level(logging.WARNING, "nf4tensor"):
        model = load(tmp_path, quantization_config=NF4Config())
    assert "model.layers.0.mlp.down_proj.weight" not in names_of(model)
    assert "left in their own dtype (too narrow): model.layers.0.mlp.down_proj" in caplog.text


@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_saved_files_are_ours(quantized, tmp_path, size):
    """They load here and there, whether Transformers made one file or several."""
    quantized.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "20KB")
    assert_same_weights(quantized, load(tmp_path))
    found = {name for name, entry in Checkpoint(tmp_path).entries.items() if entry.weight}
    assert found == names_of(quantized)
    model = quantize_(make(), progress=False)
    checkpoint.load(model, tmp_path, progress=False)
    assert_same_weights(quantized, model)


def test_files_of_checkpoint_save(quantized, tmp_path):
    checkpoint.save(quantized, tmp_path / "packed", progress=False)
    model = load(tmp_path / "packed")
    assert_same_weights(quantized, model)
    assert len(str(model.config)) < 3000


def test_files_of_the_command_line(folder, quantized, tmp_path):
    quantize_files(folder, tmp_path / "packed")
    assert_same_weights(quantized, load(tmp_path / "packed"))


def test_weights_decode_when_they_are_used(quantized):
    dense = copy.deepcopy(quantized).dequantize()
    assert not names_of(dense)
    assert not dense.is_quantized
    torch.testing.assert_close(logits(quantized), logits(dense), rtol=0, atol=2e-2)


def test_dequantized_model_is_saved_as_any_other(folder, quantized, tmp_path):
    dense = copy.deepcopy(quantized).dequantize()
    dense.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_weights(dense, again)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_generate(quantized):
    tokens = quantized.generate(TOKENS, max_new_tokens=5, do_sample=False)
    assert tokens.shape == (2, TOKENS.shape[1] + 5)
    with torch.no_grad():
        step = quantized(tokens[:, :-1]).logits[:, -1].argmax(-1)
    assert torch.equal(step, tokens[:, -1])


def test_other_heads(folder, quantized, tmp_path):
    """What a checkpoint lacks is dense, and trains; names are found with and without prefix."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    quantized.save_pretrained(tmp_path / "packed")
    base = AutoModel.from_pretrained(tmp_path / "packed")
    assert names_of(base) == {name.removeprefix("model.") for name in names_of(quantized)}
    base.save_pretrained(tmp_path / "base")
    again = load(tmp_path / "base")
    for name in names_of(quantized):
        weight = quantized.get_parameter(name)
        assert torch.equal(again.get_parameter(name).record, weight.record), name
    for source, options in (("packed", {}), (folder, {"quantization_config": NF4Config()})):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / source, **options)
        assert names_of(model) == names_of(quantized)
        assert model.score.weight.requires_grad


def test_memory_footprint(folder, quantized):
    dense = load(folder)
    expected = memory_footprint(quantized)
    assert quantized.get_memory_footprint() == expected < dense.get_memory_footprint()
    without = quantized.get_memory_footprint(return_buffers=False)
    assert without == sum(p.nbytes for p in quantized.parameters())
    copied = copy.deepcopy(quantized).dequantize()
    assert copied.get_memory_footprint() == dense.get_memory_footprint()
