"""Plain `fully_shard` at every world size, for rows that do not divide and fewer than ranks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nf4tensor import NF4Tensor, memory_footprint, to_nf4
from nf4tensor.errors import ShardingError
from tests.bounds import roundoff
from tests.fsdp.training import GLOBAL_BATCH, make_model, shard, train
from tests.fsdp.wire import CountWire
from tests.ranks import Ranks

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def unsharded_losses() -> list[float]:
    """Losses of the 4-bit model on one process."""
    return train(make_model())


def losses_of(rank, world_size, quantize, model_options, train_options, shard_options):
    model = shard(make_model(quantize, **model_options), **shard_options)
    return train(model, rank=rank, world_size=world_size, **train_options)


@pytest.mark.parametrize("reshard", [True, False])
def test_ten_steps_equal_the_unsharded_model(ranks: Ranks, unsharded_losses, reshard):
    options = {"reshard_after_forward": reshard}
    for losses in ranks.run(losses_of, True, {}, {}, options):
        assert losses == pytest.approx(unsharded_losses, rel=TOLERANCE)
    assert unsharded_losses[-1] < 0.7 * unsharded_losses[0]


@pytest.mark.parametrize(
    ("model_options", "train_options", "shard_options"),
    [
        ({"checkpointing": True}, {}, {}),
        ({}, {"accumulate": 3}, {}),
        ({}, {}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ({}, {}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        ({}, {}, {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)}),
        ({"checkpointing": True}, {}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    ],
    ids=["checkpointing", "accumulation", "offload", "bf16", "fp16", "bf16-checkpointing"],
)
def test_every_mode_equals_the_same_program_with_a_dense_base(
    ranks: Ranks, model_options, train_options, shard_options
):
    """Losses differ by what another order of float32 sums, rounded to the dtype, may do."""
    policy = shard_options.get("mp_policy", MixedPrecisionPolicy(torch.float32))
    tolerance = max(TOLERANCE, roundoff(policy.param_dtype))
    options = (model_options, {"steps": 4, **train_options}, shard_options)
    quantized = ranks.run(losses_of, True, *options)
    for losses, expected in zip(quantized, ranks.run(losses_of, False, *options), strict=True):
        assert losses == pytest.approx(expected, rel=tolerance)


def gathered_records(rank, world_size):
    model = make_model()
    before = {n: p.record.clone() for n, p in model.named_parameters() if isinstance(p, NF4Tensor)}
    shard(model, reshard_after_forward=False)
    for _ in range(2):
        model(torch.randn(2, 96)).sum().backward()
        model.unshard()
        for block in model.blocks:
            block.unshard()
        after = dict(model.named_parameters())
        assert len(before) == 7
        for name, record in before.items():
            assert type(after[name]) is NF4Tensor
            assert torch.equal(after[name].record, record), name
        model.reshard()
        for block in model.blocks:
            block.reshard()


def test_gathered_bytes_equal_the_bytes_before(ranks: Ranks):
    ranks.run(gathered_records)


def shards(rank, world_size):
    model = make_model()
    whole = memory_footprint(model)
    before = {n: p.detach() for n, p in model.named_parameters() if isinstance(p, NF4Tensor)}
    shard(model)
    for name, parameter in model.named_parameters():
        if name in before:
            assert isinstance(parameter, DTensor)
            local = parameter.to_local()
            chunks = torch.chunk(before[name].record, world_size)
            expected = chunks[rank] if rank < len(chunks) else before[name].record[:0]
            assert torch.equal(local.record, expected)
    return memory_footprint(model), whole


def test_each_rank_holds_its_rows_only(ranks: Ranks):
    for part, whole in ranks.run(shards):
        assert part < whole / ranks.world_size + 7 * 4 * 96 * 2  # a padded row for each weight


def gathered_bytes(rank, world_size):
    linear = torch.nn.Linear(4096, 8 * world_size, bias=False, dtype=torch.bfloat16)
    linear.weight = torch.nn.Parameter(to_nf4(linear.weight), requires_grad=False)
    model = fully_shard(torch.nn.Sequential(linear))
    with CountWire() as wire:
        model(torch.randn(2, 4096, dtype=torch.bfloat16))
    return sum(wire.gathered_bytes) / (4096 * 8 * world_size)


def test_packed_bytes_travel(ranks: Ranks):
    for bytes_per_weight in ranks.run(gathered_bytes):
        if ranks.world_size == 1:
            assert bytes_per_weight == 0
        else:
            assert 0.5 < bytes_per_weight <= 0.53


def integer_reshard(rank, world_size):
    model = make_model()
    fully_shard(model, reshard_after_forward=world_size // 2)
    with CountWire() as wire, pytest.raises(ShardingError, match="is an integer"):
        model(torch.randn(GLOBAL_BATCH, 96))
    assert not wire.gathered_bytes
    model.set_reshard_after_forward(True)  # the way out that the message names
    assert train(model, steps=1, rank=rank, world_size=world_size)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_integer_reshard_is_refused_before_any_collective(ranks: Ranks):
    ranks.run(integer_reshard)


def oversized_mesh(rank, world_size):
    with pytest.raises(RuntimeError, match=f"world size {world_size}, but found {world_size + 2}"):
        fully_shard(make_model(), mesh=init_device_mesh("cpu", (world_size + 2,)))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_too_few_ranks_for_a_mesh_is_refused_on_every_rank(ranks: Ranks):
    ranks.run(oversized_mesh)


def one_dimension(rank, world_size):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(to_nf4(torch.randn(256)), requires_grad=False)
    if world_size == 1:
        fully_shard(module)
        return
    with pytest.raises(ShardingError, match="give it a second dimension"):
        fully_shard(module)


def test_one_dimensional_weight_is_refused_on_every_rank(ranks: Ranks):
    ranks.run(one_dimension)


def column_shards(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    weight = to_nf4(torch.randn(4, 96), block_size=16)
    shard = distribute_tensor(weight, mesh, [Shard(1)]).to_local()
    assert isinstance(shard, NF4Tensor)
    assert torch.equal(shard.dequantize(), weight.dequantize().chunk(world_size, 1)[rank])
    for columns, block_size in ((100, 16), (112, 16), (96, 64)):
        if world_size == 3:
            weight = to_nf4(torch.randn(4, columns), block_size)
            with pytest.raises(ShardingError, match="every rank needs as many"):
                distribute_tensor(weight, mesh, [Shard(1)])


@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)  # 96 columns are 6 blocks of 16
def test_column_shards_are_records_or_refused_on_every_rank(ranks: Ranks):
    ranks.run(column_shards)


def stack_of_experts(rank, world_size, dim):
    module = torch.nn.Module()
    torch.manual_seed(3)
    weight = to_nf4(torch.randn(3, 24, 64))
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.forward = lambda x: x @ module.weight.mT
    expected = module(torch.ones(3, 2, 64))
    fully_shard(module, shard_placement_fn=lambda param: Shard(dim))
    for _ in range(2):
        assert torch.equal(module(torch.ones(3, 2, 64)), expected)
        module.reshard()
        assert torch.equal(module.weight.full_tensor().record, weight.record)
        module.load_state_dict(module.state_dict())  # pads shards again
    if dim == 1:
        chunk = weight.record.chunk(world_size, 1)[rank]
        assert torch.equal(module.weight.to_local().record, chunk)


@pytest.mark.parametrize("dim", [0, 1])
def test_experts_are_sharded_along_any_leading_dimension(ranks: Ranks, dim):
    ranks.run(stack_of_experts, dim)


def columns(rank, world_size):
    if world_size > 1:
        for model in (make_model(), torch.nn.Sequential(make_model().blocks[0].up.base)):
            with pytest.raises(ShardingError, match="shard dim 0"):
                fully_shard(model, shard_placement_fn=lambda param: Shard(param.dim() - 1))


def test_columns_are_not_sharded_by_fully_shard(ranks: Ranks):
    ranks.run(columns)
