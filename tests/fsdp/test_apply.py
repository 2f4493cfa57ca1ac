"""`apply` on real ranks: they hold and send what the plan says."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from nf4tensor import fsdp, memory_footprint
from nf4tensor.errors import ShardingError
from tests.fsdp.training import WIDTH, make_model, train
from tests.fsdp.wire import CountWire
from tests.ranks import Ranks

TOLERANCE = 1e-5
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
up_to_four = pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)
three = pytest.mark.parametrize("ranks", [3], indirect=True)


@pytest.fixture(scope="module")
def unsharded_losses() -> list[float]:
    """Losses of the 4-bit model on one process."""
    return train(make_model(), steps=4)


def held_bytes(tensor) -> int:
    """Return the bytes of the storage behind what this rank holds of a parameter."""
    local = getattr(tensor, "_local_tensor", tensor)
    return getattr(local, "record", local).untyped_storage().nbytes()


def assert_held_as_planned(model, plan, rank):
    parameters = dict(model.named_parameters())
    assert [p.name for p in plan.parameters] == list(parameters)
    for p in plan.parameters:
        parameter = parameters[p.name]
        assert isinstance(parameter, DTensor) == p.is_sharded
        assert held_bytes(parameter) == p.bytes_per_rank, p.name
        local = parameter.to_local() if p.is_sharded else parameter
        assert local.nbytes == p.bytes_of_rows(rank), p.name
    held = plan.costs.frozen + plan.costs.trainable + plan.costs.buffers
    assert memory_footprint(model) == held


def assert_step_as_planned(model, plan):
    with CountWire() as wire:
        model(torch.randn(2, WIDTH)).float().sum().backward()
    shards, replicas = plan.world.num_shards, plan.world.num_replicas
    others = shards - 1
    assert sum(wire.gathered_bytes) * others == plan.costs.all_gather * shards
    assert sum(wire.scattered_bytes) * others == plan.costs.reduce_scatter * shards
    assert 2 * (replicas - 1) * sum(wire.reduced_bytes) == plan.costs.all_reduce * replicas
    grads = {
        p.grad._local_tensor.untyped_storage()._cdata: p.grad
        for p in model.parameters()
        if p.grad is not None
    }
    assert sum(map(held_bytes, grads.values())) == plan.costs.gradients
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    return optimizer


def measured(rank, world_size, policy, options):
    mesh = init_device_mesh("cpu", (world_size,))
    model = make_model()
    model.register_buffer("steps", torch.zeros(3))
    plan = fsdp.plan(model, mesh, policy, **options)
    assert plan.to_dict() == fsdp.plan(model, world_size, policy, **options).to_dict()
    assert fsdp.apply(model, plan) is model
    assert_held_as_planned(model, plan, rank)
    optimizer = assert_step_as_planned(model, plan)
    states = sum(
        state[name].to_local().nbytes
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )
    rows = sum(p.bytes_of_rows(rank) for p in plan.parameters if p.role == "trainable")
    assert states == 2 * rows <= plan.costs.optimizer


@up_to_four
@pytest.mark.parametrize("policy", ["shard", "replicate"])
def test_bytes_held_and_sent_are_the_planned_ones(ranks: Ranks, policy):
    ranks.run(measured, policy, {})


@three
@pytest.mark.parametrize("policy", ["shard", "replicate"])
def test_bytes_are_the_planned_ones_with_and_without_resharding(ranks: Ranks, policy):
    for reshard in (True, False):
        ranks.run(measured, policy, {"reshard_after_forward": reshard})


@three
def test_bytes_under_mixed_precision_are_the_planned_ones(ranks: Ranks):
    ranks.run(measured, "shard", {"mp_policy": BF16})
    ranks.run(measured, "shard", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)})


def trained(rank, world_size, policy, options):
    model = make_model()
    before = {n: copy.deepcopy(p) for n, p in model.named_parameters() if not p.requires_grad}
    plan = fsdp.plan(model, world_size, policy)
    fsdp.apply(model, plan, **options)
    losses = train(model, steps=4, rank=rank, world_size=world_size)
    if policy == "replicate":
        for name, parameter in model.named_parameters():
            if name in before:
                raw = getattr(parameter, "record", parameter)
                assert torch.equal(raw, getattr(before[name], "record", before[name]))
    return losses


@up_to_four
def test_losses_equal_the_unsharded_model(ranks: Ranks, unsharded_losses):
    for policy in ("shard", "replicate"):
        for losses in ranks.run(trained, policy, {}):
            assert losses == pytest.approx(unsharded_losses, rel=TOLERANCE)


@three
def test_options_of_fully_shard_are_passed_on(ranks: Ranks, unsharded_losses):
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False), "reshard_after_forward": False}
    for losses in ranks.run(trained, "shard", options):
        assert losses == pytest.approx(unsharded_losses, rel=TOLERANCE)


def hybrid(rank, world_size, policy):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    plan = fsdp.plan(model, mesh, policy)
    assert (plan.world.num_replicas, plan.world.num_shards) == (2, world_size // 2)
    fsdp.apply(model, plan)
    assert_held_as_planned(model, plan, mesh.get_local_rank("shard"))
    assert_step_as_planned(model, plan)
    model = make_model()
    model.head.base.weight.requires_grad_(rank == 2)
    with pytest.raises(ShardingError, match=r"^rank 2: head.base.weight is 4-bit and requires a g"):
        fsdp.plan(model, mesh, policy)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_replicas_of_shards(ranks: Ranks):
    ranks.run(hybrid, "shard")
    ranks.run(hybrid, "replicate")


def on_meta(rank, world_size):
    with torch.device("meta"):
        model = make_model()
    plan = fsdp.plan(make_model(), world_size, "replicate")
    fsdp.apply(model, plan)
    by_name = dict(model.named_parameters())
    assert all(isinstance(by_name[p.name], DTensor) == p.is_sharded for p in plan.parameters)


@three
def test_a_model_on_the_meta_device_is_sharded_by_the_plan_of_a_real_one(ranks: Ranks):
    ranks.run(on_meta)


def chosen_modules(rank, world_size):
    model = make_model()
    plan = fsdp.plan(model, world_size, modules=lambda module, name: name.endswith((".up", "0")))
    assert plan.units[:2] == ("blocks.0.up", "blocks.1.up")
    fsdp.apply(model, plan)
    assert_held_as_planned(model, plan, rank)
    assert_step_as_planned(model, plan)


@three
def test_modules_of_the_user_are_the_groups(ranks: Ranks):
    ranks.run(chosen_modules)


def misfits(rank, world_size):
    plan = fsdp.plan(make_model(), world_size + 1)
    with pytest.raises(
        ShardingError, match=f"1 x {world_size + 1} ranks`, found `1 x {world_size}"
    ):
        fsdp.apply(make_model(), plan)
    plan = fsdp.plan(make_model(), world_size)
    with pytest.raises(ShardingError, match=r"made for `shard blocks.0.*\[67, 96\].*\[70, 96\]"):
        fsdp.apply(make_model(hidden=(70, 130, 33)), plan)
    with pytest.raises(ShardingError, match=r"the model has no module blocks\.2: plan again"):
        fsdp.apply(make_model(hidden=(67, 130)), plan)
    with pytest.raises(ShardingError, match="reshard_after_forward=1 is no bool"):
        fsdp.apply(make_model(), plan, reshard_after_forward=1)
    model = fsdp.apply(make_model(), plan)
    for again in (fsdp.plan, lambda model, mesh: fsdp.apply(model, plan)):
        with pytest.raises(ShardingError, match=r"blocks.0.norm.weight is a DTensor already"):
            again(model, world_size)
    mesh = init_device_mesh("cpu", (1, 1, world_size))
    with pytest.raises(ShardingError, match="expected a mesh of one dimension, or of two"):
        fsdp.plan(make_model(), mesh)


@three
def test_a_plan_that_does_not_fit_is_refused(ranks: Ranks):
    ranks.run(misfits)
