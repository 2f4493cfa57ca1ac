"""Weights that leave a sharded model: dense, whole, the same on every rank."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from nf4tensor.fsdp import full_weights
from tests.fsdp.training import Block, make_model, shard
from tests.ranks import Ranks


def expected(dtype=None):
    """Return the weights of the model that is not sharded."""
    dense = {}
    for name, parameter in make_model().named_parameters():
        weight = parameter.detach()
        dense[name] = weight.dequantize(dtype) if hasattr(weight, "spec") else weight
    return dense


def gathered(rank, world_size, dtype):
    model = make_model()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return {name: weight.clone() for name, weight in full_weights(shard(model), dtype)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_rank_yields_the_weights_of_the_whole(ranks: Ranks, dtype):
    whole = expected(dtype)
    for found in ranks.run(gathered, dtype):
        assert list(found) == list(whole)
        for name, weight in found.items():
            assert torch.equal(weight, whole[name].to(weight.dtype)), name
            assert dtype in (None, weight.dtype)
