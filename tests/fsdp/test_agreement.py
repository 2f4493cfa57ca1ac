"""Ranks that differ get one error, the same on all, before anything is sharded."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nf4tensor import fsdp, to_nf4
from nf4tensor.errors import ShardingError
from tests.fsdp.training import make_model
from tests.ranks import Ranks


# What one rank of three does otherwise: its model and its arguments of `plan`.
def other_shape(model, arguments):
    return make_model(hidden=(67, 130, 34)), arguments


def other_spec(model, arguments):
    weight = model.head.base.weight.dequantize()
    model.head.base.weight = torch.nn.Parameter(to_nf4(weight, 32), requires_grad=False)
    return model, arguments


def other_dtype(model, arguments):
    model.blocks[1].down.base.bias.data = model.blocks[1].down.base.bias.bfloat16()
    return model, arguments


def other_name(model, arguments):
    model.tail = model.head
    del model.head
    return model, arguments


def other_options(model, arguments):
    return model, {**arguments, "reshard_after_forward": True}


def other_policy(model, arguments):
    return model, {**arguments, "policy": "shard"}


def other_modules(model, arguments):
    return model, {**arguments, "modules": [model.blocks[0]]}


def other_budget(model, arguments):
    return model, {**arguments, "memory_budget": 2**30}


def own_fault(model, arguments):
    model.blocks[0].up.base.weight.requires_grad_(True)
    return model, arguments


def own_exception(model, arguments):
    return model, {**arguments, "modules": lambda module, name: name[99]}


def other_bytes(model, arguments):
    model.blocks[2].down.base.weight.record[-1, 5] ^= 16
    return model, arguments


def other_bias(model, arguments):
    model.head.base.bias.data += 1
    return model, arguments


DIFFERENCES = {
    other_shape: r"rank 0 has `replicate blocks.2.up.base.weight: quantized torch.float32 "
    r"\[33, 96\].*rank 1 has `.*\[34, 96\]",
    other_spec: "rank 0 has .*block_size=64.*rank 1 has .*block_size=32",
    other_dtype: r"rank 0 has .*blocks.1.down.base.bias: frozen torch.float32.*torch.bfloat16",
    other_name: "rank 0 has .*head.base.weight.*rank 1 has .*tail.base.weight",
    other_options: "rank 0 has `memory_budget=None`, rank 1 has `reshard_after_forward=True`",
    other_policy: "rank 0 has `policy replicate`, rank 1 has `policy shard`",
    other_modules: "rank 0 has `modules blocks.0, blocks.1.*rank 1 has `modules blocks.0, the",
    own_fault: "^rank 1: blocks.0.up.base.weight is 4-bit and requires a gradient",
}
ONLY_PLAN = {
    other_budget: "rank 0 has `memory_budget=None`, rank 1 has `memory_budget=1073741824`",
    own_exception: "^rank 1: IndexError: string index out of range",
}
ONLY_APPLY = {
    other_bytes: "rank 0 has `blocks.2.down.base.weight on cpu with checksum .*rank 1 has `blocks",
    other_bias: "rank 0 has `head.base.bias on cpu with checksum",
}


def error_of_plan(rank, world_size, change):
    model, arguments = make_model(), {"policy": "replicate"}
    if rank == 1:
        model, arguments = change(model, arguments)
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(ShardingError) as caught:
        fsdp.plan(model, mesh, **arguments)
    return str(caught.value)


def error_of_apply(rank, world_size, change):
    model, arguments = make_model(), {"policy": "replicate"}
    if rank == 1:
        model, arguments = change(model, arguments)
    try:
        plan = fsdp.plan(model, world_size, **arguments)
    except ShardingError:
        plan = fsdp.plan(make_model(), world_size, "replicate")
    with pytest.raises(ShardingError) as caught:
        fsdp.apply(model, plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("case", [error_of_plan, error_of_apply])
def test_ranks_that_differ_get_one_error_before_anything_is_sharded(ranks: Ranks, case):
    expected = {**DIFFERENCES, **(ONLY_PLAN if case is error_of_plan else ONLY_APPLY)}
    for change, message in expected.items():
        messages = ranks.run(case, change)
        assert set(messages) == {messages[0]}, change
        assert re.search(message, messages[0]), messages[0]
