"""`plan` without ranks: groups, costs in plain arithmetic, the choice by a budget, every fault."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from nf4tensor import fsdp, to_nf4
from nf4tensor.errors import ShardingError
from nf4tensor.fsdp import table, units
from tests.fsdp.models import Layered, frozen, linear, of
from tests.fsdp.training import Block, make_model

UNPINNED = CPUOffloadPolicy(pin_memory=False)


def test_costs_by_hand():
    """Over two ranks 5 and 9 records are 3 and 5, 3 rows of an adapter 2, the embedding 5 rows."""
    plan = fsdp.plan(Layered(), 2)
    costs = plan.costs
    assert plan.units == ("layers.0", "layers.1", "")
    assert [p.bytes_per_rank for p in plan.parameters] == [80, 2 * 16, 3 * 160, 2 * 16, 5 * 160]
    assert [p.bytes_of_rows(1) for p in plan.parameters] == [80, 16, 2 * 160, 16, 4 * 160]
    assert costs.frozen == 80 + 480 + 800
    assert (costs.trainable, costs.gradients, costs.optimizer) == (64, 64, 128)
    assert costs.buffers == 28
    assert costs.gathered == 2 * 80 + 2 * 2 * (32 + 800) + 2 * 2 * 32
    assert costs.decoded == 9 * 256 * 4
    assert costs.sharded == costs.frozen + 4 * 64
    assert costs.device == costs.sharded + costs.gathered + costs.decoded + 28
    assert costs.all_gather == 80 + 2 * (32 + 480 + 32 + 800)
    assert (costs.reduce_scatter, costs.all_reduce) == (64, 0)
    replicate = plan.choices["replicate"].costs
    assert replicate.frozen == 160 + 800 + 1440
    assert (replicate.all_gather, replicate.reduce_scatter) == (2 * 64, 64)
    assert replicate.gathered == 2 * 2 * 32 + 2 * 2 * 32


def test_options_change_the_costs():
    kept = fsdp.plan(Layered(), 2, reshard_after_forward=False).costs
    assert kept.all_gather == 80 + 32 + 480 + 32 + 800
    assert kept.gathered == 2 * (80 + 32 + 480 + 32 + 800) + 2 * (32 + 800) + 2 * 2 * 32
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    costs = fsdp.plan(Layered(), 2, mp_policy=half).costs
    assert costs.all_gather == 80 + 2 * (16 + 480 + 16 + 800)
    assert costs.reduce_scatter == 64
    assert costs.decoded == 9 * 256 * 2
    offloaded = fsdp.plan(Layered(), 2, offload_policy=UNPINNED).costs
    assert offloaded.device == fsdp.plan(Layered(), 2).costs.device - offloaded.sharded


def test_one_rank_and_a_model_without_adapters():
    alone = fsdp.plan(Layered(), 1).costs
    assert alone.wire == 0
    assert alone.gathered == 160 + (48 + 1440) + 2 * 48
    model = Layered().requires_grad_(False)
    assert fsdp.plan(model, 2).costs.all_gather == 80 + 480 + 32 + 800 + 32


def test_experts_and_empty_shards():
    plan = fsdp.plan(of(weight=frozen(to_nf4(torch.randn(3, 4, 256)))), 4)
    (p,) = plan.parameters
    assert (p.shape, p.nbytes, p.bytes_per_rank) == ((3, 4, 256), 12 * 160, 4 * 160)
    assert [p.bytes_of_rows(rank) for rank in range(4)] == [640, 640, 640, 0]
    empty = fsdp.plan(of(weight=nn.Parameter(torch.zeros(0, 3))), 4)
    assert empty.costs.sharded == 0


def test_a_plan_needs_no_memory_and_no_ranks():
    with torch.device("meta"):
        model = make_model()
    assert fsdp.plan(model, 512).to_dict() == fsdp.plan(make_model(), 512).to_dict()


def test_json_has_every_parameter_and_both_choices():
    plan = fsdp.plan(Layered(), 2, "replicate", reshard_after_forward=True)
    read = json.loads(plan.to_json())
    assert read["options"] == {"reshard_after_forward": "True"}
    assert (read["policy"], read["num_shards"], read["num_replicas"]) == ("replicate", 2, 1)
    assert read["choices"]["shard"]["wire"] == plan.choices["shard"].costs.wire
    by_name = {p["name"]: p for p in read["parameters"]}
    weight = by_name["layers.1.base.weight"]
    assert (weight["role"], weight["decision"], weight["units"]) == (
        "quantized",
        "replicate",
        ["layers.1"],
    )
    assert (weight["shape"], weight["dtype"], weight["nbytes"]) == ([9, 256], "float32", 1440)
    assert weight["spec"]["block_size"] == 64
    assert by_name["embedding.weight"]["role"] == "frozen"


def test_the_table_puts_alike_layers_on_one_line():
    text = str(fsdp.plan(make_model(hidden=(64,) * 12), 2))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "shard over 2 ranks: as asked"
    assert lines[4].startswith("shard * ")
    assert "blocks.*.up.base.weight 12 quantized 64 x 96 float32 72.0 KiB shard 36.0 KiB" in lines
    assert "head.base.weight 1 quantized 1 x 96 float32 96 B shard 96 B" in lines
    assert [table.amount(n) for n in (0, 1023, 1024, 99 << 20, 24 << 30, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "99.0 MiB",
        "24.0 GiB",
        "1024 TiB",
    ]


class Experts(nn.Module):
    """A router and a list of experts, of which a rank may skip some."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(linear(2) for _ in range(2))


def test_layers_are_found():
    stages = nn.ModuleList(of(blocks=nn.ModuleList(linear(2) for _ in range(2))) for _ in range(2))
    by_number = nn.ModuleDict({"0": linear(2), "1": nn.Linear(2, 2)})
    nested = nn.ModuleList([nn.ModuleList([linear(2)])])
    adapters = nn.ModuleDict({"default": linear(2)})
    shared = Experts()
    model = of(
        stages=stages,
        moe=nn.ModuleList([Experts()]),
        titan=by_number,
        nested=nested,
        peft=adapters,
        twice=nn.ModuleList([shared, shared]),
    )
    assert units.choose(model) == (
        "stages.0.blocks.0",
        "stages.0.blocks.1",
        "stages.1.blocks.0",
        "stages.1.blocks.1",
        "nested.0.0",
        "moe.0",
        "titan.0",
        "twice.0",
        "",
    )
    assert fsdp.plan(model, 2).parameters[-1].units == ("twice.0",)


def test_modules_are_chosen_by_the_user():
    model = make_model()
    assert units.choose(model, [model.head, model.blocks[1], model]) == ("blocks.1", "head", "")
    assert units.choose(model, lambda module, name: isinstance(module, Block))[-2:] == (
        "blocks.2",
        "",
    )
    assert units.choose(model, model.blocks) == ("blocks.0", "blocks.1", "blocks.2", "")
    assert units.choose(model, []) == ("",)
    with pytest.raises(ShardingError, match="1 of 2 given modules are not in the model"):
        units.choose(model, [model.head, nn.Linear(2, 2)])
    with pytest.raises(ShardingError, match="blocks is a ModuleList without a forward"):
        units.choose(model, [model.blocks])
    with pytest.raises(ShardingError, match="the model is a ModuleList without a forward"):
        units.choose(model.blocks)
