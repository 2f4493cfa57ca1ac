"""The compiled kernels: the reference's bits in every geometry, layout and number of threads.

What a record means is tested against the oracle in test_reference.py, through the same ops. The
products are tested in test_products.py.
"""

import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops, reference
from tests.kernels.compiled import (
    assert_same_bits,
    layouts,
    make_record,
    make_weight,
    needs_compiled,
)
from tests.strategies import DTYPES, QUANT_TYPES

pytestmark = [needs_compiled, pytest.mark.usefixtures("isa")]

# 16 elements a block and 3 scales a segment: every border there is, in a few hundred columns.
GEOMETRIES = [
    (block_size, scale_block_size)
    for block_size in (16, 64, 4096)
    for scale_block_size in (None, 3, 256)
]


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize(("block_size", "scale_block_size"), GEOMETRIES)
def test_every_width(block_size, scale_block_size, quant_type):
    for in_features in range(1, 301):
        spec = NF4Spec.for_weight(in_features, block_size, scale_block_size, quant_type)
        weight = make_weight((2,), in_features, DTYPES[in_features % 3])
        record = ops.quantize(weight, spec)
        assert torch.equal(record, reference.quantize(weight, spec)), in_features
        for dtype in DTYPES:
            expected = reference.dequantize(record, spec, dtype)
            assert_same_bits(ops.dequantize(record, spec, dtype), expected)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale_kind", ["float32", "square8", "dynamic8"])
def test_any_record_decodes(scale_kind, quant_type):
    for in_features in range(1, 300, 7):
        segments = (0, 0) if scale_kind == "float32" else (1 + in_features % 9, 21)
        spec = NF4Spec(in_features, 16, scale_kind, *segments, quant_type)
        record = make_record((3,), spec, in_features)
        for dtype in DTYPES:
            expected = reference.dequantize(record, spec, dtype)
            assert_same_bits(ops.dequantize(record, spec, dtype), expected)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_writing_over_rows_keeps_their_phases(quant_type):
    for in_features in range(1, 300, 7):
        spec = NF4Spec(in_features, 16, "square8", 1 + in_features % 9, 21, quant_type)
        weight = make_weight((3,), in_features, DTYPES[in_features % 3])
        record = make_record((3,), spec, in_features)
        expected = record.clone()
        reference.quantize_into(weight, spec, expected)
        ops.quantize_into(weight, spec, record)
        assert torch.equal(record, expected), in_features


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("in_features", [16, 576, 4100])
def test_threads(threads, rows, in_features):
    spec = NF4Spec.for_weight(in_features)
    weight = make_weight((rows,), in_features, torch.bfloat16)
    record = ops.quantize(weight, spec)
    assert torch.equal(record, reference.quantize(weight, spec))
    expected = reference.dequantize(record, spec, torch.bfloat16)
    assert_same_bits(ops.dequantize(record, spec, torch.bfloat16), expected)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0, 3), (1, 2, 1, 2)])
def test_leading_dimensions(lead):
    spec = NF4Spec.for_weight(80, 32, 2)
    weight = make_weight(lead, 80, torch.float16)
    record = ops.quantize(weight, spec)
    assert record.shape == (*lead, spec.pitch)
    assert torch.equal(record, reference.quantize(weight, spec))
    out = torch.empty_like(weight)
    ops.quantize_into(weight, spec, record)
    ops.dequantize_into(record, spec, out)
    assert_same_bits(out, reference.dequantize(record, spec, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_block_size", [None, 2])
def test_layouts(scale_block_size, dtype):
    """No base address is aligned, and no stride matters, of inputs and outputs alike."""
    spec = NF4Spec.for_weight(65, 16, scale_block_size)
    weight = make_weight((3, 4), 65, dtype)
    record = reference.quantize(weight, spec)
    expected = reference.dequantize(record, spec, dtype)
    for view in layouts(weight):
        assert torch.equal(ops.quantize(view, spec), record)
        for target in layouts(torch.zeros_like(record)):
            ops.quantize_into(view, spec, target)
            assert torch.equal(target, record)
    for view in layouts(record):
        assert_same_bits(ops.dequantize(view, spec, dtype), expected)
        for out in layouts(torch.zeros_like(weight)):
            assert_same_bits(ops.dequantize_into(view, spec, out), expected)


def test_views_write_only_their_own_bytes():
    spec = NF4Spec.for_weight(33, 16)
    record = torch.full((5, spec.pitch + 2), 171, dtype=torch.uint8)
    weight = make_weight((2,), 33, torch.float32)
    ops.quantize_into(weight, spec, record[1:3, 1:-1])
    out = torch.full((4, 35), 3.0)
    ops.dequantize_into(record[1:3, 1:-1], spec, out[1:3, 1:-1])
    assert set(record[[0, 3, 4]].flatten().tolist()) == {171}
    assert set(record[:, [0, -1]].flatten().tolist()) == {171}
    assert set(out[[0, 3]].flatten().tolist()) == set(out[:, [0, -1]].flatten().tolist()) == {3.0}


def test_a_phase_beyond_the_segments_stays_inside_the_row():
    """File readers refuse it; the kernels must not read past the row."""
    spec = NF4Spec(80, 16, "square8", 2, 3)
    record = make_record((1,), spec)
    start = spec.segments_offset_bytes
    for phase in (2, 5, 2**32 - 1):
        record[0, start : start + 8] = torch.tensor([phase]).view(torch.uint8)
        expected = reference.dequantize(record, spec, torch.float32)
        assert_same_bits(ops.dequantize(record, spec, torch.float32), expected)


def test_grad_mode_and_output_that_requires_grad():
    """Copies between layouts leave no graph behind, and the caller's grad mode alone."""
    spec = NF4Spec.for_weight(32)
    weight = torch.randn(32, 4).requires_grad_().t()
    record = ops.quantize(weight, spec)
    assert torch.equal(record, reference.quantize(weight.detach(), spec))
    assert torch.is_grad_enabled()
    out = torch.zeros(32, 4).t().requires_grad_()
    ops.dequantize_into(record, spec, out)
    assert_same_bits(out.detach(), reference.dequantize(record, spec, torch.float32))
