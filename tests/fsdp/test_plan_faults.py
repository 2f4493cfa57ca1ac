"""What `plan` refuses, and how `auto` decides by a budget: without ranks, so before any of them."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from nf4tensor import fsdp, to_nf4
from nf4tensor.errors import ShardingError
from tests.fsdp.models import Layered, frozen, linear


def with_scalar(model):
    model.scale = nn.Parameter(torch.ones(()))


def with_one_row(model):
    model.row = frozen(to_nf4(torch.randn(256)))


def with_gradient(model):
    model.layers[0].base.weight.requires_grad_(True)


def with_transposed(model):
    model.matrix = frozen(torch.zeros(3, 4).t())


def with_transposed_record(model):
    model.matrix = frozen(to_nf4(torch.zeros(32, 64)).t())


def with_two_dtypes(model):
    model.layers[1].other = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))


def with_tied(model):
    model.layers[1].base.weight = model.layers[0].base.weight


SHARDED = {
    with_scalar: "^scale is a scalar",
    with_one_row: "^row is a 4-bit weight of one dimension, a single row, .* over 2 ranks: give",
    with_gradient: r"^layers.0.base.weight is 4-bit and requires a gradient: call requires_grad_",
    with_transposed: "^matrix is not contiguous: assign a contiguous copy, or replicate",
    with_transposed_record: "^matrix is not contiguous",
    with_two_dtypes: r"^trainable parameters of layers.1 have different dtypes \(layers.1.adapter "
    r"is torch.float32, layers.1.other is torch.bfloat16\): cast",
    with_tied: r"^layers.0.base.weight is one parameter with layers.1.base.weight, but layers.0 "
    "and layers.1 are sharded apart: choose modules=",
}
FINE_REPLICATED = {with_one_row, with_transposed, with_transposed_record, with_tied}


@pytest.mark.parametrize("change", SHARDED)
def test_what_cannot_be_sharded_is_refused(change):
    model = Layered()
    change(model)
    with pytest.raises(ShardingError, match=SHARDED[change]):
        fsdp.plan(model, 2, "shard")
    if change in FINE_REPLICATED:
        plan = fsdp.plan(model, 2, "auto", memory_budget=2**20)
        assert plan.policy == "replicate"
        (problem,) = plan.choices["shard"].problems
        assert f"shard cannot work: {problem}" in str(plan)
    else:
        with pytest.raises(ShardingError, match=SHARDED[change]):
            fsdp.plan(model, 2, "auto", memory_budget=2**20)


def test_every_fault_is_told_at_once():
    model = Layered()
    with_one_row(model)
    with_scalar(model)
    with pytest.raises(ShardingError, match=r"row is a 4-bit(.|\n)*scale is a scalar"):
        fsdp.plan(model, 2)


def test_what_one_rank_or_one_group_can_hold_is_fine():
    model = Layered()
    with_one_row(model)
    assert fsdp.plan(model, 1).policy == "shard"
    model = Layered()
    with_tied(model)
    plan = fsdp.plan(model, 2, modules=[])
    assert plan.parameters[2].tied == ("layers.1.base.weight",)
    assert plan.costs.frozen == 80 + 480


OPTIONS = [
    ({"reshard_after_forward": 2}, "reshard_after_forward=2 is no bool: torch cannot gather"),
    ({"mp_policy": MixedPrecisionPolicy(torch.float64)}, "param_dtype is torch.float64, which"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ShardingError, match=message):
        fsdp.plan(Layered(), 4, **options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_pinned_memory_without_an_accelerator_is_refused():
    with pytest.raises(ShardingError, match=r"pass CPUOffloadPolicy\(pin_memory=False\)"):
        fsdp.plan(Layered(), 4, offload_policy=CPUOffloadPolicy())


def test_mixed_precision_would_miss_replicated_parameters():
    half = MixedPrecisionPolicy(torch.bfloat16)
    model = Layered()
    model.bias = frozen(torch.zeros(4))
    with pytest.raises(ShardingError, match=r"^bias would be replicated in torch.float32, while"):
        fsdp.plan(model, 2, "replicate", mp_policy=half)
    plan = fsdp.plan(model, 2, "auto", mp_policy=half, memory_budget=2**20)
    assert plan.policy == "shard"
    assert "replicating cannot work: bias would be replicated" in plan.reason


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ShardingError, match="policy is 'ddp', expected one of shard, replicate"):
        fsdp.plan(Layered(), 2, "ddp")
    with pytest.raises(ShardingError, match="the world size is 0, expected at least 1"):
        fsdp.plan(Layered(), 0)


def large() -> nn.Module:
    """Make a model whose frozen weights are what counts: 1 layer of 160 kB, 100 of them."""
    model = Layered()
    model.layers = nn.ModuleList(linear(1000, in_features=256) for _ in range(100))
    return model


def test_auto_replicates_where_that_fits_and_else_shards():
    model = large()
    replicate, shard = (fsdp.plan(model, 4, policy).costs for policy in ("replicate", "shard"))
    assert replicate.device > shard.device
    plan = fsdp.plan(model, 4, "auto", memory_budget=replicate.device)
    assert plan.policy == "replicate"
    assert plan.reason == (
        "16.2 MiB fit the budget of 16.2 MiB a rank, and no frozen weight has to travel"
    )
    plan = fsdp.plan(model, 4, "auto", memory_budget=replicate.device - 1)
    assert plan.policy == "shard"
    assert plan.reason == (
        "5.10 MiB fit the budget of 16.2 MiB a rank; replicating the frozen weights takes 16.2 MiB"
    )
    assert fsdp.plan(model, 4, "auto", memory_budget=shard.device).policy == "shard"


def test_over_the_budget_says_by_how_much_and_what_would_help():
    model = large()
    message = (
        r"to shard over 4 ranks takes 5.10 MiB on each, 1.10 MiB more than the budget of 4.00 MiB: "
        r"3.81 MiB are frozen parameters, .* gathered or decoded for a while; 8 ranks take "
        r"3.19 MiB, or offload_policy=CPUOffloadPolicy\(\) leaves 1.28 MiB on the device"
    )
    for policy in ("auto", "shard"):
        with pytest.raises(ShardingError, match=message):
            fsdp.plan(model, 4, policy, memory_budget=4 * 2**20)
    with pytest.raises(ShardingError, match=r"policy='shard' takes 5.10 MiB"):
        fsdp.plan(model, 4, "replicate", memory_budget=6 * 2**20)
    with pytest.raises(ShardingError, match="choose smaller modules=, fewer trainable weights"):
        fsdp.plan(model, 4, memory_budget=2**20)


def test_the_default_budget_is_of_the_device():
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        assert fsdp.plan(Layered(), 2, "auto").memory_budget == int(0.75 * total)
        return
    with pytest.raises(ShardingError, match="no CUDA device to ask: pass memory_budget=, in bytes"):
        fsdp.plan(Layered(), 2, "auto")
    assert fsdp.plan(Layered(), 2).memory_budget is None
