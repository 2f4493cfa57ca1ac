"""Choosing and joining rows: bytes move, nothing is decoded, values are those of the dense op."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nf4tensor import NF4Tensor, NF4TensorWarning, to_nf4
from nf4tensor.errors import UnsupportedError
from tests.strategies import PROPERTY
from tests.tensor.weights import assert_same, dense, make, shares_memory

CHOICES = {
    "w[3]": lambda w: w[3],
    "w[-1]": lambda w: w[-1],
    "w[3:7]": lambda w: w[3:7],
    "w[-3:]": lambda w: w[-3:],
    "w[::2]": lambda w: w[::2],
    "w[12:]": lambda w: w[12:],
    "w[5:2]": lambda w: w[5:2],
    "w[...]": lambda w: w[...],
    "w[()]": lambda w: w[()],
    "w[None]": lambda w: w[None],
    "w[:, None]": lambda w: w[:, None],
    "w[2:5, :]": lambda w: w[2:5, :],
    "w[3, ...]": lambda w: w[3, ...],
    "w[[4, 1]]": lambda w: w[[4, 1]],
    "w[tensor]": lambda w: w[torch.tensor([4, 1, 1])],
    "w[matrix]": lambda w: w[torch.tensor([[4, 1], [0, 0]])],
    "w[mask]": lambda w: w[torch.arange(w.shape[0]) % 3 == 0],
    "select": lambda w: w.select(0, 2),
    "select from the end": lambda w: w.select(-2, 0),
    "narrow": lambda w: w.narrow(0, 2, 3),
    "index_select": lambda w: w.index_select(0, torch.tensor([3, 3, 0])),
    "index_select by name": lambda w: torch.index_select(w, dim=-2, index=torch.tensor([1])),
    "unbind": lambda w: w.unbind(),
    "iteration": lambda w: list(w),
    "chunk": lambda w: w.chunk(5),
    "split": lambda w: w.split(5),
    "split into sizes": lambda w: w.split([2, 0, 10]),
    "tensor_split": lambda w: torch.tensor_split(w, 5),
    "cat": lambda w: torch.cat([w, w[:2], w[:0]]),
    "cat by name": lambda w: torch.cat(tensors=[w, w], dim=-2),
    "vstack": lambda w: torch.vstack([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "stack between": lambda w: torch.stack([w, w], 1),
    "cat of chunks": lambda w: torch.cat(w.chunk(5)),
    "take some, then one": lambda w: w[[4, 1]][1],
    "repeat_interleave": lambda w: w.repeat_interleave(2, 0),
}
DEEP = {
    "w[1, 2]": lambda w: w[1, 2],
    "w[:, 2]": lambda w: w[:, 2],
    "w[:, [2, 0]]": lambda w: w[:, [2, 0]],
    "w[[0, 1], [2, 0]]": lambda w: w[[0, 1], [2, 0]],
    "w[..., 1:3, :]": lambda w: w[..., 1:3, :],
    "two masks": lambda w: w[torch.arange(w.shape[0] * w.shape[1]).view(w.shape[:2]) % 2 == 0],
    "split along the middle": lambda w: w.split(2, 1),
    "unbind along the middle": lambda w: w.unbind(1),
    "cat along the middle": lambda w: torch.cat([w, w], 1),
    "stack at the end of the rows": lambda w: torch.stack([w, w], 2),
    "select in the transposed": lambda w: w.mT[1],
    "slice of the transposed": lambda w: w.mT[1:],
    "unbind of the transposed": lambda w: w.mT.unbind(0),
}
WEIGHTS = {"two dimensions": (12, 65), "three": (12, 4, 65)}


def compare(found, expected) -> None:
    """Compare trees of tensors, all of which must be 4-bit on one side."""
    found = found if isinstance(found, list | tuple) else [found]
    expected = expected if isinstance(expected, list | tuple) else [expected]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, NF4Tensor)
        assert one.stride() == other.stride() or one.numel() == 0
        assert_same(one, other)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
def test_choices_of_rows(choice, shape):
    q = make(*shape, dtype=torch.bfloat16)
    compare(choice(q), choice(q.dequantize()))


@pytest.mark.parametrize("choice", DEEP.values(), ids=DEEP)
def test_choices_within_leading_dimensions(choice):
    q = make(12, 4, 65)
    compare(choice(q), choice(q.dequantize()))
    q = make(2, 4, 3, 65)
    compare(choice(q), choice(q.dequantize()))


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[3],
        lambda w: w[3:7],
        lambda w: w[::2],
        lambda w: w.unbind()[3],
        lambda w: w.chunk(4)[1],
        lambda w: w.split([3, 9])[1],
        lambda w: w.narrow(0, 2, 3),
    ],
)
def test_views_of_rows_write_through(view):
    q = make(12, 65)
    d = q.dequantize()
    view(q).zero_()
    view(d).zero_()
    assert_same(q, d)
    row = make(12, 65, seed=1)
    view(q).copy_(view(row))
    view(d).copy_(view(row).dequantize())
    assert_same(q, d)


@pytest.mark.parametrize("gather", [lambda w: w[[1, 2]], lambda w: torch.cat([w, w])])
def test_copies_of_rows_are_copies(gather):
    q = make(12, 65)
    before = q.record.clone()
    gather(q).zero_()
    assert torch.equal(q.record, before)


@PROPERTY
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), dim=st.integers(0, 1))
def test_cat_of_any_split_is_the_whole(sizes, dim):
    shape = [2, 2, 20]
    shape[dim] = sum(sizes)
    q = make(*shape)
    pieces = q.split(sizes, dim)
    assert [piece.shape[dim] for piece in pieces] == sizes
    assert torch.equal(torch.cat(pieces, dim).record, q.record)


@PROPERTY
@given(start=st.integers(-15, 15), stop=st.integers(-15, 15), step=st.integers(1, 5))
def test_any_slice(start, stop, step):
    q = make(12, 20)
    compare(q[start:stop:step], q.dequantize()[start:stop:step])


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_dimensions_out_of_range_are_refused_as_torch_does():
    q = make(12, 65)
    for w in (q, q.dequantize()):
        for call in (lambda w: w.select(2, 0), lambda w: w.unbind(-3), lambda w: w.split(2, 2)):
            with pytest.raises(IndexError, match=r"Dimension out of range"):
                call(w)
        with pytest.raises(IndexError):
            w[12]
        with pytest.raises(RuntimeError):
            w.split([1, 2])
        with pytest.raises(RuntimeError):
            torch.cat([w, w[None]])


@pytest.mark.parametrize(
    "op",
    [
        lambda w: torch.cat([w, make(2, 65)]),
        lambda w: torch.cat([w, dense(2, 65, dtype=torch.bfloat16)]),
        lambda w: torch.stack([w, w], 2),
        lambda w: torch.cat([w.t(), w.t()]),
        lambda w: torch.cat([w, to_nf4(dense(2, 65, dtype=torch.bfloat16), 32)]),
        lambda w: torch.stack([w.view(-1), w.view(-1)]),
        lambda w: w.flip(0),
        lambda w: w.roll(1, 0),
        lambda w: w.repeat(2, 1),
        lambda w: w.t()[3],
        lambda w: w.t()[3:5],
        lambda w: w.view(-1)[3],
        lambda w: w.view(-1)[3:70],
        lambda w: w.view(-1)[::65],
        lambda w: w.view(-1).split(100),
        lambda w: w[torch.tensor([0, 1]), torch.tensor([2, 3])],
        lambda w: w[w > 0],
        lambda w: w[3, 4],
        lambda w: w[[3], :5],
    ],
)
def test_what_is_no_row_is_decoded_with_a_warning(op):
    q = make(12, 65, dtype=torch.bfloat16)
    with pytest.warns(NF4TensorWarning, match="decodes an NF4Tensor to a dense tensor"):
        found = op(q)
    expected = op(q.dequantize())
    found, expected = (t if isinstance(t, tuple) else (t,) for t in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert not isinstance(one, NF4Tensor)
        assert_same(one, other)


def test_embedding_decodes_only_its_rows():
    q = make(12, 65, dtype=torch.bfloat16)
    for tokens in (torch.tensor([[1, 2], [3, 0]]), torch.tensor(4), torch.tensor([], dtype=int)):
        found = F.embedding(tokens, q, padding_idx=0)
        assert_same(found, F.embedding(tokens, q.dequantize(), padding_idx=0))
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([12]), q)
    module = torch.nn.Embedding(12, 65, _weight=q, _freeze=True)
    assert_same(module(torch.tensor([7])), q.dequantize()[[7]])


def test_cat_passes_over_empty_chunks_of_fsdp():
    q = make(12, 65)
    empty = q.new_empty(0)
    assert empty.shape == (0,)
    for tensors in ([q, empty], [empty, q], [empty, q, torch.empty(0)]):
        assert torch.equal(torch.cat(tensors).record, q.record)
    assert torch.cat([empty, empty]).shape == (0,)


# Flat views, as DistributedDataParallel makes and takes apart


def test_flat_views_are_put_together_and_taken_apart_without_decoding():
    first, second = make(12, 65), make(2, 3, 65, seed=1)
    flat = torch.cat([first.view(-1), second.view(-1)])
    assert flat.view_kind == "flat"
    assert flat.shape == (18 * 65,)
    assert_same(flat, torch.cat([first.dequantize().view(-1), second.dequantize().view(-1)]))
    for pieces in (
        (flat[: 12 * 65], flat.narrow(0, 12 * 65, 6 * 65)),
        flat.split([12 * 65, 6 * 65]),
    ):
        assert torch.equal(pieces[0].view(12, 65).record, first.record)
        assert torch.equal(pieces[1].view_as(second).record, second.record)
    assert shares_memory(flat[:65], flat)


@pytest.mark.parametrize(
    "other",
    [dense(7), make(2, 65, block_size=32).view(-1), make(2, 64).view(-1), make(1, 65)[0]],
)
def test_flat_views_with_others_are_refused(other):
    q = make(12, 65)
    for tensors in ([q.view(-1), other], [other, q.view(-1)]):
        with pytest.raises(UnsupportedError, match="pass init_sync=False to Distributed"):
            torch.cat(tensors)
