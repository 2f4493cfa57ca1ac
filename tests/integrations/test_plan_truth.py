"""What `nf4tensor plan` says of a rank, beside what ranks that train hold."""

import gc
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nf4tensor import NF4Tensor, quantize_
from nf4tensor.fsdp import plan
from nf4tensor.fsdp.estimate import estimate
from nf4tensor.fsdp.step_memory import trace
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra hf")
from nf4tensor.integrations import model_configs  # noqa: E402
from nf4tensor.integrations.model_configs import Recipe  # noqa: E402

pytestmark = pytest.mark.hf
BATCH, SEQ_LEN = 2, 96
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "use_cache": False,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "tied": transformers.LlamaConfig(**SMALL | {"tie_word_embeddings": True, "vocab_size": 3000}),
    "mistral": transformers.MistralConfig(**SMALL | {"hidden_size": 320, "num_hidden_layers": 3}),
    "qwen": transformers.Qwen3Config(**SMALL | {"intermediate_size": 1333}),
    "wide heads": transformers.Gemma2Config(
        **SMALL | {"head_dim": 128, "query_pre_attn_scalar": 128}
    ),
}


def measure(rank, world_size, name, recipe):
    """Train two steps; return the bytes of packed weights, and the most that was held at once."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16)
    quantize_(model.requires_grad_(False), progress=False)
    if recipe.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    targets = model_configs._linear_names(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=recipe.lora_rank, target_modules=targets))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    dist.barrier()
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    packed = sum(p.record.untyped_storage().nbytes() for p in locals_ if isinstance(p, NF4Tensor))
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, DTensor)]
    held = [getattr(t, "record", t) for t in (*locals_, *model.buffers())]
    held += [t.to_local() for t in states]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}
    return packed, sum(storages.values()) + peak_of(step)


def peak_of(run) -> int:
    """Return the most memory that torch's allocator gave out at once while something ran."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, about Transformers
@pytest.mark.parametrize("ranks", [slow(1), 2, slow(4)], indirect=True)
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["llama", *map(slow, list(MODELS)[1:])])
def test_bytes_of_a_rank(ranks: Ranks, name, checkpointing):
    recipe = Recipe(lora_rank=8, checkpointing=checkpointing)
    model = model_configs.make_model(MODELS[name], recipe)
    step = trace(model, lambda: model_configs.loss_of(model, BATCH, SEQ_LEN))
    expected = estimate(plan(model, ranks.world_size), "shard", step, reserve=False)
    # A CPU multiplies with a few decoded rows at a time.
    total = expected.device - expected.parts["decoded weight"]
    for packed, held in ranks.run(measure, name, recipe):
        assert packed == expected.parts["packed base"]
        assert held == pytest.approx(total, rel=0.1)


LLAMA = {"num_attention_heads": 64, "num_key_value_heads": 8}
LARGE = {
    "8B": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "70B": transformers.LlamaConfig(
        **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80
    ),
    "405B": transformers.LlamaConfig(
        **LLAMA | {"num_attention_heads": 128},
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
    ),
    "experts": transformers.MixtralConfig(),
}
# In a process of its own: there is one process group in a process.
SHARD = """
import sys, pickle, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from nf4tensor import NF4Tensor
from nf4tensor.fsdp import plan
from nf4tensor.integrations import model_configs

config, world_size = pickle.load(sys.stdin.buffer)
model = model_configs.make_model(config, model_configs.Recipe())
planned = plan(model, world_size)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
mesh = dist.init_device_mesh("cpu", (world_size,))
for name in planned.units:
    fully_shard(model.get_submodule(name), mesh=mesh)
shards = {name: p.to_local() for name, p in model.named_parameters()}
found = {name: getattr(shard, "record", shard).nbytes for name, shard in shards.items()}
assert found == {p.name: p.bytes_per_rank for p in planned.parameters}
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 8, 256])
@pytest.mark.parametrize("name", LARGE)
def test_bytes_of_large_models(name, world_size):
    command = [sys.executable, "-W", "ignore", "-c", SHARD]
    result = subprocess.run(
        command, input=pickle.dumps((LARGE[name], world_size)), capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
