"""`quantize_`, `dequantize_` and `memory_footprint` on whole models."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from nf4tensor import NF4Spec, NF4Tensor, dequantize_, memory_footprint, quantize_, to_nf4
from nf4tensor.errors import DTypeError, NF4TensorError, SpecError, UnsupportedError, WeightError
from tests.tensor.weights import assert_same, dense


class Experts(nn.Module):
    """Stacked weights and biases, as mixture-of-experts models hold them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(dense(4, 96, 64))
        self.down = nn.Parameter(dense(4, 64, 96, seed=1))
        self.up_bias = nn.Parameter(dense(4, 96))
        self.counts = nn.Parameter(torch.zeros(4, 2, 2, dtype=torch.int64), requires_grad=False)


class Block(nn.Module):
    """A linear with adapters beside it, a norm, and a narrow gate."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.gate = nn.Linear(128, 1, bias=False)


class Model(nn.Module):
    """What language models are made of."""

    def __init__(self, tie: bool = False):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.experts = Experts()
        self.head = nn.Linear(64, 32, bias=False)
        self.lm_head = nn.Linear(64, 32, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def model(**options) -> Model:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Model(**options)


def quantized_names(module: nn.Module) -> set[str]:
    """Return the names of all 4-bit parameters, shared ones under each name."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, weight in named if isinstance(weight, NF4Tensor)}


DEFAULT = {
    "blocks.0.up.weight",
    "blocks.0.gate.weight",
    "blocks.1.up.weight",
    "blocks.1.gate.weight",
    "experts.up",
    "experts.down",
    "head.weight",
}


def test_linears_and_stacked_experts_are_quantized():
    quantized, before = model(), model()
    parameters = dict(before.named_parameters())
    assert quantize_(quantized, progress=False) is quantized
    assert quantized_names(quantized) == DEFAULT
    for name, weight in quantized.named_parameters():
        assert isinstance(weight, nn.Parameter)
        if name in DEFAULT:
            assert torch.equal(weight.record, to_nf4(parameters[name]).record)
            assert not weight.requires_grad
        else:
            assert type(weight) is nn.Parameter
            assert torch.equal(weight, parameters[name])
            assert weight.requires_grad == parameters[name].requires_grad
    quantize_(quantized, progress=False)
    assert quantized_names(quantized) == DEFAULT


def test_options_reach_every_weight():
    quantized = quantize_(
        model(), progress=False, block_size=32, scale_block_size=None, quant_type="fp4"
    )
    assert quantized.head.weight.spec == NF4Spec.for_weight(64, 32, None, "fp4")
    assert quantized.experts.up.spec == NF4Spec.for_weight(64, 32, None, "fp4")
    assert (
        quantize_(model(), progress=False, scaler_block_size=1).head.weight.spec.num_segments == 1
    )


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (("lm_head",), set()),
        ((), {"+lm_head.weight"}),
        (("head",), {"-head.weight", "+lm_head.weight"}),
        ("head", {"-head.weight", "+lm_head.weight"}),
        (
            ("up", "experts"),
            {f"-{n}" for n in DEFAULT if "up" in n or "experts" in n} | {"+lm_head.weight"},
        ),
        (("blocks", "0", "lm_head"), set()),
    ],
)
def test_skip_is_the_last_component_of_a_name(skip, left):
    quantized = quantize_(model(), progress=False, skip=skip)
    removed = {name[1:] for name in left if name[0] == "-"}
    added = {name[1:] for name in left if name[0] == "+"}
    assert quantized_names(quantized) == (DEFAULT - removed) | added


def test_filter_replaces_the_default():
    seen = []

    def choose(module, name):
        seen.append(name)
        return name in ("embed", "blocks.1.up", "lm_head", "experts")

    quantized = quantize_(model(), filter_fn=choose, progress=False)
    expected = {"embed.weight", "blocks.1.up.weight", "experts.up", "experts.down"}
    assert quantized_names(quantized) == expected
    assert "blocks.0.up" in seen
    assert "lm_head" not in seen
    assert type(quantized.experts.up_bias) is nn.Parameter


def test_adapters_held_by_a_linear_are_left_alone():
    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            self.lora_a = nn.Parameter(torch.randn(64, 64))

    assert quantized_names(quantize_(nn.Sequential(Adapted()), progress=False)) == {"0.weight"}


def test_freeze_base_freezes_the_rest():
    frozen = quantize_(model(), freeze_base=True, progress=False)
    assert not any(p.requires_grad for p in frozen.parameters())
    kept = quantize_(model(), progress=False)
    assert kept.blocks[0].up.bias.requires_grad
    assert not kept.blocks[0].up.weight.requires_grad


# Weights in two places


def test_a_weight_shared_with_an_embedding_stays_dense(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "nf4tensor"):
        tied = quantize_(model(tie=True), progress=False)
    assert tied.head.weight is tied.embed.weight
    assert type(tied.head.weight) is nn.Parameter
    assert quantized_names(tied) == DEFAULT - {"head.weight"}
    assert "head.weight" in caplog.text


def test_a_weight_of_two_linears_stays_shared():
    shared = model()
    shared.blocks[1].up.weight = shared.blocks[0].up.weight
    shared.blocks[1].again = shared.blocks[0].up
    quantize_(shared, progress=False)
    assert isinstance(shared.blocks[0].up.weight, NF4Tensor)
    assert shared.blocks[1].up.weight is shared.blocks[0].up.weight
    assert shared.blocks[1].again.weight is shared.blocks[0].up.weight
    dequantize_(shared)
    assert shared.blocks[1].up.weight is shared.blocks[0].up.weight
    assert type(shared.blocks[0].up.weight) is nn.Parameter


def test_a_weight_shared_with_a_skipped_module_stays_dense(caplog: pytest.LogCaptureFixture):
    shared = model()
    shared.lm_head.weight = shared.head.weight
    quantize_(shared, progress=False)
    assert shared.lm_head.weight is shared.head.weight
    assert type(shared.head.weight) is nn.Parameter
    assert "head.weight" in caplog.text


def test_weights_that_would_not_shrink_are_left_alone_and_listed(caplog: pytest.LogCaptureFixture):
    narrow = nn.ModuleDict({"a": nn.Linear(16, 9), "b": nn.Linear(17, 9), "c": nn.Linear(64, 64)})
    assert 2 * 16 <= NF4Spec.for_weight(16).pitch
    assert 2 * 17 > NF4Spec.for_weight(17).pitch
    quantize_(narrow, progress=False)
    assert quantized_names(narrow) == {"b.weight", "c.weight"}
    assert "too narrow" in caplog.text
    assert "a.weight" in caplog.text
    assert "b.weight" not in caplog.text
    assert narrow["a"].weight.requires_grad
    caplog.clear()
    quantize_(nn.Sequential(nn.Linear(64, 64)), progress=False)
    assert not caplog.records


# Errors


def test_errors_name_the_parameter():
    for broken, error, words in (
        (lambda m: m.blocks[1].up.weight.data.fill_(torch.nan), WeightError, "every element"),
        (lambda m: m.blocks[1].up.double(), DTypeError, "float64"),
    ):
        broken_model = model()
        broken(broken_model)
        with pytest.raises(error, match=rf"^blocks.1.up.weight: .*{words}"):
            quantize_(broken_model, progress=False)
    with pytest.raises(SpecError, match=r"^blocks.0.up.weight: block_size is 63"):
        quantize_(model(), progress=False, block_size=63)
    with pytest.raises(TypeError, match="unexpected keyword"):
        quantize_(model(), progress=False, blocksize=64)


@pytest.fixture
def _one_rank():
    """A world of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_sharded_models_are_refused_and_counted():
    sharded = fully_shard(nn.Sequential(nn.Linear(64, 64, bias=False)))
    with pytest.raises(
        UnsupportedError, match=r"0.weight is sharded already: call quantize_ first"
    ):
        quantize_(sharded, progress=False)
    sharded = quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), progress=False)
    expected = memory_footprint(sharded)
    fully_shard(sharded)
    with pytest.raises(UnsupportedError, match=r"0.weight is sharded: call dequantize_ on a model"):
        dequantize_(sharded)
    assert memory_footprint(sharded) == expected == 64 * 64


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_when_asked_for(progress, capsys: pytest.CaptureFixture):
    quantize_(model(), progress=progress)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("quantize: 100%" in shown.err) == progress


# Back, and bytes


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_dequantize_puts_the_values_back(dtype):
    original = model().to(torch.float16)
    quantized = quantize_(original, progress=False)
    expected = {n: p.dequantize(dtype) for n, p in quantized.named_parameters() if n in DEFAULT}
    assert dequantize_(quantized, dtype) is quantized
    assert not quantized_names(quantized)
    for name, weight in quantized.named_parameters():
        if name in DEFAULT:
            assert type(weight) is nn.Parameter
            assert not weight.requires_grad
            assert_same(weight.detach(), expected[name])
            assert weight.dtype == (dtype or torch.float16)
    with pytest.raises(NF4TensorError, match="float64"):
        dequantize_(quantize_(model(), progress=False), torch.float64)


def test_memory_footprint_counts_true_bytes():
    linear = nn.Linear(4096, 100)
    assert memory_footprint(linear) == 4 * (4096 * 100 + 100)
    quantize_(nn.Sequential(linear), progress=False)
    assert memory_footprint(linear) == 100 * 2144 + 4 * 100
    linear.half()
    assert memory_footprint(linear) == 100 * 2144 + 2 * 100
    linear.register_buffer("again", linear.weight.detach()[10:20])
    assert memory_footprint(linear) == 100 * 2144 + 2 * 100
    linear.register_buffer("other", torch.zeros(7, dtype=torch.int64))
    assert memory_footprint(linear) == 100 * 2144 + 2 * 100 + 56
    linear.other = linear.other.expand(9, 7)
    assert memory_footprint(linear.to("meta")) == 100 * 2144 + 10 * 2144 + 2 * 100 + 9 * 56


def test_models_on_meta_are_quantized():
    with torch.device("meta"):
        on_meta = quantize_(Model(), progress=False)
    assert quantized_names(on_meta) == DEFAULT
    assert on_meta.head.weight.is_meta
    assert memory_footprint(on_meta) == memory_footprint(quantize_(model(), progress=False))
