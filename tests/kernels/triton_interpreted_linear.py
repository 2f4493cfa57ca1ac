"""The Triton kernel that multiplies, under Triton's interpreter: which weights, and their sums.

Run by test_triton.py in a process of its own, since the interpreter must be chosen before Triton
is imported.
"""

import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import reference, triton_backend, triton_linear
from tests import bounds
from tests.kernels.compiled import (
    assert_same_bits,
    before_a_wall,
    layouts,
    make_finite_record,
)
from tests.kernels.test_products import (
    SCALE_KINDS,
    assert_same_kinds,
    assert_within,
    dense,
    make_spec,
)
from tests.strategies import DTYPES

HALVES = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("triton_interpreter")

# One-hot inputs: a product is one weight, and all others times zero. -0.0 comes out as
# +0.0, since -0.0 + 0.0 is +0.0.


def assert_extracted(record: torch.Tensor, spec: NF4Spec, columns: torch.Tensor, dtype) -> None:
    inputs = torch.zeros(columns.numel(), spec.in_features, dtype=dtype)
    inputs[range(columns.numel()), columns] = 1
    expected = (reference.dequantize(record, spec, dtype) + 0.0).t()[columns]
    assert_same_bits(triton_backend.linear(inputs, record, spec), expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale_kind", SCALE_KINDS)
def test_one_hot_inputs_extract_the_weight(scale_kind, dtype):
    cases = ((16, 49, "nf4"), (32, 95, "fp4"), (64, 191, "nf4"), (4096, 577, "nf4"))
    for num_inputs, (block_size, in_features, quant_type) in zip(
        (1, 17, 32, 33), cases, strict=True
    ):
        spec = make_spec(in_features, block_size, scale_kind, quant_type)
        record = make_finite_record((19,), spec, in_features)
        columns = torch.randperm(in_features, generator=torch.Generator().manual_seed(0))
        assert_extracted(record, spec, columns[:num_inputs], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_one_hot_inputs_extract_all_of_it(block_size, dtype):
    for in_features in (576, 600):
        spec = NF4Spec.for_weight(in_features, block_size)
        record = make_finite_record((17,), spec)
        for columns in torch.arange(in_features).split(32):
            assert_extracted(record, spec, columns, dtype)


def check_products(num_inputs: int, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """Compare one geometry with float64."""
    spec = make_spec(width)
    record = reference.quantize(dense(num_rows, width, seed=width), spec)
    weight = reference.dequantize(record, spec, dtype).double()
    x, bias = dense(num_inputs, width, dtype=dtype), dense(num_rows, dtype=dtype, seed=1)
    exact, magnitudes = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    assert_within(triton_backend.linear(x, record, spec), exact, magnitudes, width)
    exact, magnitudes = exact + bias.double(), magnitudes + bias.double().abs()
    assert_within(triton_backend.linear(x, record, spec, bias), exact, magnitudes, width + 1)


@pytest.mark.parametrize("dtype", HALVES)
def test_products(dtype):
    for size in ((1, 1, 1), (17, 15, 65), (16, 17, 512), (32, 7, 1100)):
        check_products(*size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [1, 16, 17, 32, 33])
def test_products_around_every_border(num_inputs, dtype):
    for width in (1, 16, 63, 64, 65, 511, 512, 513, 1100):
        for num_rows in (1, 16, 17):
            check_products(num_inputs, num_rows, width, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_inputs", [20])
def test_nan_and_infinity_stay_in_their_rows_and_columns(num_inputs, dtype):
    for width, num_rows in ((69, 11), (576, 17)):
        for value in (torch.nan, torch.inf, -torch.inf):
            spec = make_spec(width, 64, "float32")
            record = reference.quantize(dense(num_rows, width), spec)
            x, bias = dense(num_inputs, width, dtype=dtype), torch.zeros(num_rows, dtype=dtype)
            x[num_inputs // 2, 68] = bias[3] = value
            start = spec.scales_offset_bytes + 4  # of the second block of a row
            record[5, start : start + 4] = torch.tensor([value]).view(torch.uint8)
            weight = reference.dequantize(record, spec, dtype)
            weight[5, 64:128] = torch.nan
            found = triton_backend.linear(x, record, spec, bias)
            assert_same_kinds(found, x, weight.t(), bias)


@pytest.mark.parametrize("width", [70, 576])
def test_an_infinite_scale_at_the_end_of_a_row(width):
    """What the last step decodes behind that end, times nothing, must not be NaN."""
    spec = NF4Spec.for_weight(width, 64, None)
    record = reference.quantize(torch.ones(1, width), spec)
    end = spec.scales_offset_bytes + spec.scales_bytes
    record[0, end - 4 : end] = torch.tensor([torch.inf]).view(torch.uint8)
    x = torch.ones(1, width, dtype=torch.bfloat16)
    assert triton_backend.linear(x, record, spec).item() == torch.inf


def test_nothing_behind_the_operands_is_read():
    for width, num_inputs, num_rows in ((64, 1, 1), (577, 3, 5), (1024, 17, 17)):
        spec = make_spec(width)
        operands = (
            reference.quantize(dense(num_rows, width), spec),
            *(dense(*shape, dtype=torch.bfloat16) for shape in ((num_inputs, width), (num_rows,))),
        )
        record, x, bias = (before_a_wall(operand) for operand in operands)
        assert triton_backend.linear(x, record, spec, bias).isfinite().all()


@pytest.mark.parametrize("shape", [(80,), (2, 3, 80), (0, 80), (2, 0, 80)])
def test_shapes_of_inputs(shape):
    spec = make_spec(80)
    x = dense(*shape, dtype=torch.bfloat16)
    for num_rows in (0, 6):
        record = reference.quantize(dense(num_rows, 80), spec)
        expected = torch.nn.functional.linear(x, reference.dequantize(record, spec, x.dtype))
        found = triton_backend.linear(x, record, spec)
        assert found.shape == expected.shape
        magnitudes = torch.full_like(expected, 80.0, dtype=torch.float64)
        bound = bounds.products_bound(magnitudes, 80, x.dtype)
        assert ((found.double() - expected.double()).abs() <= bound).all()


def test_layouts_of_products():
    spec = make_spec(192)
    record, x = reference.quantize(dense(7, 192), spec), dense(3, 192, dtype=torch.bfloat16)
    bias = dense(7, dtype=torch.bfloat16)
    expected = triton_backend.linear(x, record, spec, bias)
    strided = bias.repeat(2, 1).t()[:, 0]
    for view, inputs in zip(layouts(record), layouts(x), strict=True):
        assert_same_bits(triton_backend.linear(inputs, view, spec, strided), expected)


def test_stacks_and_float32_are_decoded_first():
    spec = make_spec(80)
    record = reference.quantize(dense(3, 9, 80), spec)
    for dtype in DTYPES:
        x, bias = dense(3, 2, 80, dtype=dtype), dense(9, dtype=dtype)
        weight = reference.dequantize(record, spec, dtype)
        assert not triton_linear.can_fuse(x, record, spec)
        assert_same_bits(triton_backend.linear(x, record, spec), x @ weight.mT)
        assert_same_bits(triton_backend.linear(x, record, spec, bias), x @ weight.mT + bias)
    assert not triton_linear.can_fuse(dense(1, 80), record[0], spec)
