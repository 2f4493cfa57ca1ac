"""The reference, and the ops over it, against the written specification, bit for bit.

The oracle is `tests/oracle.py`. The ops run whatever backend this machine has, so that these tests
hold a compiled one to the same bits.
"""

import math
import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops, reference
from tests import oracle, oracle_columns
from tests.oracle_tensors import bits_of, decode, records_of, to_record
from tests.strategies import (
    DTYPES,
    FINITE_KINDS,
    NON_FINITE_KINDS,
    PROPERTY,
    QUANT_TYPES,
    kinds,
    make_rows,
    seeds,
    specs,
)

dtypes = st.sampled_from(DTYPES)
both = pytest.mark.parametrize("kernels", [reference, ops], ids=["reference", "ops"])

any_rows = given(
    spec=specs(),
    kinds=kinds(FINITE_KINDS + NON_FINITE_KINDS),
    num_rows=st.integers(1, 3),
    seed=seeds,
    dtype=dtypes,
)


@both
@PROPERTY
@any_rows
def test_quantize_is_clause_5(kernels, spec, kinds, num_rows, seed, dtype):
    weight = make_rows(spec, kinds, num_rows, seed, dtype)
    record = kernels.quantize(weight, spec)
    assert records_of(record) == oracle.quantize(weight.float().tolist(), spec)


@both
@PROPERTY
@any_rows
def test_dequantize_is_clause_6(kernels, spec, kinds, num_rows, seed, dtype):
    record = kernels.quantize(make_rows(spec, kinds, num_rows, seed, torch.float32), spec)
    decoded = kernels.dequantize(record, spec, dtype)
    assert decoded.dtype == dtype
    assert bits_of(decoded) == decode(records_of(record), spec, dtype)


@st.composite
def imported(draw: st.DrawFn) -> tuple[oracle.Spec, bytes]:
    """Draw a record that no quantizer makes: any code, any q, any pair, any legal phase."""
    spec = draw(specs(scale_block_sizes=(None, 1, 2, 3)))
    kind = (
        "float32"
        if spec.scale_kind == "float32"
        else draw(st.sampled_from(["square8", "dynamic8"]))
    )
    extra = 0 if kind == "float32" else draw(st.integers(0, 2))
    spec = oracle.Spec.of(spec)._replace(scale_kind=kind, num_segments=spec.num_segments + extra)
    generator = random.Random(draw(seeds))
    number = oracle.from_bits(generator.getrandbits(32))
    numbers = [oracle.fl(generator.gauss(0, 1)) for _ in range(30)] + [number, 0.0, -1.0]
    pairs = [
        (generator.choice(numbers), generator.choice(numbers)) for _ in range(spec.num_segments)
    ]
    q = [generator.randrange(256) for _ in range(spec.blocks)]
    plain = [generator.choice(numbers) for _ in range(spec.blocks)]
    room = spec.num_segments * spec.segment_length - spec.blocks
    codes = [generator.randrange(16) for _ in range(spec.in_features + spec.in_features % 2)]
    parts = oracle.Parts(
        codes, plain if kind == "float32" else q, generator.randint(0, max(room, 0)), pairs
    )
    return spec, oracle.assemble(parts, spec)


@both
@PROPERTY
@given(row=imported(), dtype=dtypes)
def test_any_legal_record_decodes(kernels, row, dtype):
    spec, record = row
    decoded = kernels.dequantize(to_record([record]), NF4Spec(*spec), dtype)
    assert bits_of(decoded) == decode([record], spec, dtype)


@both
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_square_roots_are_correctly_rounded(kernels, quant_type):
    """Clause 5.8 where it is hardest: absmax values at and beside every tie of `rint`."""
    # base 1 and step 1/4, so that all but the root is exact.
    steps = [(k + 0.5) ** 2 + near * 2.0**-8 for k in range(255) for near in (-2, -1, 0, 1, 2)]
    absmax = [1.0, 1 + 65025 / 4, *(1 + each / 4 for each in steps)]
    spec = NF4Spec.for_weight(16 * len(absmax), 16, len(absmax), quant_type)
    assert spec.num_segments == 1
    row = [each for each in absmax for _ in range(16)]
    record = records_of(kernels.quantize(torch.tensor([row]), spec))[0]
    expected = [
        min(round(oracle.fl(math.sqrt(oracle.fl((each - 1) / 0.25)))), 255) for each in absmax
    ]
    assert oracle.take_apart(record, oracle.Spec.of(spec)).scales == expected


@both
@pytest.mark.parametrize("num_segments", [1, 3])
def test_square_roots_of_random_scales(kernels, num_segments):
    spec = NF4Spec.for_weight(16 * 600 * num_segments, 16, 600)
    weight = torch.randn(2, spec.in_features, generator=torch.Generator().manual_seed(0)).exp()
    record = kernels.quantize(weight, spec)
    absmax = weight.unflatten(-1, (-1, 16)).amax(-1)
    for row, row_absmax in zip(records_of(record), absmax.tolist(), strict=True):
        parts = oracle.take_apart(row, oracle.Spec.of(spec))
        fits = [oracle.fit_square8(row_absmax[i : i + 600]) for i in range(0, len(row_absmax), 600)]
        assert parts.pairs == [pair for _, pair in fits]
        assert parts.scales == [q for segment, _ in fits for q in segment]


# Named edges


@both
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale_block_size", [None, 256])
@pytest.mark.parametrize("kind", FINITE_KINDS + NON_FINITE_KINDS)
@pytest.mark.parametrize("in_features", [1, 65, 128])
def test_blocks_of_one_kind(kernels, quant_type, scale_block_size, kind, in_features):
    spec = NF4Spec.for_weight(in_features, 64, scale_block_size, quant_type)
    weight = make_rows(spec, [kind], 2, 7, torch.float32)
    record = kernels.quantize(weight, spec)
    assert records_of(record) == oracle.quantize(weight.tolist(), spec)
    decoded = kernels.dequantize(record, spec, torch.float32)
    if kind in NON_FINITE_KINDS:
        assert decoded.isnan().any(-1).all()
    if "zero" in kind:
        assert records_of(record) == [oracle.zero_row(spec)] * 2
        assert bits_of(decoded) == [[0] * in_features] * 2


@both
def test_step_is_lowered_where_the_largest_scale_would_overflow(kernels):
    """Clause 5.7 on two blocks: without it the second decodes to infinity."""
    largest = oracle.from_bits(0x7F7FFFFF)
    spec = NF4Spec.for_weight(32, 16)
    lowered = 0
    for smallest in (2.0**120 * (1 + i / 1024) for i in range(200)):
        step = oracle.fl(oracle.fl(largest - smallest) / 65025)
        lowered += math.isinf(oracle.fl(oracle.fl(65025 * step) + smallest))
        row = [[smallest] * 16 + [-largest] * 16]
        record = kernels.quantize(torch.tensor(row), spec)
        assert records_of(record) == oracle.quantize(row, spec)
        assert kernels.dequantize(record, spec, torch.float32).isfinite().all()
    assert lowered > 10


def test_zero_block_beside_an_outlier_stays_zero():
    spec = NF4Spec.for_weight(128)
    weight = torch.zeros(1, 128)
    weight[0, 100] = 1e6
    decoded = reference.dequantize(reference.quantize(weight, spec), spec, torch.float32)
    assert bits_of(decoded[:, :64]) == [[0] * 64]
    assert decoded[0, 100] == pytest.approx(1e6, rel=2.0**-22)


@both
@pytest.mark.parametrize("place", [0, 40, 64])
def test_nan_reaches_its_segment_only(kernels, place):
    """Clauses 7.3 and 7.4: bits of the scale, and the other segment untouched."""
    spec = NF4Spec.for_weight(96, 16, 2)
    weight = torch.linspace(-1, 1, 96)[None].clone()
    clean = records_of(kernels.quantize(weight, spec))[0]
    weight[0, place] = torch.nan
    record = records_of(kernels.quantize(weight, spec))[0]
    parts = oracle.take_apart(record, oracle.Spec.of(spec))
    kept = oracle.take_apart(clean, oracle.Spec.of(spec))
    segment = place // 32
    at = spec.segments_offset_bytes + 8 + 8 * segment
    assert struct.unpack_from("<II", record, at) == (0x7FC00000, 0x7FC00000)
    assert parts.scales[2 * segment : 2 * segment + 2] == [0, 0]
    for block in range(6):
        codes = slice(16 * block, 16 * block + 16)
        expected = [7] * 16 if block == place // 16 else kept.codes[codes]
        assert parts.codes[codes] == expected
        if block // 2 != segment:
            assert parts.scales[block] == kept.scales[block]
            assert parts.pairs[block // 2] == kept.pairs[block // 2]


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale_block_size", [None, 256])
def test_zero_record_is_clause_7_2(quant_type, scale_block_size):
    spec = NF4Spec.for_weight(65, 64, scale_block_size, quant_type)
    record = reference.zero_record((2, 3), spec, torch.device("cpu"))
    assert record.shape == (2, 3, spec.pitch)
    assert records_of(record) == [oracle.zero_row(spec)] * 6
    assert bits_of(reference.dequantize(record, spec, torch.bfloat16)) == [[0] * 65] * 6


@both
@pytest.mark.parametrize("lead", [(), (0,), (1,), (3,), (2, 3), (2, 0, 3), (1, 2, 2)])
def test_leading_dimensions(kernels, lead):
    spec = NF4Spec.for_weight(80, 32, 2)
    weight = torch.randn(*lead, 80, generator=torch.Generator().manual_seed(1))
    record = kernels.quantize(weight, spec)
    assert record.shape == (*lead, spec.pitch)
    assert records_of(record) == oracle.quantize(weight.reshape(-1, 80).tolist(), spec)
    assert kernels.dequantize(record, spec, torch.float16).shape == (*lead, 80)


@both
def test_strides_of_the_weight_do_not_matter(kernels):
    spec = NF4Spec.for_weight(48, 16)
    base = torch.randn(96, 40, generator=torch.Generator().manual_seed(2))
    for weight in (base[:48].t(), base[::2].t(), base.t()[:, 7:55], base[:48, 3].expand(5, 48)):
        assert torch.equal(
            kernels.quantize(weight, spec), kernels.quantize(weight.contiguous(), spec)
        )


@both
def test_strides_of_the_record_and_of_the_output_do_not_matter(kernels):
    spec = NF4Spec.for_weight(48, 16)
    record = kernels.quantize(torch.randn(6, 48, generator=torch.Generator().manual_seed(3)), spec)
    expected = kernels.dequantize(record, spec, torch.bfloat16)
    padded = torch.zeros(12, spec.pitch + 3, dtype=torch.uint8)
    padded[::2, 3:] = record
    out = torch.zeros(48, 6, dtype=torch.bfloat16).t()
    kernels.dequantize_into(padded[::2, 3:], spec, out)
    assert torch.equal(out, expected)


def test_unused_nibble_may_hold_anything():
    spec = NF4Spec.for_weight(17, 16)
    record = reference.quantize(torch.linspace(-1, 1, 17)[None], spec)
    assert record[0, 8] & 15 == 7
    expected = reference.dequantize(record, spec, torch.float32)
    record[0, 8] ^= 15
    assert torch.equal(reference.dequantize(record, spec, torch.float32), expected)


def test_spec_of_another_block_size_reads_the_same_bytes_after_a_cut():
    """The oracle's cut decodes here to the same weights: clause 8.6 through the reference."""
    spec = NF4Spec.for_weight(200, 64, 2)
    weight = torch.randn(1, 200, generator=torch.Generator().manual_seed(4))
    record = reference.quantize(weight, spec)
    expected = reference.dequantize(record, spec, torch.float32)
    for start, stop in ((0, 64), (16, 200), (128, 176), (192, 200)):
        row, cut_spec = oracle_columns.cut(records_of(record)[0], spec, start, stop)
        cut = NF4Spec(*cut_spec)
        decoded = reference.dequantize(to_record([row]), cut, torch.float32)
        assert torch.equal(decoded, expected[:, start:stop])
