"""A Llama with PEFT's adapters, compiled: as few graphs as over a dense base, and eager losses."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from nf4tensor import dequantize_, quantize_

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra hf")
pytestmark = [
    pytest.mark.hf,
    # Of these packages, about each other.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Of torch's compiler, which looks at outputs of one compiled layer that the next one gets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS, VOCABULARY = 5, 64
PARTITIONED = "aot_eager_decomp_partition"  # by Inductor's own partitioner


def make_model(base: str, layers: int = 3) -> nn.Module:
    """Return a Llama with adapters over the same base, 4-bit or dense."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = quantize_(transformers.LlamaForCausalLM(config), progress=False)
    if base == "dense":
        dequantize_(model)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.base_model.model.model.layers


def whole(model: nn.Module, **options) -> None:
    model.compile(fullgraph=True, **options)


def each_layer(model: nn.Module, **options) -> None:
    for layer in layers_of(model):
        layer.compile(fullgraph=True, **options)


def checkpointed_whole(model: nn.Module, **options) -> None:
    layers = set(layers_of(model))
    apply_activation_checkpointing(model, check_fn=layers.__contains__)
    whole(model, **options)


def train(model: nn.Module, sizes: list[int], dtype: torch.dtype | None = None) -> list[float]:
    """Take a step with a batch of each size; return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for size in sizes:
        tokens = torch.randint(VOCABULARY, (size, 8 + size), generator=generator)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(model: nn.Module, prepare, sizes: list[int], backend: str, **options):
    """Train a compiled model; return its losses and how many graphs and breaks there were."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    prepare(model, backend=counter)
    losses = train(model, sizes, **options)
    return losses, (counter.frame_count, sum(counters["graph_break"].values()))


def test_layers_share_graphs():
    expected = train(make_model("4-bit", 2), [2, 3])
    losses, counts = compiled(make_model("4-bit", 2), each_layer, [2, 3], PARTITIONED)
    assert losses == pytest.approx(expected, rel=1e-5)
    # The first layer's input needs no gradient; then both with a dynamic batch.
    assert counts == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [PARTITIONED, "inductor"])
@pytest.mark.parametrize("prepare", [whole, each_layer, checkpointed_whole])
def test_training_on_changing_batches(prepare, backend):
    sizes = [2, 3, 4, 5, 6]  # and as many lengths
    expected = train(make_model("4-bit"), sizes)
    losses, (graphs, breaks) = compiled(make_model("4-bit"), prepare, sizes, backend)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert breaks == 0
    _, (dense_graphs, _) = compiled(make_model("dense"), prepare, sizes, backend)
    assert graphs <= dense_graphs


@pytest.mark.slow
@pytest.mark.parametrize("backend", [PARTITIONED, "inductor"])
def test_autocast(backend):
    expected = train(make_model("4-bit", 1), [3, 3], torch.bfloat16)
    model = make_model("4-bit", 1)
    losses, counts = compiled(model, whole, [3, 3], backend, dtype=torch.bfloat16)
    assert losses == pytest.approx(expected, rel=1e-3)  # fused operations round less often
    assert counts == (1, 0)
