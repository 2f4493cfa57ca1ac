"""What each rank does in the tests of sharded models of Transformers."""

import warnings
from pathlib import Path
from typing import Any

import torch

from nf4tensor import NF4Tensor, memory_footprint
from tests.integrations.tiny_models import TOKENS, logits


def load_sharded(folder: Path, world_size: int, num_copies: int = 1, **options: Any) -> Any:
    """Load a model of which every rank reads its own rows, of one of some copies."""
    from transformers.distributed import DistributedConfig

    from tests.integrations.tiny_models import load

    warnings.simplefilter("ignore")
    sharding = DistributedConfig(fsdp_size=world_size // num_copies, dp_replicate_size=num_copies)
    return load(folder, distributed_config=sharding, **options)


def local_records(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's records of all 4-bit weights."""
    found = {}
    for name, weight in model.named_parameters():
        local = getattr(weight, "_local_tensor", weight)
        if isinstance(local, NF4Tensor):
            assert not weight.requires_grad
            found[name] = local.record
    return found


def case_load_save_generate(
    rank: int, world_size: int, dense: Path, packed: Path, folder: Path
) -> dict[str, Any]:
    """Load dense and 4-bit files, sharded; use, save and prepare the model."""
    from peft import prepare_model_for_kbit_training

    from nf4tensor.integrations.transformers import NF4Config

    fresh = load_sharded(dense, world_size, quantization_config=NF4Config())
    model = load_sharded(packed, world_size)
    ours, theirs = local_records(fresh), local_records(model)
    assert ours.keys() == theirs.keys()
    for name, record in ours.items():
        assert torch.equal(record, theirs[name]), name
        whole = record.untyped_storage().nbytes()
        assert whole <= record.nbytes + record.shape[-1] * record[:1].numel(), name
    found = {
        "records": ours,
        "logits": logits(model),
        "tokens": model.generate(TOKENS, max_new_tokens=3, do_sample=False),
    }
    assert model.get_memory_footprint() == memory_footprint(model)
    model.save_pretrained(folder)
    prepare_model_for_kbit_training(fresh)
    for name, record in local_records(fresh).items():
        assert torch.equal(record, theirs[name]), name
    torch.testing.assert_close(logits(fresh).bfloat16(), found["logits"], rtol=0, atol=3e-2)
    return found


def with_adapters(model: Any) -> Any:
    """Return a model with LoRA on every linear, the same each time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"))


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return whole copies of what trains, the same on every rank."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight = weight.detach()
            found[name] = getattr(weight, "full_tensor", weight.clone)()
    return found


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    """Return a Trainer on the CPU that learns a few rows by heart."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(8, 1)]
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps" if "save_steps" in options else "no",
        **options,
    }
    return Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows)


def case_train(rank: int, world_size: int, dense: Path, folder: Path) -> dict[str, Any]:
    """Train adapters beside a sharded base with `Trainer`, and save them."""
    from nf4tensor.integrations.transformers import NF4Config

    base = load_sharded(dense, world_size, quantization_config=NF4Config())
    before = {name: record.clone() for name, record in local_records(base).items()}
    model = with_adapters(base)
    training = trainer(model, folder, max_steps=6, per_device_train_batch_size=1)
    training.train()
    for name, record in local_records(base).items():
        assert torch.equal(record, before[name.replace(".base_layer", "")]), name
    losses = [each["loss"] for each in training.state.log_history if "loss" in each]
    if rank == 0:  # alone: given a state without sharded weights, PEFT gathers none
        state = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        model.save_pretrained(folder, state_dict=state)
    return {"losses": losses, "adapters": adapters(model), "logits": logits(model)}


def case_adapters_of_fully_shard(
    rank: int, world_size: int, dense: Path, folder: Path
) -> dict[str, Any]:
    """Shard base and adapters, train a step, save the adapters and load them again."""
    import torch.distributed as dist
    from peft import get_peft_model_state_dict, prepare_model_for_kbit_training
    from peft.utils import load_peft_weights
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    from nf4tensor.integrations.transformers import NF4Config
    from tests.integrations.tiny_models import load

    warnings.simplefilter("ignore")

    def sharded(seed: int) -> Any:
        base = load(dense, quantization_config=NF4Config())
        model = with_adapters(prepare_model_for_kbit_training(base))
        torch.manual_seed(seed)
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.05)
        for layer in base.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    model = sharded(seed=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=whole)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    again = sharded(seed=3)
    stored = load_peft_weights(str(folder), device="cpu")
    names = {name.replace(".default.", "."): name for name in adapters(again)}
    assert stored.keys() == names.keys() == get_peft_model_state_dict(again).keys()
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(again, {names[n]: w for n, w in stored.items()}, options=options)
    assert torch.equal(logits(model), logits(again))
    return {"adapters": adapters(again), "logits": logits(again)}


def case_peak_memory(rank: int, world_size: int, dense: Path) -> tuple[int, int]:
    """Return the most anonymous memory that loading took, and what the 4-bit weights hold."""
    from nf4tensor.integrations.transformers import NF4Config
    from tests.checkpoint.test_load_memory import Peak

    with Peak() as peak:
        model = load_sharded(dense, world_size, quantization_config=NF4Config())
    records = local_records(model).values()
    return peak.bytes, sum(record.untyped_storage().nbytes() for record in records)


def case_replicated(rank: int, world_size: int, folder: Path) -> tuple[list[float], torch.Tensor]:
    """Train adapters over a base that is whole on every rank; return losses and a sum."""
    from peft import LoraConfig, get_peft_model
    from torch.nn.parallel import DistributedDataParallel

    from nf4tensor.integrations.transformers import NF4Config
    from tests.integrations.tiny_models import load

    warnings.simplefilter("ignore")
    model = load(folder, quantization_config=NF4Config())
    torch.manual_seed(rank)  # its first broadcast makes them alike
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        tokens = TOKENS.chunk(world_size)[rank]
        loss = replicated(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(p.detach().double().sum() for p in model.parameters() if p.requires_grad)


def case_copies(rank: int, world_size: int, dense: Path) -> torch.Tensor:
    """Load a model that is sharded within two copies."""
    from nf4tensor.integrations.transformers import NF4Config

    model = load_sharded(dense, world_size, num_copies=2, quantization_config=NF4Config())
    return logits(model)
