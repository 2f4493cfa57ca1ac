"""Writing into 4-bit storage: through, or an error; never lost and never silent."""

import pytest
import torch
from torch import nn

from nf4tensor import NF4TensorWarning, to_nf4
from nf4tensor.errors import DTypeError, ShapeError, SpecError, UnsupportedError, WeightError
from nf4tensor.tensor import fallback
from tests.oracle import Spec, take_apart
from tests.oracle_tensors import records_of
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same, dense, make, make_dynamic8

delta = dense(4, 65, seed=1) / 4


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(delta),
        lambda w: w.add_(delta, alpha=0.5),
        lambda w: w.sub_(delta),
        lambda w: w.mul_(delta),
        lambda w: w.div_(delta + 3),
        lambda w: w.add_(1.5),
        lambda w: w.mul_(2),
        lambda w: w.add_(delta[0]),
        lambda w: w.__iadd__(delta),
        lambda w: w.add_(w),
        lambda w: w.copy_(delta),
        lambda w: w.copy_(delta[0]),
        lambda w: w.copy_(torch.arange(65)),
        lambda w: w.copy_(torch.ones(65, dtype=torch.bool)),
    ],
)
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w[:], lambda w: w[None]])
def test_float_writes_decode_compute_and_quantize(write, view):
    q = make(4, 65)
    expected = q.dequantize()
    write(view(expected))
    with pytest.warns(NF4TensorWarning, match=r"rounds to 4 bits.*merge into dequantize\(\)"):
        write(view(q))
    assert torch.equal(q.record, to_nf4(expected).record)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_in_place_ops_return_the_tensor_itself():
    q = make(4, 65)
    assert q.add_(1) is q
    assert q.copy_(delta) is q
    assert q.copy_(make(4, 65)) is q
    assert q.fill_(1.0) is q
    assert q.zero_() is q
    assert q._version > 3


def test_float_writes_warn_once():
    q = make(4, 65)
    with pytest.warns(NF4TensorWarning, match=r"aten.add_.Tensor into an NF4Tensor rounds"):
        q.add_(delta)
    q.add_(delta)


@pytest.mark.parametrize("fill", [lambda w: w.zero_(), lambda w: w.fill_(2.5)])
def test_fills(fill):
    for view in (lambda w: w, lambda w: w[1], lambda w: w.t(), lambda w: w.view(-1)):
        q = make(4, 65)
        d = q.dequantize()
        fill(view(q))
        fill(view(d))
        assert_same(q, d)
    assert_same(make(4, 65).fill_(torch.tensor(2.5)), torch.full((4, 65), 2.5))
    assert_same(nn.init.zeros_(make(4, 65)), torch.zeros(4, 65))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dense_target_takes_decoded_values(dtype):
    q = make(4, 65, dtype=torch.bfloat16)
    target = torch.empty(4, 65, dtype=dtype)
    assert_same(target.copy_(q), q.dequantize().to(dtype))
    target[1] = q[2]
    assert_same(target[1], q.dequantize()[2].to(dtype))
    assert_same(torch.zeros(2, 4, 65, dtype=dtype).copy_(q)[1], q.dequantize().to(dtype))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_arithmetic_into_a_dense_target():
    q = make(4, 65)
    assert_same(torch.ones(4, 65).add_(q, alpha=2), torch.ones(4, 65).add_(q.dequantize(), alpha=2))
    target = torch.zeros(6, 65)
    target[[0, 2]] = q[:2]
    assert_same(target[[0, 2]], q[:2])
    with pytest.raises(RuntimeError):
        torch.ones(65).add_(q)
    assert_same(torch.zeros(()).fill_(make(1, 1)[0, 0]), make(1, 1).dequantize()[0, 0])


def test_float_writes_keep_the_phase_of_a_row():
    """A cut begins inside of a segment; its pairs are fitted to the blocks it has."""
    q = make(2, 200, block_size=16, scale_block_size=3)[:, 80:].clone()
    before = [take_apart(row, Spec.of(q.spec)).phase for row in records_of(q.record)]
    with pytest.warns(NF4TensorWarning):
        q.copy_(dense(2, 120, seed=5))
    after = [take_apart(row, Spec.of(q.spec)).phase for row in records_of(q.record)]
    assert before == after == [5, 5]
    assert (q.dequantize() - dense(2, 120, seed=5)).abs().max() < 0.5


# Bytes between equal specs


def test_equal_specs_copy_bytes():
    q, other = make(4, 65), make(4, 65, dtype=torch.float16, seed=1)
    assert torch.equal(q.copy_(other).record, other.record)
    assert q.dtype == torch.float32
    q[1:3].copy_(other[:2])
    assert torch.equal(q[1:3].record, other[:2].record)
    q.copy_(other[0])
    assert torch.equal(q.record, other.record[:1].expand(4, -1))
    q.view(-1).copy_(other.view(2, 2, 65).view(-1))
    assert torch.equal(q.record, other.record)
    q.t().copy_(make(4, 65, seed=2).t())
    assert torch.equal(q.record, make(4, 65, seed=2).record)


def test_other_specs_are_refused_naming_both():
    q = make(4, 65)
    for options in ({"block_size": 32}, {"scale_block_size": None}, {"quant_type": "fp4"}):
        other = make(4, 65, **options)
        with pytest.raises(SpecError, match="without quantizing again: load with assign=True") as e:
            q.copy_(other)
        assert str(q.spec) in str(e.value)
        assert str(other.spec) in str(e.value)


def test_other_views_and_shapes_are_refused():
    q, square = make(4, 65), make(64, 64)
    with pytest.raises(UnsupportedError, match="cannot copy a transposed view into a rows view"):
        square.copy_(square.t())
    with pytest.raises(ShapeError, match="cannot copy 0 flat weights into 260"):
        q.view(-1).copy_(q.new_empty(0))
    for source in (make(3, 65), make(2, 4, 65)):
        with pytest.raises(RuntimeError):
            q.copy_(source)
    for source in (dense(3, 65), dense(4, 64), dense(2, 4, 65)):
        with pytest.warns(NF4TensorWarning, match="rounds"):
            with pytest.raises(ShapeError, match=r"into an NF4Tensor of shape \(4, 65\)"):
                q.copy_(source)
        fallback._warned.clear()


# Refusals


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values_are_refused_and_change_nothing(value):
    q, weight = make(4, 65), dense(4, 65)
    weight[2, 3] = value
    before = q.record.clone()
    writes = (
        lambda: q.copy_(weight),
        lambda: q.add_(weight),
        lambda: q.fill_(value),
        lambda: q.div_(0.0),
        lambda: q.__setitem__(2, weight[2]),
    )
    for write in writes:
        with pytest.raises(WeightError, match="NaN or infinite"):
            write()
    assert torch.equal(q.record, before)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_doubles_are_refused():
    for write in (
        lambda q: q.copy_(dense(4, 65).double()),
        lambda q: q[0].copy_(torch.ones(65).double()),
    ):
        with pytest.raises(DTypeError, match=r"float64.*cast it first"):
            write(make(4, 65))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_imported_scales_are_never_written():
    q = make_dynamic8(3)
    for write in (lambda: q.add_(1.0), lambda: q.copy_(torch.ones(3, 64)), lambda: q.fill_(1.0)):
        with pytest.raises(SpecError, match=r"to_nf4\(q.dequantize\(\) \+ delta\)"):
            write()
    q.copy_(make_dynamic8(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.clamp_(0, 1),
        lambda w: w.neg_(),
        lambda w: w.relu_(),
        lambda w: w.pow_(2),
        lambda w: w.div_(2, rounding_mode="floor"),
        lambda w: w.normal_(),
        lambda w: w.uniform_(),
        lambda w: w.bernoulli_(),
        lambda w: w.lerp_(w, 0.5),
        lambda w: w.addcmul_(w, w),
        lambda w: w.masked_fill_(w.record[:, :65] > 0, 0.0),
        lambda w: w.index_fill_(0, torch.tensor([1]), 0.0),
        lambda w: w.index_copy_(0, torch.tensor([1]), torch.ones(1, 65)),
        lambda w: w.index_add_(0, torch.tensor([1]), torch.ones(1, 65)),
        lambda w: w.scatter_(0, torch.zeros(1, 65, dtype=int), 1.0),
        lambda w: w.index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor(1.0)),
        lambda w: w.index_put_((torch.tensor([1]),), torch.ones(65), accumulate=True),
        lambda w: w.fill_diagonal_(9.0),
        lambda w: w.resize_(3, 3),
        lambda w: w.set_(torch.ones(3)),
        lambda w: w.t_(),
        lambda w: w.unsqueeze_(0),
        lambda w: w.squeeze_(),
        lambda w: torch.add(w, w, out=w),
        lambda w: torch.mm(torch.ones(4, 4), torch.ones(4, 65), out=w),
        lambda w: torch._foreach_add_([w], 1.0),
        lambda w: nn.init.kaiming_uniform_(w),
        lambda w: torch.nn.functional.embedding(torch.tensor([1]), w, max_norm=0.1),
        lambda w: torch.nn.functional.dropout(w, 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:aten.as_strided.default decodes:nf4tensor.NF4TensorWarning")
def test_other_in_place_ops_are_refused_by_name(write):
    q = make(4, 65)
    before = q.record.clone()
    with pytest.raises(UnsupportedError, match=r"aten\.\w+\.\w+ would write into.*with to_nf4\(\)"):
        write(q)
    assert torch.equal(q.record, before)


@pytest.mark.parametrize(
    "key",
    [[0, 2], torch.tensor([3]), torch.tensor([True, False, True, False])],
    ids=["list", "tensor", "mask"],
)
@pytest.mark.filterwarnings("ignore:copy_ of a float tensor:nf4tensor.NF4TensorWarning")
def test_rows_chosen_by_indices_are_written(key):
    q, expected = make(4, 65), make(4, 65)
    row = dense(1, 65, seed=5)
    before = q.record.clone()
    q[key] = row
    for i in range(4):
        if i in (key if isinstance(key, list) else torch.arange(4)[key]):
            assert torch.equal(q[i].record, to_nf4(row[0]).record)
        else:
            assert torch.equal(q[i].record, before[i])
    q[key] = expected[1]
    assert torch.equal(q[key].record[0], expected[1].record)
