"""Adapters of PEFT over 4-bit weights: the same as over the decoded, dense base."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")
pytest.importorskip("peft", reason="the extra `hf` is missing")

import peft

from nf4tensor import NF4Tensor, dequantize_, memory_footprint, quantize_, to_nf4
from nf4tensor.errors import NF4TensorWarning, UnsupportedError, WeightError
from nf4tensor.integrations.peft import merge_and_unload
from nf4tensor.integrations.transformers import NF4Config
from nf4tensor.tensor import fallback
from tests.integrations.tiny_models import TOKENS, load, logits, make, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
ALL = {"r": 4, "target_modules": "all-linear"}
SOME = {"target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


def loaded(folder, **options):
    return load(folder, quantization_config=NF4Config(), **options)


def adapted(model, config, seed: int = 0):
    torch.manual_seed(seed)
    return peft.get_peft_model(model, copy.deepcopy(config))


def trainable(model) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def move_adapters(model, seed: int = 3) -> None:
    """Give adapters values that training might."""
    generator = torch.Generator().manual_seed(seed)
    for weight in trainable(model).values():
        weight += 0.05 * torch.randn(weight.shape, generator=generator)


def train_step(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in trainable(model).items()}


CONFIGS = {
    "lora": peft.LoraConfig(**ALL),
    "rslora": peft.LoraConfig(**ALL, use_rslora=True),
    "orthogonal": peft.LoraConfig(**ALL, init_lora_weights="orthogonal"),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"], projection_prng_key=1),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "adalora": peft.AdaLoraConfig(total_step=10, **SOME),
    "loha": peft.LoHaConfig(r=4, **SOME),
    "lokr": peft.LoKrConfig(r=4, **SOME),
    "oft": peft.OFTConfig(oft_block_size=16, r=0, target_modules=["q_proj"]),
    "dora": peft.LoraConfig(**ALL, use_dora=True),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_trains_as_over_the_decoded_base(folder, kind):
    base = loaded(folder, dtype=torch.float32)
    models = [adapted(base, CONFIGS[kind])]
    models.append(adapted(loaded(folder, dtype=torch.float32).dequantize(), CONFIGS[kind]))
    for model in models:
        move_adapters(model)
    ours, theirs = map(trainable, models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    (loss, gradients), (expected_loss, expected) = map(train_step, models)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_initializers_that_change_the_base(folder, init):
    """The base is what is left of the weight, in 4 bits; the adapters are those of the weight."""
    config = peft.LoraConfig(**ALL, init_lora_weights=init)
    ours = adapted(loaded(folder, dtype=torch.float32), config)
    dense = adapted(loaded(folder, dtype=torch.float32).dequantize(), config)
    assert all(torch.equal(w, trainable(dense)[name]) for name, w in trainable(ours).items())
    for name, weight in ours.named_parameters():
        if isinstance(weight, NF4Tensor):
            expected = to_nf4(dense.get_parameter(name).detach())
            close = (weight.dequantize() - expected.dequantize()).norm() / expected.norm()
            assert close < 1e-3, name
    train_step(ours)


def test_plain_adapters_decode_nothing(folder, monkeypatch):
    """LoRA, rsLoRA, VeRA and IA3 only multiply; an op that decoded would be an error."""
    monkeypatch.setenv("NF4TENSOR_STRICT", "1")
    for kind in ("lora", "rslora", "vera", "ia3"):
        train_step(adapted(loaded(folder), CONFIGS[kind]))


def test_memory(folder):
    """Packed bytes, what else the model has, and adapters; never a dense copy of a weight."""
    model = loaded(folder)
    packed = sum(w.nbytes for w in model.parameters() if isinstance(w, NF4Tensor))
    others = memory_footprint(model) - packed
    model = peft.prepare_model_for_kbit_training(model)
    assert memory_footprint(model) <= 1.03 * (packed + 2 * others)  # PEFT casts those to float32
    assert sum(w.nbytes for w in model.parameters() if isinstance(w, NF4Tensor)) == packed
    model = adapted(model, CONFIGS["lora"])
    adapters = sum(w.nbytes for w in trainable(model).values())
    assert memory_footprint(model) <= 1.03 * (packed + 2 * others + adapters)
    assert model.get_nb_trainable_parameters() == (
        sum(w.numel() for w in trainable(model).values()),
        make().num_parameters() + sum(w.numel() for w in trainable(model).values()),
    )


def test_prepared_model_trains(folder):
    model = adapted(peft.prepare_model_for_kbit_training(loaded(folder)), CONFIGS["lora"])
    model.gradient_checkpointing_enable()
    loss, gradients = train_step(model)
    assert loss.isfinite()
    assert any(gradient.norm() > 0 for gradient in gradients.values())


def test_all_linear_is_every_linear_but_the_head(folder):
    model = adapted(loaded(folder), CONFIGS["lora"])
    assert len(trainable(model)) == 2 * 2 * 7
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer) is peft.tuners.lora.Linear


@pytest.mark.parametrize("safe", [False, True])
def test_merging_densely(folder, safe):
    model = adapted(loaded(folder), CONFIGS["lora"])
    move_adapters(model)
    expected = copy.deepcopy(model)
    dequantize_(expected)
    expected = expected.merge_and_unload(safe_merge=safe)
    merged, errors = merge_and_unload(model, safe_merge=safe)
    assert errors == {}
    assert not merged.is_quantized
    assert not any(isinstance(weight, NF4Tensor) for weight in merged.parameters())
    for name, weight in expected.named_parameters():
        assert torch.equal(weight, merged.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_merging_in_4_bits(folder, kind, tmp_path):
    model = adapted(loaded(folder), CONFIGS[kind])
    move_adapters(model)
    reference = copy.deepcopy(model)
    dequantize_(reference, torch.float32)
    reference = reference.merge_and_unload()
    merged, errors = merge_and_unload(model, in_4_bits=True)
    assert len(errors) == {"lora": 14, "dora": 14, "ia3": 6}[kind]
    for name, error in errors.items():
        weight = merged.get_parameter(name)
        expected = reference.get_parameter(name)
        assert isinstance(weight, NF4Tensor)
        found = (weight.dequantize(torch.float32) - expected).norm() / expected.norm()
        assert found == pytest.approx(error, rel=0.05, abs=1e-4)
        assert error < 0.15
        assert error > 0.02 or kind == "ia3"  # which scales whole rows
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(merged))


def test_safe_merge_refuses_nan(folder):
    model = adapted(loaded(folder), CONFIGS["lora"])
    with torch.no_grad():
        next(iter(trainable(model).values()))[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        merge_and_unload(copy.deepcopy(model), in_4_bits=True, safe_merge=True)
    with pytest.raises(WeightError, match="NaN or infinite"):
        merge_and_unload(copy.deepcopy(model), in_4_bits=True)
    with pytest.raises(ValueError, match="NaNs detected"):
        merge_and_unload(model, safe_merge=True)


def test_merging_of_peft_itself_rounds(folder, monkeypatch):
    """With a warning; over the decoded base it can be undone."""
    model = adapted(loaded(folder), CONFIGS["lora"])
    move_adapters(model)
    monkeypatch.setattr(fallback, "_warned", set())
    with pytest.warns(NF4TensorWarning, match="rounds to 4 bits and loses small changes"):
        copy.deepcopy(model).merge_adapter()
    dequantize_(model, torch.float32)
    model.base_model.model.to(torch.float32)
    expected = logits(model)
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_modules_to_save(folder):
    head = {**ALL, "modules_to_save": ["lm_head"]}
    model = adapted(loaded(folder), peft.LoraConfig(**head))
    train_step(model)
    config = NF4Config(quantize_lm_head=True, quantize_embeddings=True)
    model = load(folder, quantization_config=config)
    with pytest.raises(UnsupportedError, match=r"modules_to_save has a Linear whose weight is 4-"):
        adapted(model, peft.LoraConfig(**head))
    model = load(folder, quantization_config=config)
    dequantize_(model.lm_head)
    train_step(adapted(model, peft.LoraConfig(**head)))


def test_adapters_are_saved_and_loaded(folder, tmp_path):
    model = adapted(loaded(folder), CONFIGS["lora"])
    move_adapters(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(folder), tmp_path)
    assert torch.equal(logits(model), logits(again))


def test_adapters_that_transformers_holds_are_saved_alone(folder):
    """Its `add_adapter` wants a later PEFT, so this does what it does."""
    model = peft.inject_adapter_in_model(CONFIGS["lora"], loaded(folder))
    model._hf_peft_config_loaded = True
    state, metadata = model.hf_quantizer.get_state_dict_and_metadata(model)
    assert metadata == {}
    assert sum(".lora_" in name for name in state) == 2 * 2 * 7
    assert not any(name.endswith(".base_layer.weight") for name in state)


def test_models_of_quantize(folder):
    """Made without `NF4Config`, they are adapted and merged alike."""
    model = adapted(quantize_(load(folder), progress=False), CONFIGS["lora"])
    move_adapters(model)
    merged, errors = merge_and_unload(model, in_4_bits=True)
    assert len(errors) == 14
    assert isinstance(merged.model.layers[0].self_attn.q_proj.weight, NF4Tensor)


def test_adapters_of_experts(tmp_path):
    """PEFT adds to the weights of all experts, which decodes them."""
    save(tmp_path, "mixtral")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    model = adapted(loaded(tmp_path), config)
    move_adapters(model)
    loss, gradients = train_step(model)
    assert loss.isfinite()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    merged, errors = merge_and_unload(model, in_4_bits=True)
    assert set(errors) == {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2)}
    assert isinstance(merged.model.layers[0].mlp.experts.gate_up_proj, NF4Tensor)
