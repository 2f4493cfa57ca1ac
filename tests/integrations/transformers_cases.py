"""What each rank does in the tests of sharded models of Transformers."""

import warnings
from pathlib import Path
from typing import Any

import torch

from nf4tensor import NF4Tensor, memory_footprint
from tests.integrations.tiny_models import TOKENS, logits


def load_sharded(folder: Path, world_size: int, **options: Any) -> Any:
    """Load a model of which every rank reads its own rows."""
    from transformers.distributed import DistributedConfig

    from tests.integrations.tiny_models import load

    warnings.simplefilter("ignore")
    return load(folder, distributed_config=DistributedConfig(fsdp_size=world_size), **options)


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
    """Load dense and 4-bit files, sharded; use, save and train the model."""
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
    return found
