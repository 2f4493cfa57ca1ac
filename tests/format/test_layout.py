"""Cuts and joins as geometry, against the oracle; that bytes follow is tested with the oracle.

`oracle_columns.py` cuts real records, so its specs come from another reading of clauses 8 and 9.
"""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nf4tensor.errors import SpecError
from nf4tensor.format import layout
from nf4tensor.format.spec import NF4Spec
from tests import oracle, oracle_columns
from tests.strategies import PROPERTY, specs


def random_row(spec: NF4Spec, seed: int) -> bytes:
    """Return a quantized row in which every block has another scale."""
    generator = random.Random(seed)
    row = [oracle.fl(generator.gauss(0, 1)) for _ in range(spec.in_features)]
    return oracle.quantize([row], spec)[0]


@st.composite
def cuts(draw: st.DrawFn, spec: NF4Spec) -> tuple[int, int]:
    """Draw the ends of a legal cut."""
    ends = sorted({*range(0, spec.in_features, 16), spec.in_features})
    start = draw(st.sampled_from(ends[:-1]))
    return start, draw(st.sampled_from([end for end in ends if end > start]))


@PROPERTY
@given(data=st.data(), spec=specs(), seed=st.integers(0, 2**32))
def test_cut_is_clause_8(data, spec, seed):
    start, stop = data.draw(cuts(spec))
    record = random_row(spec, seed)
    cut = layout.cut(spec, start, stop)
    cut_record, cut_spec = oracle_columns.cut(record, spec, start, stop)
    assert oracle.Spec.of(cut.spec) == cut_spec
    assert cut.repeats == spec.block_size // cut_spec.block_size
    assert cut.first_block == start // cut_spec.block_size
    assert oracle.dequantize(cut_record, cut_spec) == oracle.dequantize(record, spec)[start:stop]


@PROPERTY
@given(data=st.data(), spec=specs(), seed=st.integers(0, 2**32))
def test_cut_of_a_cut_is_a_cut(data, spec, seed):
    start, stop = data.draw(cuts(spec))
    inner_start, inner_stop = data.draw(cuts(layout.cut(spec, start, stop).spec))
    twice = layout.cut(layout.cut(spec, start, stop).spec, inner_start, inner_stop).spec
    once = layout.cut(spec, start + inner_start, start + inner_stop).spec
    # The block size of the outer cut may have been smaller; nothing else may differ.
    assert layout.with_block_size(once, twice.block_size) == twice


@PROPERTY
@given(data=st.data(), spec=specs(), seed=st.integers(0, 2**32))
def test_join_of_two_cuts_is_clause_9_6(data, spec, seed):
    middles = range(16, spec.in_features, 16)
    assume(middles)
    middle = data.draw(st.sampled_from(middles))
    record = random_row(spec, seed)
    left, left_spec = oracle_columns.cut(record, spec, 0, middle)
    right, right_spec = oracle_columns.cut(record, spec, middle, spec.in_features)
    joined = layout.join(
        layout.cut(spec, 0, middle).spec, layout.cut(spec, middle, spec.in_features).spec
    )
    joined_record, joined_spec = oracle_columns.join(left, left_spec, right, right_spec)
    assert oracle.Spec.of(joined) == joined_spec
    assert oracle.dequantize(joined_record, joined_spec) == oracle.dequantize(record, spec)
    if middle % spec.block_size == 0:
        assert joined == spec
        assert joined_record == record


@pytest.mark.parametrize(
    ("start", "stop", "block_size", "phase"),
    [
        (0, 1000, 256, 0),
        (0, 512, 256, 0),
        (512, 1000, 256, 2),
        (64, 1000, 64, 1),
        (0, 64, 64, 0),
        (256, 288, 32, 8),
        (16, 1000, 16, 1),
        (992, 1000, 32, 31),
    ],
)
def test_cut_has_the_largest_block_size_that_fits(start, stop, block_size, phase):
    spec = NF4Spec(1000, 256, "square8", 4, 1)
    cut = layout.cut(spec, start, stop)
    repeats = 256 // block_size
    assert cut == layout.Cut(
        NF4Spec(stop - start, block_size, "square8", 4 * repeats, 1), repeats, phase
    )


@pytest.mark.parametrize(
    ("start", "stop"), [(8, 64), (0, 40), (16, 99), (-16, 64), (64, 64), (64, 32), (0, 101)]
)
def test_other_cuts_are_refused(start, stop):
    spec = NF4Spec.for_weight(100)
    assert not layout.is_legal_cut(spec, start, stop)
    with pytest.raises(
        SpecError, match=f"columns {start} to {stop} of 100 cannot be cut"
    ) as caught:
        layout.cut(spec, start, stop)
    assert "dequantize()" in str(caught.value)


def test_the_rows_own_end_is_always_legal():
    spec = NF4Spec.for_weight(99)
    assert layout.is_legal_cut(spec, 0, 99)
    assert layout.is_legal_cut(spec, 96, 99)
    assert layout.cut(spec, 0, 99).spec == spec


def test_join_needs_a_boundary_at_a_multiple_of_16():
    spec = NF4Spec.for_weight(100)
    with pytest.raises(SpecError, match="cannot be joined at 100, which is not a multiple of 16"):
        layout.join(spec, spec)


@pytest.mark.parametrize(
    "right",
    [
        NF4Spec.for_weight(128, 64, None),
        NF4Spec.for_weight(128, 64, 256, "fp4"),
        NF4Spec.for_weight(256),
        NF4Spec(128, 64, "square8", 2, 2),
        NF4Spec(128, 64, "dynamic8", 2, 1),
        NF4Spec.for_weight(128, 32, 2),
    ],
)
def test_join_of_other_geometry_is_refused(right):
    with pytest.raises(SpecError, match="of different geometry cannot be joined"):
        layout.join(NF4Spec.for_weight(128), right)


def test_join_takes_the_smaller_block_size():
    left, right = NF4Spec(128, 64, "square8", 4, 1), NF4Spec(96, 32, "square8", 8, 1)
    assert layout.join(left, right) == NF4Spec(224, 32, "square8", 8, 1)
    assert layout.join(right, left) == NF4Spec(224, 32, "square8", 8, 1)


def test_with_block_size_keeps_what_segments_cover():
    spec = NF4Spec.for_weight(1000, 256, 2)
    fine = layout.with_block_size(spec, 16)
    assert (fine.block_size, fine.segment_length, fine.num_segments) == (16, 32, 2)
    assert layout.with_block_size(spec, 256) == spec


def test_zero_rows_join_where_the_segments_reach():
    """Clauses 9.4 and 9.5, in the oracle: the tensor is tested against it."""
    spec = oracle.Spec(64, 16, "square8", 4, 2, "nf4")
    row_spec = spec._replace(num_segments=1)
    parts = oracle.take_apart(random_row(row_spec, 0), row_spec)
    # The right half of a row of two segments, beside a left half of zeros.
    wide = oracle.assemble(parts._replace(phase=4, pairs=[(0.0, 0.0), *parts.pairs]), spec)
    zero = oracle.zero_row(spec)
    joined, joined_spec = oracle_columns.join(zero, spec, wide, spec)
    assert oracle.take_apart(joined, joined_spec).phase == 0
    weights = oracle.dequantize(joined, joined_spec)
    assert weights == [0] * 64 + oracle.dequantize(wide, spec)
    assert oracle_columns.join(wide, spec, zero, spec) is None
    assert oracle_columns.join(zero, spec, zero, spec)[0] == oracle.zero_row(joined_spec)
