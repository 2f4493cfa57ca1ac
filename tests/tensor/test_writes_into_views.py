"""Assignment to rows, and writes into cuts of columns: through, or an error."""

import pytest
import torch
from torch import nn

from nf4tensor import to_nf4
from nf4tensor.errors import UnsupportedError
from tests.tensor.weights import assert_same, dense, make


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
@pytest.mark.parametrize(
    "key",
    [
        1,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        ...,
        (1, slice(None)),
        (1, ...),
        (..., slice(None)),
        (..., slice(0, 65)),
        (None, 1),
        (slice(1, 3), slice(0, 65, 1)),
        (),
    ],
)
@pytest.mark.parametrize("value", [0.5, torch.tensor(2.0), dense(65, seed=3), make(65, seed=4)])
def test_whole_rows_are_assigned(key, value):
    q = make(4, 65)
    d = q.dequantize()
    q[key] = value
    d[key] = value.dequantize() if hasattr(value, "spec") else value
    assert torch.equal(q.record, to_nf4(d).record)


@pytest.mark.parametrize(
    "key",
    [
        (slice(None), 0),
        (slice(None), slice(0, 64)),
        (slice(None), slice(None, None, 2)),
        (..., 0),
        (..., slice(16)),
        (1, 2),
        (slice(None), [1, 2]),
        (None, 1, 2),
        torch.ones(4, 65, dtype=torch.bool),
        (torch.tensor([0]), torch.tensor([1])),
    ],
)
def test_parts_of_rows_are_never_assigned(key):
    q = make(4, 65)
    before = q.record.clone()
    with pytest.raises(UnsupportedError, match="would cut its rows: assign whole rows, or change"):
        q[key] = 0.0
    assert torch.equal(q.record, before)


def test_views_that_are_not_rows_are_never_assigned():
    for view in (lambda q: q.t(), lambda q: q.view(-1)):
        with pytest.raises(UnsupportedError, match="would cut its rows"):
            view(make(4, 65))[1] = 0.0
    with pytest.raises(UnsupportedError, match="would cut its rows"):
        make(65)[1] = 0.0


# Cuts of columns are copies


CUT_WRITES = {
    "mul_": lambda w: w.mul_(0.0),
    "zero_": lambda w: w.zero_(),
    "copy_": lambda w: w.copy_(torch.ones(4, 64)),
    "one row": lambda w: w[0].zero_(),
    "transposed": lambda w: w.t().fill_(1.0),
    "detached": lambda w: w.detach().zero_(),
    "assignment": lambda w: w.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("write", CUT_WRITES.values(), ids=CUT_WRITES)
@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_writing_into_a_cut_is_refused_until_it_is_a_tensor_of_its_own(write):
    q = make(4, 128)
    for cut in (
        q[:, :64],
        q.chunk(2, -1)[1],
        q.split([64, 64], 1)[0],
        q[:, :64].requires_grad_(False),
    ):
        with pytest.raises(UnsupportedError, match=r"would change a copy: clone\(\) it first"):
            write(cut)
    write(q[:, :64].clone())
    write(nn.Parameter(q[:, :64], requires_grad=False).data)
    assert torch.equal(q.record, make(4, 128).record)


def test_bytes_copied_into_a_cut_would_be_lost():
    q, other = make(4, 128), make(4, 128, seed=1)
    for write in (
        lambda: q[:, :64].copy_(other[:, :64]),
        lambda: q[:, :64].index_put_((torch.tensor([0]),), torch.zeros(1, 64)),
    ):
        with pytest.raises(UnsupportedError, match=r"clone\(\) it first"):
            write()
    cut = q[:, :64].clone()
    cut.copy_(other[:, :64])
    assert_same(cut, other[:, :64])
