"""What FSDP2 is handed, and that the installed torch still takes the hook of one argument."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nf4tensor import NF4Tensor, _versions
from nf4tensor.errors import ShardingError
from nf4tensor.tensor import all_gather
from tests.tensor.weights import assert_same, dense, make


@pytest.fixture(scope="module")
def _one_rank():
    """A world of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


one_rank = pytest.mark.usefixtures("_one_rank")


def linear(q: NF4Tensor) -> nn.Linear:
    """Return a module that holds a weight."""
    module = nn.Linear(q.shape[-1], q.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(q, requires_grad=False)
    return module


def test_the_hook_takes_the_mesh_only():
    """With five parameters torch insists on unpacked sizes; it counts them to choose."""
    hook = make(4, 65).fsdp_pre_all_gather
    assert list(inspect.signature(hook).parameters) == ["mesh"]
    assert _versions.FSDP_HOOK_TAKES_MESH_ONLY


@one_rank
def test_this_torch_calls_the_hook_with_the_mesh_only(monkeypatch: pytest.MonkeyPatch):
    """Fails on the day that torch drops this form: see `_versions.FSDP_HOOK_TAKES_MESH_ONLY`."""
    calls = []

    def hook(self, mesh):
        calls.append(mesh)
        return all_gather.pre_all_gather(self, mesh)

    monkeypatch.setattr(NF4Tensor, "fsdp_pre_all_gather", hook)
    q, x = make(6, 65), dense(2, 65, seed=1)
    module = fully_shard(linear(q))
    assert_same(module(x), F.linear(x, q))
    assert len(calls) == 1


def test_the_record_is_handed_over_as_it_is():
    q = make(4, 65)
    (record,), metadata = q.fsdp_pre_all_gather(None)
    assert record is q.record
    assert metadata == (q.spec, "rows", q.record.shape, 0)


def test_what_was_gathered_becomes_a_tensor_over_it():
    q = make(4, 65)
    gathered = q.record.repeat(2, 1)
    (_,), metadata = q.fsdp_pre_all_gather(None)
    whole, (inner,) = q.fsdp_post_all_gather((gathered,), metadata, torch.bfloat16)
    assert inner.data_ptr() == gathered.data_ptr()
    assert whole.dtype == torch.bfloat16
    assert_same(whole.dequantize(torch.float32), torch.cat([q.dequantize()] * 2))
    assert q.fsdp_post_all_gather((gathered,), metadata, torch.bfloat16, out=whole) is None
    with pytest.raises(AssertionError):
        q.fsdp_post_all_gather((gathered.clone(),), metadata, torch.bfloat16, out=whole)


@one_rank
@pytest.mark.parametrize("shape", [(6, 65), (3, 5, 65), (1, 64), (65,)])
@pytest.mark.parametrize("reshard", [True, False])
def test_one_rank_gathers_the_same_bytes_every_time(shape, reshard):
    q = make(*shape)
    module = nn.Module()
    module.weight = nn.Parameter(q, requires_grad=False)
    module.forward = lambda x: x * module.weight.dequantize()
    fully_shard(module, reshard_after_forward=reshard)
    assert isinstance(module.weight, DTensor)
    assert torch.equal(module.weight.to_local().record, q.record)
    for _ in range(3):
        assert_same(module(torch.ones(())), q)


@one_rank
def test_decoding_follows_the_mixed_precision_policy():
    q, x = make(6, 65), dense(2, 65, seed=1)
    module = fully_shard(linear(q), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    expected = F.linear(x.bfloat16(), q.dequantize(torch.bfloat16))
    assert_same(module(x), expected)
    module.unshard()
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(module.weight.record, q.record)


@one_rank
def test_a_local_tensor_of_fsdp_can_be_merged_into():
    q, delta = make(6, 65), dense(6, 65, seed=1)
    module = fully_shard(linear(q.clone()))
    with pytest.warns(UserWarning, match="rounds to 4 bits"):
        module.weight.to_local().add_(delta)
    x = dense(2, 65, seed=2)
    assert_same(module(x), F.linear(x, q.add_(delta)))


def test_columns_are_cut_freely_where_fsdp_is_not_the_caller():
    assert _versions.caller_of_type("FSDPParam") is None
    all_gather.refuse_column_shard(make(4, 64))


class FSDPParam:
    """Stands for torch's class, which asks for the columns of a weight."""

    def chunk(self, weight, dim):
        return torch.chunk(weight, 2, dim=dim)


class FSDPParamGroup:
    """Stands for torch's class, which gathers weights."""

    mesh_info = object()

    def gather(self, shard):
        return shard.fsdp_pre_all_gather(None)


def test_shards_of_columns_are_refused():
    with pytest.raises(ShardingError, match=r"columns of a 4-bit weight.*\(4, 64\).*shard dim 0"):
        FSDPParam().chunk(make(4, 64), 1)
    with pytest.raises(ShardingError, match="give it a second dimension, or pass it in ignored"):
        FSDPParam().chunk(make(64), 0)


def test_an_integer_reshard_is_refused():
    group, q = FSDPParamGroup(), make(4, 64)
    for after_forward in (None, group.mesh_info):
        group.post_forward_mesh_info = after_forward
        assert group.gather(q)[0] == (q.record,)
    group.post_forward_mesh_info = object()
    with pytest.raises(ShardingError, match="pass reshard_after_forward=True, or False"):
        group.gather(q)
