"""Copies and moves keep every byte; the padding of a shard moves with it."""

import copy

import pytest
import torch
from torch import nn

from nf4tensor import NF4Tensor, NF4TensorWarning
from nf4tensor.tensor import copies
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same, make, shares_memory

VIEWS = {
    "rows": lambda q: q,
    "some rows": lambda q: q[2:5],
    "every other row": lambda q: q[::2],
    "one row": lambda q: q[1],
    "transposed": lambda q: q.t(),
    "flat": lambda q: q.view(-1),
    "expanded": lambda q: q[:1].expand(3, -1),
    "cut": lambda q: q[:, 16:48],
    "no rows": lambda q: q[:0],
}
COPIES = {
    "clone": lambda q: q.clone(),
    "clone of its format": lambda q: q.clone(memory_format=torch.preserve_format),
    "torch.clone": torch.clone,
    "to with copy": lambda q: q.to("cpu", copy=True),
    "to dtype and back": lambda q: q.to(torch.float16).to(torch.float32),
    "torch.asarray": lambda q: torch.asarray(q, copy=True),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_copies_keep_bytes_and_share_nothing(view, duplicate):
    q = view(make(8, 65))
    before = q.record.clone()
    twin = duplicate(q)
    assert isinstance(twin, NF4Tensor)
    assert (twin.spec, twin.view_kind, twin.dtype) == (q.spec, q.view_kind, q.dtype)
    assert torch.equal(twin.record, q.record)
    assert_same(twin, q)
    if q.numel():
        twin.zero_()
        assert torch.equal(q.record, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", [lambda q, d: q.to(d), lambda q, d: q.type(d)])
def test_dtype_changes_no_byte(dtype, cast):
    q = make(8, 65, dtype=torch.bfloat16)
    twin = cast(q, dtype)
    assert isinstance(twin, NF4Tensor)
    assert twin.dtype == dtype
    assert torch.equal(twin.record, q.record)
    assert twin.nbytes == q.nbytes
    assert_same(twin.dequantize(), q.dequantize(dtype))
    assert (twin is q) == (dtype == torch.bfloat16)


def test_named_casts():
    q = make(8, 65)
    assert q.float() is q
    assert q.half().dtype == torch.float16
    assert q.bfloat16().dtype == torch.bfloat16
    assert not shares_memory(q.half(), q)
    assert q.cpu() is q
    assert q.to(q.t()) is q


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_decode(dtype):
    q = make(8, 65)
    with pytest.warns(NF4TensorWarning, match="_to_copy.*decodes"):
        found = q.to(dtype)
    assert type(found) is torch.Tensor
    assert torch.equal(found, q.dequantize().to(dtype))


def test_meta_has_the_shape():
    q = make(8, 65)
    for view in VIEWS.values():
        moved = view(q).to("meta")
        assert moved.is_meta
        assert moved.record.is_meta
        assert moved.shape == view(q).shape
        assert moved.dequantize().shape == view(q).shape
    assert q.to("meta", torch.float16).dtype == torch.float16


def test_empty_like_shares_nothing():
    q, other = make(8, 65), make(8, 65, seed=1)
    before = q.record.clone()
    fresh = torch.empty_like(q)
    fresh.copy_(other)
    assert torch.equal(q.record, before)
    assert torch.equal(fresh.record, other.record)


# Shards that FSDP2 padded: what `_init_sharded_param` of torch does


def shard(q: NF4Tensor, num_padded: int) -> NF4Tensor:
    """Return the first rows of a padded copy, made as FSDP2 makes them."""
    padded = q.new_zeros((num_padded, *q.shape[1:]))
    if q.numel():
        padded.narrow(0, 0, q.shape[0]).copy_(q)
    padded.view(-1)
    return padded.cpu().narrow(0, 0, q.shape[0])


MOVES = {
    "itself": lambda q: q,
    "detach": lambda q: q.detach(),
    "alias": lambda q: torch.ops.aten.alias.default(q),
    "data": lambda q: q.data,
    "clone": lambda q: q.clone(),
    "to another device": lambda q: q.to("meta"),
    "to with copy": lambda q: q.to("cpu", copy=True),
    "to a dtype": lambda q: q.to(torch.bfloat16),
    "parameter": lambda q: nn.Parameter(q, requires_grad=False),
    "trained parameter": lambda q: nn.Parameter(q),
    "view of the same size": lambda q: q.view(q.shape),
    "all rows again": lambda q: q.narrow(0, 0, q.shape[0]),
    "slice of all": lambda q: q[:],
    "deepcopy": copy.deepcopy,
    # The handler that pins, without a device to pin for.
    "pinned": lambda q: copies.clone(lambda record: record.clone(), (q,), {}),
    "many moves": lambda q: nn.Parameter(q.clone().to("cpu", copy=True).detach()).data[:],
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("num_rows", [0, 3, 5])
def test_moves_hand_the_padded_record_to_fsdp(move, num_rows):
    q = make(5, 65)[:num_rows]
    local = move(shard(q, 5))
    (record,), (spec, view, *_) = local.fsdp_pre_all_gather(None)
    assert local.shape == (num_rows, 65)
    assert record.shape == (5, q.spec.pitch)
    assert (spec, view) == (q.spec, "rows")
    if not record.is_meta:
        assert torch.equal(record[:num_rows], q.record)
        gathered = NF4Tensor(record, spec, q.dtype).dequantize()
        assert not gathered[num_rows:].any()
        assert not gathered[num_rows:].signbit().any()


def test_the_padding_is_one_storage_with_the_shard():
    local = shard(make(3, 65), 5)
    (record,), _ = local.fsdp_pre_all_gather(None)
    local.zero_()
    assert torch.equal(record[:3], local.record)


@pytest.mark.parametrize(
    "choice",
    [
        lambda q: q[:2],
        lambda q: q[1:],
        lambda q: q[:2].clone(),
        lambda q: q[::2],
        lambda q: q[1],
        lambda q: q[[0, 1]],
        lambda q: q.chunk(2)[0],
        lambda q: q.split(2)[0],
        lambda q: torch.cat([q, q]),
        lambda q: q[None],
    ],
)
@pytest.mark.parametrize("num_padded", [4, 5])
def test_a_choice_of_rows_never_sends_the_rows_of_its_parent(choice, num_padded):
    for q in (make(4, 65), shard(make(4, 65), num_padded)):
        chosen = choice(q)
        (record,), _ = chosen.fsdp_pre_all_gather(None)
        assert record is chosen.record


def test_copies_of_a_choice_are_as_small_as_it_is():
    q = shard(make(4, 65), 5)
    assert q[:2].clone().record.untyped_storage().nbytes() == 2 * q.spec.pitch
