"""Other looks at the same rows: strides and values of torch, one record, writes that arrive."""

import pytest
import torch
from torch import nn

from nf4tensor import NF4Tensor, NF4TensorWarning
from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor.decoded import DecodedView
from tests.tensor.weights import assert_same, dense, make, shares_memory

VIEWS = {
    "t": lambda w: w[0].t(),
    "T": lambda w: w[0].T,
    "mT": lambda w: w.mT,
    "H": lambda w: w[0].H,
    "adjoint": lambda w: w.adjoint(),
    "t of t": lambda w: w[0].t().t(),
    "transpose": lambda w: w.transpose(-1, 1),
    "transpose of leading": lambda w: w.transpose(0, 1),
    "swapaxes": lambda w: w.swapaxes(1, 2),
    "permute": lambda w: w.permute(1, 0, 2),
    "permute of nothing": lambda w: w.permute(0, 1, 2),
    "permute and transpose": lambda w: w.permute(1, 2, 0),
    "permute of the transposed": lambda w: w.mT.permute(0, 2, 1),
    "permute of leading, transposed": lambda w: w[None].mT.permute(1, 0, 2, 3),
    "movedim": lambda w: w.movedim(0, 1),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "unsqueeze between": lambda w: w.unsqueeze(-2),
    "unsqueeze of the transposed": lambda w: w.mT.unsqueeze(1),
    "squeeze": lambda w: w[:1].squeeze(0),
    "squeeze of a longer dimension": lambda w: w.squeeze(1),
    "squeeze of the last": lambda w: w.squeeze(-1),
    "squeeze of all": lambda w: w[:1, :1].squeeze(),
    "squeeze of nothing": lambda w: w.squeeze(),
    "squeeze of some": lambda w: w[None, :1].squeeze((0, 1)),
    "squeeze of the transposed": lambda w: w[:1].mT.squeeze(0),
    "expand": lambda w: w.expand(3, 4, 6, 65),
    "expand of one": lambda w: w[:1].expand(5, -1, -1),
    "broadcast_to": lambda w: torch.broadcast_to(w, (2, 4, 6, 65)),
    "view": lambda w: w.view(2, 2, 6, 65),
    "view by -1": lambda w: w.view(-1, 65),
    "view of the same size": lambda w: w.view(4, 6, 65),
    "view as one dimension": lambda w: w.view(-1),
    "view of one row": lambda w: w[1, 2:3].view(-1),
    "view of one row as two": lambda w: w[1, 2].view(1, 65),
    "view and back": lambda w: w.view(-1).view(4, 6, 65),
    "view_as": lambda w: w.view_as(w),
    "flatten": lambda w: w.flatten(),
    "flatten of leading": lambda w: w.flatten(0, 1),
    "unflatten": lambda w: w.unflatten(0, (2, 2)),
    "reshape": lambda w: w.reshape(24, 65),
    "ravel": lambda w: w.ravel(),
    "contiguous": lambda w: w.contiguous(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "as_strided of the first": lambda w: torch.as_strided(w, (2, 6, 65), (390, 65, 1)),
    "as_strided of all": lambda w: torch.as_strided(w, (4, 6, 65), (390, 65, 1)),
    "view as itself": lambda w: w.real,
    "cast to its own dtype": lambda w: w.to(torch.float32),
    "as_tensor": lambda w: torch.as_tensor(w),
}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@views
def test_views_have_the_strides_and_the_values(view):
    q = make(4, 6, 65)
    found, expected = view(q), view(q.dequantize())
    assert isinstance(found, NF4Tensor)
    strides = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert all(length == 1 or one == other for length, one, other in strides)
    assert found.is_contiguous() == expected.is_contiguous()
    assert_same(found, expected)


@views
def test_views_of_a_parameter_do_not_copy(view):
    q = nn.Parameter(make(4, 6, 65), requires_grad=False)
    storage = q.record.untyped_storage().data_ptr()
    assert view(q).record.untyped_storage().data_ptr() == storage


@views
def test_what_is_written_into_a_view_arrives(view):
    q = make(4, 6, 65)
    d = q.dequantize()
    if 0 in view(q).stride():
        with pytest.raises(RuntimeError, match="more than one element"):
            view(q).zero_()
        return
    view(q).zero_()
    view(d).zero_()
    assert_same(q, d)
    with pytest.warns(NF4TensorWarning, match="rounds"):
        view(q).add_(2.0)
    view(d).add_(2.0)
    assert_same(q, d)


def test_contiguous_of_strided_rows_is_a_copy():
    q = make(12, 65)
    assert shares_memory(q.contiguous(), q)
    for copy in (
        lambda w: w[::2].contiguous(),
        lambda w: w[::2].reshape(-1),
        lambda w: w.view(3, 4, 65).transpose(0, 1).contiguous(),
        lambda w: w.view(3, 4, 65).transpose(0, 1).reshape(12, 65),
    ):
        found = copy(q)
        assert isinstance(found, NF4Tensor)
        assert found.is_contiguous()
        assert_same(found, copy(q.dequantize()))
        assert not shares_memory(found, q)


CUT = [
    lambda w: w.view(6, 130),
    lambda w: w.view(24, -1),
    lambda w: w.reshape(60, 13),
    lambda w: w.view(12, 65, 1),
    lambda w: w.unflatten(1, (5, 13)),
    lambda w: w.view(3, 4, 65).flatten(1),
    lambda w: w[::2].view(-1),
    lambda w: w[0].view(5, 13),
]


@pytest.mark.parametrize("view", CUT)
def test_views_that_would_cut_rows_are_refused(view):
    with pytest.raises(UnsupportedError, match=r"would cut its rows of 65: call dequantize\(\)"):
        view(make(12, 65))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_views_of_another_number_of_elements_are_refused_as_torch_does():
    for w in (make(12, 65), dense(12, 65)):
        for size in ((13, 65), (5, -1, 65)):
            with pytest.raises(RuntimeError):
                w.view(size)
        with pytest.raises(RuntimeError):
            w.view(3, 4, 65).transpose(0, 1).view(12, 65)
        with pytest.raises(RuntimeError):
            w.permute(0, 0)
        with pytest.raises(RuntimeError):
            w.expand(5, 65)
        with pytest.raises(IndexError):
            w.transpose(0, 2)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.unsqueeze(-1),
        lambda w: w[..., None],
        lambda w: w.view(3, 4, 65).permute(2, 0, 1),
        lambda w: w.t().contiguous(),
        lambda w: w.t().reshape(-1),
        lambda w: torch.as_strided(w, (2, 3), (1, 1)),
        lambda w: torch.as_strided(w, (2, 65), (65, 1), 65),
        lambda w: torch.as_strided(w[0], (3,), (2,)),
        lambda w: w.t().expand(2, 65, 12),
        lambda w: w.diagonal(),
        lambda w: w.unfold(0, 2, 1),
        lambda w: w.view(torch.int32),
        lambda w: w[:1, :1].squeeze(),
    ],
)
def test_other_views_are_decoded_copies_and_say_so(view):
    q = make(12, 65)
    with pytest.warns(NF4TensorWarning, match="decodes an NF4Tensor") as warned:
        found = view(q)
    assert_same(found, view(q.dequantize()))
    if "clone" not in str(warned[0].message):
        assert type(found) is DecodedView
        assert "which cannot be written into" in str(warned[-1].message)


@pytest.mark.parametrize("shape", [(0, 65), (3, 0, 65), (65,), (1, 65), (2, 3, 4, 65), (5, 1)])
def test_odd_shapes(shape):
    q = make(*shape)
    d = q.dequantize()
    for view in (
        lambda w: w.view(-1),
        lambda w: w.view(-1, w.shape[-1]),
        lambda w: w.view(-1).view(w.shape),
        lambda w: w[None],
        lambda w: w[None].squeeze(0),
        lambda w: w[None].expand(3, *w.shape),
        lambda w: w.clone(),
        lambda w: w[None].mT.mT,
        lambda w: torch.cat([w[None], w[None]]),
    ):
        found = view(q)
        assert isinstance(found, NF4Tensor)
        assert_same(found, view(d))


def test_one_dimensional_weights_are_their_own_transposed():
    q = make(65)
    assert_same(q.t(), q)
    assert shares_memory(q.t(), q)
