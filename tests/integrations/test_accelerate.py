"""Accelerate's FSDP2 path: every way to load gives every rank its records, and training resumes."""

import os
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")
pytest.importorskip("peft", reason="the extra `hf` is missing")
pytest.importorskip("accelerate", reason="the extra `hf` is missing")

from nf4tensor import NF4Tensor, quantize_
from nf4tensor.errors import UnsupportedError
from tests.ranks import Ranks

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
VOCABULARY, STEPS = 64, 3


def make_model(seed: int):
    """Return a Llama whose rows no number of ranks divides, with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=101,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = quantize_(LlamaForCausalLM(config).requires_grad_(False), progress=False)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def start(efficient: bool, state_dict_type: str, mixed_precision: str):
    """Return an Accelerator as `accelerate launch` makes it on GPUs; for CPUs it has no FSDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29999", FSDP_VERSION="2")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=efficient,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state_dict_type,
    )
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator, plugin


def prepare(accelerator, seed: int):
    """Return a sharded model and its optimizer."""
    accelerator._models.clear()
    accelerator._optimizers.clear()
    model = make_model(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, number: int, rank: int) -> float:
    """Take a step and return the loss of this rank."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def wrong_records(model, rank: int, world_size: int) -> list[str]:
    """Name the weights of which this rank has other bytes than its rows of the first model's."""
    wrong = []
    shards = dict(model.named_parameters())
    for name, parameter in make_model(0).named_parameters():
        if not isinstance(parameter, NF4Tensor):
            continue
        chunks = parameter.record.chunk(world_size)
        expected = chunks[rank] if rank < len(chunks) else parameter.record[:0]
        local = shards[name].to_local()
        if not isinstance(local, NF4Tensor) or not torch.equal(local.record, expected):
            wrong.append(name)
    return wrong


def case(rank, world_size, folder, efficient, state_dict_type, mixed_precision):
    """Prepare, train, save, continue; then load into another model and continue alike."""
    from accelerate.utils import (
        load_fsdp_model,
        load_fsdp_optimizer,
        save_fsdp_model,
        save_fsdp_optimizer,
    )

    import nf4tensor.integrations.accelerate  # noqa: F401

    warnings.simplefilter("ignore")
    accelerator, plugin = start(efficient, state_dict_type, mixed_precision)
    # With efficient loading, what the other ranks have counts for nothing.
    model, optimizer = prepare(accelerator, seed=7 + rank if efficient and rank else 0)
    assert wrong_records(model, rank, world_size) == []
    trained = [p for p in model.parameters() if p.requires_grad]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(mine is its for mine, its in zip(trained, held, strict=True))
    losses = [step(accelerator, model, optimizer, number, rank) for number in range(STEPS)]
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    continued = step(accelerator, model, optimizer, STEPS, rank)
    model, optimizer = prepare(accelerator, seed=1)
    load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    assert wrong_records(model, rank, world_size) == []
    assert step(accelerator, model, optimizer, STEPS, rank) == continued
    return losses


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("ranks", [2, slow(3)], indirect=True)
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("mixed_precision", ["no", slow("bf16"), slow("fp16")])
def test_trains_saves_and_resumes(ranks: Ranks, tmp_path: Path, state_dict_type, mixed_precision):
    found = []
    for efficient in (False, True):
        folder = tmp_path / str(efficient)
        folder.mkdir()
        options = (str(folder), efficient, state_dict_type, mixed_precision)
        found.append(ranks.run(case, *options))
    for plain, efficient in zip(*found, strict=True):
        assert efficient == plain
        assert all(loss == loss for loss in plain)


def refused(rank, world_size):
    """Prepare without our loader; say how it ended."""
    import nf4tensor.integrations.accelerate as integration

    warnings.simplefilter("ignore")
    accelerator, _ = start(True, "SHARDED_STATE_DICT", "no")
    integration.disable()
    try:
        prepare(accelerator, seed=0)
    except UnsupportedError as error:
        return str(error)
    finally:
        integration.enable()


def test_accelerates_own_loader_is_refused_on_every_rank(ranks: Ranks):
    for message in ranks.run(refused):
        assert "import nf4tensor.integrations.accelerate" in message
