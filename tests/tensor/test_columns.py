"""Cuts and joins of columns, against the written specification's oracle and the decoded weight."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nf4tensor import NF4Spec, NF4Tensor, NF4TensorWarning, to_nf4
from nf4tensor.errors import SpecError
from nf4tensor.kernels import ops
from nf4tensor.tensor.decoded import DecodedView
from tests import oracle_columns
from tests.oracle import Spec
from tests.oracle_tensors import records_of, to_record
from tests.strategies import PROPERTY, kinds, make_rows, seeds, specs
from tests.tensor.weights import assert_same, dense, make, make_dynamic8


def quantized(spec: NF4Spec, weight: torch.Tensor) -> NF4Tensor:
    """Quantize a weight with a spec of its width."""
    return NF4Tensor(ops.quantize(weight, spec), spec, weight.dtype)


def rows_and_cut(data, spec, kinds, seed) -> tuple[NF4Tensor, int, int]:
    """Draw a weight and the ends of a legal cut of it."""
    q = quantized(spec, make_rows(spec, kinds, 2, seed, torch.float32))
    ends = [*range(0, spec.in_features, 16), spec.in_features]
    start = data.draw(st.sampled_from(ends[:-1]))
    return q, start, data.draw(st.sampled_from([end for end in ends if end > start]))


@PROPERTY
@given(data=st.data(), spec=specs(), kinds=kinds(), seed=seeds)
def test_legal_cuts_are_records_with_the_same_values(data, spec, kinds, seed):
    q, start, stop = rows_and_cut(data, spec, kinds, seed)
    cut = q[:, start:stop]
    assert isinstance(cut, NF4Tensor)
    assert_same(cut, q.dequantize()[:, start:stop])
    expected = [oracle_columns.cut(row, spec, start, stop) for row in records_of(q.record)]
    assert Spec.of(cut.spec) == expected[0][1]
    assert records_of(cut.record) == [row for row, _ in expected]


@PROPERTY
@given(data=st.data(), spec=specs(), kinds=kinds(), seed=seeds)
def test_cuts_of_cuts_have_the_same_values(data, spec, kinds, seed):
    q, start, stop = rows_and_cut(data, spec, kinds, seed)
    cut = q[:, start:stop]
    if cut.shape[1] > 16:
        assert_same(cut[:, 16:], q.dequantize()[:, start + 16 : stop])
    assert_same(cut[1:, :16], q.dequantize()[1:, start : min(start + 16, stop)])


@PROPERTY
@given(data=st.data(), spec=specs(), kinds=kinds(), seed=seeds)
def test_joining_the_cuts_gives_the_whole_back(data, spec, kinds, seed):
    q = quantized(spec, make_rows(spec, kinds, 2, seed, torch.bfloat16))
    ends = range(16, spec.in_features, 16)
    at = sorted(data.draw(st.sets(st.sampled_from(ends), max_size=3))) if ends else []
    sizes = [stop - start for start, stop in zip([0, *at], [*at, spec.in_features], strict=True)]
    pieces = q.split(sizes, 1)
    joined = torch.cat(pieces, -1)
    assert isinstance(joined, NF4Tensor)
    assert_same(joined, q)
    if all(piece.spec.block_size == spec.block_size for piece in pieces):
        assert joined.spec == spec
        assert torch.equal(joined.record, q.record)


@PROPERTY
@given(data=st.data(), spec=specs(), kinds=kinds(), seed=seeds)
def test_any_join_is_right_or_refused(data, spec, kinds, seed):
    """Pieces of two weights, zero rows among them, in any order: the oracle decides."""
    q, start, stop = rows_and_cut(data, spec, kinds, seed)
    other = quantized(spec, make_rows(spec, kinds[::-1], 2, seed // 2, torch.float32))
    source = data.draw(st.sampled_from([q, q, other, q.new_zeros(2, spec.in_features)]))
    _, from_, to = rows_and_cut(data, spec, kinds, seed)
    left, right = q[:, start:stop], source[:, from_:to]
    if data.draw(st.booleans()):
        left = left.new_zeros(left.shape)
    rows = [
        oracle_columns.join(one, left.spec, two, right.spec)
        for one, two in zip(records_of(left.record), records_of(right.record), strict=True)
    ]
    if None in rows:
        with pytest.raises(SpecError, match=r"dequantize\(\)"):
            torch.cat([left, right], 1)
        return
    joined = torch.cat([left, right], 1)
    assert records_of(joined.record) == [row for row, _ in rows]
    assert Spec.of(joined.spec) == rows[0][1]
    assert_same(joined, torch.cat([left.dequantize(), right.dequantize()], 1))


def test_strides_and_leading_dimensions_of_cuts():
    q = make(4, 6, 96)
    d = q.dequantize()
    for cut in (
        lambda w: w[..., 32:],
        lambda w: w[1, 2, 16:32],
        lambda w: w[:, ::2, :32],
        lambda w: w.transpose(0, 1)[..., :48],
        lambda w: w.narrow(-1, 48, 48),
        lambda w: w.view(2, 2, 6, 96)[..., 16:],
        lambda w: w[0][:, 16:],
        lambda w: w[:0, :, :16],
        lambda w: w[..., -16:],
    ):
        found = cut(q)
        assert isinstance(found, NF4Tensor)
        assert found.is_contiguous()
        assert_same(found, cut(d))


@pytest.mark.parametrize(
    "split",
    [
        lambda w: w.chunk(3, -1),
        lambda w: w.chunk(2, 1),
        lambda w: w.split(32, 1),
        lambda w: w.split([16, 80], -1),
        lambda w: torch.tensor_split(w, 3, dim=1),
        lambda w: torch.hsplit(w, 2),
        lambda w: w.split(96, 1),
        lambda w: w.chunk(1, 1),
    ],
)
def test_splits_into_legal_cuts(split):
    q = make(5, 96)
    found, expected = split(q), split(q.dequantize())
    assert len(found) == len(expected)
    for piece, expected_piece in zip(found, expected, strict=True):
        assert isinstance(piece, NF4Tensor)
        assert_same(piece, expected_piece)
    assert torch.equal(torch.cat(found, 1).dequantize(), q.dequantize())


@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w[:, :5],
        lambda w: w[:, 8:],
        lambda w: w[:, 16:40],
        lambda w: w[:, 95:],
        lambda w: w[:, 5:5],
        lambda w: w[:, ::2],
        lambda w: w[:, 3],
        lambda w: w[1, 3],
        lambda w: w[1][16:17],
        lambda w: w.chunk(5, 1)[1],
        lambda w: w.unbind(1)[2],
        lambda w: w.select(1, 2),
        lambda w: w.index_select(1, torch.tensor([3, 1])),
        lambda w: w.split([10, 86], 1)[0],
        lambda w: w.t()[3],
        lambda w: w.t()[16:32],
    ],
)
def test_other_cuts_are_decoded_and_say_so(cut):
    q = make(5, 96)
    with pytest.warns(NF4TensorWarning, match="decodes an NF4Tensor"):
        found = cut(q)
    assert not isinstance(found, NF4Tensor)
    assert_same(found, cut(q.dequantize()))


def test_pieces_of_a_split_are_records_where_they_can_be():
    q = make(5, 100)
    with pytest.warns(NF4TensorWarning, match="not on multiples of 16"):
        legal, dense_piece, last = q.split([16, 16 + 4, 64], 1)
    assert isinstance(legal, NF4Tensor)
    assert type(dense_piece) is type(last) is DecodedView
    assert_same(torch.cat([legal.dequantize(), dense_piece, last], 1), q)


def test_all_columns_are_the_weight_itself():
    q = make(5, 96)
    for whole in (q[:, :], q[:, 0:96], q[..., :200], q.narrow(1, 0, 96)):
        assert whole.data_ptr() == q.data_ptr()
        whole.zero_()
        assert not q.dequantize().any()
        q.copy_(make(5, 96))


def test_cuts_multiply_like_the_whole():
    q, x = make(40, 96), dense(3, 96, seed=1)
    parts = [F.linear(x[:, s], q[:, s]) for s in (slice(0, 48), slice(48, 96))]
    torch.testing.assert_close(sum(parts), F.linear(x, q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (make(5, 96), make(5, 96)),
        (make(5, 96)[:, :48], make(5, 96, seed=1)[:, 48:]),
        (make(5, 96)[:, 48:], make(5, 96)[:, :48]),
        (make(5, 96)[:, :48], make(5, 96)[:, :48]),
        (make(5, 96)[:, :48], make(5, 96, quant_type="fp4")[:, 48:]),
        (make(5, 96)[:, :48], make(5, 96, scale_block_size=None)[:, 48:]),
        (make(5, 96)[:, :48], make(5, 96, scale_block_size=1)[:, 48:]),
        (make(5, 20), make(5, 96)),
        (make(5, 3, scale_block_size=None), make(5, 96, scale_block_size=None)),
    ],
)
def test_joins_that_do_not_fit_are_refused(left, right):
    with pytest.raises(SpecError, match=r"joined.*dequantize\(\)|dequantize\(\).*joined"):
        torch.cat([left, right], 1)
    expected = torch.cat([left.dequantize(), right.dequantize()], 1)
    assert expected.shape == (5, left.shape[1] + right.shape[1])


def test_whole_weights_of_float_scales_join():
    left, right = (make(5, n, seed=n, scale_block_size=None) for n in (64, 33))
    joined = torch.cat([left, right], 1)
    assert isinstance(joined, NF4Tensor)
    assert_same(joined, torch.cat([left.dequantize(), right.dequantize()], 1))


def test_zero_rows_join_anything_that_fits():
    q = make(5, 96)
    zeros = q.new_zeros(5, 96)
    for left, right in ((q[:, :48], zeros[:, 48:]), (zeros[:, :48], q[:, 48:])):
        assert_same(
            torch.cat([left, right], 1), torch.cat([left.dequantize(), right.dequantize()], 1)
        )


def test_rows_of_zero_scales_that_are_no_zero_rows_keep_their_values():
    """Imported rows may have zero pairs under any code, which decode to -0.0 too."""
    left = make_dynamic8(2)[:, :32].clone()
    assert left.dequantize().signbit().all()  # code 0, whose level is -1, times a scale of 0
    right = make_dynamic8(2)[:, 32:].clone()
    right.record[:, right.spec.segments_offset_bytes + 8] = 1
    with pytest.raises(SpecError, match="2 of 2 rows cannot be joined"):
        torch.cat([left, right], 1)


def test_one_row_and_no_rows():
    q = make(96)
    assert_same(torch.cat([q[:48], q[48:]]), q)
    empty = make(0, 96)
    assert torch.cat([empty[:, :48], empty[:, 48:]], 1).shape == (0, 96)


def test_a_record_of_the_oracle_is_cut_as_the_oracle_cuts():
    """Phases inside of a segment, and blocks that a cut makes smaller."""
    q = to_nf4(dense(3, 1000, seed=2), 64, 3)
    for start, stop in ((16, 1000), (64, 992), (192, 256), (976, 1000)):
        rows = [oracle_columns.cut(row, q.spec, start, stop) for row in records_of(q.record)]
        cut = q[:, start:stop]
        assert torch.equal(cut.record, to_record([row for row, _ in rows]))
        again = [oracle_columns.cut(row, spec, 0, 8 * 2) for row, spec in rows]
        assert torch.equal(cut[:, :16].record, to_record([row for row, _ in again]))
