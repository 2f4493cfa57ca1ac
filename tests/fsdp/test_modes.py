"""Every way of combining FSDP2 with itself and with its neighbours trains like one process."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from nf4tensor import NF4Tensor
from tests.fsdp.training import LR, LoRALinear, Model, batches, make_model, shard, train
from tests.ranks import Ranks

STEPS = 5
TOLERANCE = 1e-5
SHAPES = {"uneven": {}, "one-row": {"hidden": (1, 96)}, "even": {"hidden": (192, 192)}}
EVEN = {"hidden": (192, 192), "block_size": 16}  # its columns divide by up to 4 ranks

each_shape = pytest.mark.parametrize(
    "shape", ["uneven", "one-row", pytest.param("even", marks=pytest.mark.slow)]
)
two_by_two = pytest.mark.parametrize("ranks", [4], indirect=True)
up_to_four = pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)


def assert_trains_alike(ranks: Ranks, case, *args, options=None, **train_options) -> None:
    """Compare the losses that a case returns on every rank with those of one process."""
    expected = train(make_model(**(options or {})), STEPS, **train_options)
    for losses in ranks.run(case, options or {}, train_options, *args):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def blocks_and_root(model: Model) -> None:
    shard(model)


def every_linear_block_and_root(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, LoRALinear):
            fully_shard(module.base)
            fully_shard(module)
    shard(model)


def root_only(model: Model) -> None:
    fully_shard(model)


def pairs_of_blocks(model: Model) -> None:
    fully_shard(list(model.blocks[:2]))
    fully_shard([*model.blocks[2:], model.head])
    fully_shard(model)


def replicated_base(model: Model) -> None:
    base = {p for p in model.parameters() if isinstance(p, NF4Tensor)}
    shard(model, ignored_params=base)
    assert not any(isinstance(p, DTensor) for p in base)


def base_only(model: Model) -> None:
    trainable = {p for p in model.parameters() if p.requires_grad}
    shard(model, ignored_params=trainable)


def explicit_prefetch(model: Model) -> None:
    shard(model)
    for first, second in zip(model.blocks, model.blocks[1:], strict=False):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def gathered_until_backward(model: Model) -> None:
    shard(model, reshard_after_forward=False)


GROUPS = [
    blocks_and_root,
    every_linear_block_and_root,
    root_only,
    pairs_of_blocks,
    replicated_base,
    base_only,
    explicit_prefetch,
    gathered_until_backward,
]


def average_gradients(model: nn.Module) -> None:
    """Do for plain parameters what FSDP2 does for its own."""
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def grouped(rank, world_size, options, train_options, group):
    model = make_model(**options)
    group(model)
    return train(
        model,
        STEPS,
        rank,
        world_size,
        after_backward=average_gradients if group is base_only else None,
        **train_options,
    )


@up_to_four
@each_shape
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_groups(ranks: Ranks, group, shape):
    # Clipping would need gradients of one kind: all sharded, or none.
    max_norm = None if group is base_only else 0.5
    assert_trains_alike(ranks, grouped, group, options=SHAPES[shape], max_norm=max_norm)


def accumulated(rank, world_size, options, train_options):
    model = shard(make_model(**options))

    def synchronize(model: Model, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model.set_is_last_backward(is_last)

    return train(model, STEPS, rank, world_size, before_pass=synchronize, **train_options)


@up_to_four
@each_shape
def test_gradients_that_are_only_reduced_at_last(ranks: Ranks, shape):
    assert_trains_alike(ranks, accumulated, options=SHAPES[shape], accumulate=3)


def tied(rank, world_size, options, train_options):
    torch.manual_seed(0)
    model = tie(make_model(**options))
    if rank is not None:
        fully_shard(model)
        assert model.blocks[0].up.base.weight is model.blocks[1].up.base.weight
    return train(model, STEPS, rank or 0, world_size, **train_options)


def tie(model: Model) -> Model:
    """Let two layers share one 4-bit weight, and two others one adapter."""
    first, second = model.blocks[:2]
    second.up.base.weight = first.up.base.weight
    second.down.lora_a = first.down.lora_a
    return model


def test_shared_weights_stay_shared(ranks: Ranks):
    options = {"hidden": (67, 67)}
    expected = tied(None, 1, options, {})
    for losses in ranks.run(tied, options, {}):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def adapters_after(rank, world_size, options, train_options):
    model = make_model(**options)
    adapters = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            adapters[name] = module.lora_a, module.lora_b
            module.lora_a = module.lora_b = None
    shard(model)
    for name, pair in adapters.items():
        model.get_submodule(name).lora_a, model.get_submodule(name).lora_b = pair
    return train(model, STEPS, rank, world_size, after_backward=average_gradients, **train_options)


@up_to_four
@each_shape
def test_adapters_added_after_sharding(ranks: Ranks, shape):
    assert_trains_alike(ranks, adapters_after, options=SHAPES[shape], max_norm=None)


def hybrid(rank, world_size, options, train_options, reshard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make_model(**options), mesh=mesh, reshard_after_forward=reshard)
    return train(model, STEPS, rank, world_size, **train_options)


@two_by_two
@each_shape
@pytest.mark.parametrize("reshard", [True, False])
def test_hybrid_sharding(ranks: Ranks, shape, reshard):
    assert_trains_alike(ranks, hybrid, reshard, options=SHAPES[shape])


def parallelize(model: Model, mesh) -> Model:
    """Cut `up` by rows and `down` by columns, base and adapters alike."""
    for block in model.blocks:
        plan = {
            "up.base": ColwiseParallel(),
            "up.lora_b": ColwiseParallel(),
            "down.base": RowwiseParallel(),
            "down.lora_a": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        assert isinstance(block.down.base.weight.to_local(), NF4Tensor)
    return model


def tensor_parallel(rank, world_size, options, train_options):
    model = parallelize(make_model(**options), init_device_mesh("cpu", (world_size,)))
    return train(model, STEPS, **train_options)  # every rank sees the whole batch


@up_to_four
def test_tensor_parallel(ranks: Ranks):
    assert_trains_alike(ranks, tensor_parallel, options=EVEN, max_norm=None)


def tensor_and_data_parallel(rank, world_size, options, train_options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = shard(parallelize(make_model(**options), mesh["tensor"]), mesh=mesh["data"])
    whole = {n: p for n, p in make_model(**options).named_parameters() if isinstance(p, NF4Tensor)}
    for name, parameter in model.named_parameters():
        if name in whole:
            found = parameter.full_tensor().dequantize()
            assert torch.equal(found, whole[name].dequantize()), name
    losses = train(model, STEPS, mesh["data"].get_local_rank(), 2, **train_options)
    return [loss / 2 for loss in losses]  # the sum over ranks counts each half of a batch twice


@two_by_two
def test_tensor_and_data_parallel(ranks: Ranks):
    assert_trains_alike(ranks, tensor_and_data_parallel, options=EVEN, max_norm=None)


def pipeline(rank, world_size, options, train_options):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("stage", "data"))
    index, data = mesh["stage"].get_local_rank(), mesh["data"]
    model = make_model(**options)
    parts = (model.blocks[:1], [*model.blocks[1:], model.head])
    for layer in parts[index]:
        fully_shard(layer, mesh=data)
    part = fully_shard(nn.Sequential(*parts[index]), mesh=data)
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW([p for p in part.parameters() if p.requires_grad], lr=LR)
    losses = []
    for inputs, targets in islice(batches(), STEPS):
        parts = [t.chunk(data.size())[data.get_local_rank()] for t in (inputs, targets)]
        of_microbatches = []
        if index == 0:
            schedule.step(parts[0])
        else:
            schedule.step(target=parts[1], losses=of_microbatches)
        optimizer.step()
        optimizer.zero_grad()
        loss = sum(of_microbatches, torch.zeros(())) / 2 / data.size()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@each_shape
def test_stages_of_a_pipeline(ranks: Ranks, shape):
    assert_trains_alike(ranks, pipeline, options=SHAPES[shape], max_norm=None)
