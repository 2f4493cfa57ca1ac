"""The products of the compiled kernels: which weights they multiply, and how well they add up.

How they are called, by whom and with what, is tested in test_product_calls.py.
"""

import pytest
import torch
from torch import Tensor

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from tests import bounds
from tests.kernels.compiled import (
    assert_same_bits,
    make_finite_record,
    make_record,
    needs_compiled,
)
from tests.strategies import DTYPES, QUANT_TYPES

pytestmark = [needs_compiled, pytest.mark.usefixtures("isa")]

SCALE_KINDS = ("float32", "square8", "dynamic8")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Around every border of blocks of inputs, of what is multiplied at once and of threads' shares.
NUM_INPUTS = (0, 1, 2, 4, 5, 6, 7, 8, 9, 12, 13, 63, 64, 65, 513)
NUM_ROWS = (1, 7, 8, 9, 63, 64, 65, 130)
WIDTHS = (1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1100)


def make_spec(
    in_features: int, block_size: int = 64, scale_kind: str = "square8", quant_type: str = "nf4"
) -> NF4Spec:
    """Return a spec with segments that end within a row, and room for phases."""
    if scale_kind == "float32":
        return NF4Spec(in_features, block_size, scale_kind, 0, 0, quant_type)
    num_blocks = -(-in_features // block_size)
    length = min(3, num_blocks)
    return NF4Spec(
        in_features, block_size, scale_kind, length, num_blocks // length + 2, quant_type
    )


def dense(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a random dense tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(found: Tensor, exact: Tensor, magnitudes: Tensor, length: int) -> None:
    """Check a product against the float64 one."""
    assert found.shape == exact.shape
    assert found.is_contiguous()
    bound = bounds.matmul_bound(magnitudes, length, found.dtype)
    # Rounding to a subnormal, and a product of floats that is one, are off by half of the smallest.
    finfo = torch.finfo(found.dtype)
    bound += finfo.smallest_normal * bounds.roundoff(found.dtype) + length * bounds.SMALLEST / 2
    assert ((found.double() - exact).abs() <= bound).all()


# One-hot inputs: a product is one weight, and all others times zero. -0.0 comes out as +0.0, since
# -0.0 + 0.0 is +0.0.


def one_hots(width: int, num_inputs: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the columns to extract, each time num_inputs of them: some where there are many."""
    generator = torch.Generator().manual_seed(width)
    columns = torch.randperm(width, generator=generator)[: 40 * num_inputs]
    columns = torch.cat([columns, torch.tensor([0, width - 1])])
    return list(columns.split(num_inputs))


def assert_extracted(record: Tensor, spec: NF4Spec, num_inputs: int, dtype: torch.dtype) -> None:
    """Compare weights that come out of linear with what dequantize gives."""
    weight = ops.dequantize(record, spec, dtype)
    assert weight.isfinite().all()
    expected = weight + 0.0
    for columns in one_hots(spec.in_features, num_inputs, dtype):
        inputs = torch.zeros(columns.numel(), spec.in_features, dtype=dtype)
        inputs[range(columns.numel()), columns] = 1
        assert_same_bits(ops.linear(inputs, record, spec), expected.t()[columns])
    for rows in one_hots(record.shape[0], num_inputs, dtype):
        inputs = torch.zeros(rows.numel(), record.shape[0], dtype=dtype)
        inputs[range(rows.numel()), rows] = 1
        assert_same_bits(ops.matmul(inputs, record, spec), expected[rows])


@each_dtype
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale_kind", SCALE_KINDS)
@pytest.mark.parametrize("num_inputs", [1, 3, 5, 17, 70])
def test_one_hot_inputs_extract_the_weight(num_inputs, scale_kind, quant_type, dtype):
    for block_size, in_features in ((16, 49), (32, 95), (64, 191), (4096, 333)):
        spec = make_spec(in_features, block_size, scale_kind, quant_type)
        record = make_finite_record((11,), spec, in_features)
        assert_extracted(record, spec, num_inputs, dtype)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("scale_kind", SCALE_KINDS)
@pytest.mark.parametrize("num_inputs", [1, 3, 5, 17, 70])
def test_one_hot_inputs_extract_wide_and_tall_weights(num_inputs, scale_kind, dtype):
    for block_size in (16, 32, 64, 4096):
        for in_features, num_rows in ((1, 3), (64, 65), (513, 130), (4161, 9), (8197, 2)):
            spec = make_spec(in_features, block_size, scale_kind)
            record = make_finite_record((num_rows,), spec, block_size)
            assert_extracted(record, spec, num_inputs, dtype)


@each_dtype
def test_subnormal_weights_are_extracted(dtype):
    spec = make_spec(130, 64, "float32")
    record = make_record((5,), spec)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    scales = torch.tensor([1.0, 40.0, 3000.0]).mul(smallest)
    scales = scales if dtype != torch.float32 else torch.tensor([1.0, 40.0, 3000.0]) * 2.0**-149
    start = spec.scales_offset_bytes
    record[:, start : start + 12] = scales.view(torch.uint8)
    weight = ops.dequantize(record, spec, dtype)
    assert ((weight != 0) & (weight.abs() < torch.finfo(dtype).smallest_normal)).any()
    for num_inputs in (1, 3, 5, 17, 70):
        assert_extracted(record, spec, num_inputs, dtype)


# Values


def check_products(
    num_inputs: int, num_rows: int, width: int, dtype: torch.dtype, **options
) -> None:
    """Compare all products of one geometry with float64."""
    spec = make_spec(width, **options)
    record = ops.quantize(dense(num_rows, width, seed=width), spec)
    exact = ops.dequantize(record, spec, dtype).double()
    x, y = dense(num_inputs, width, dtype=dtype), dense(num_inputs, num_rows, dtype=dtype)
    bias = dense(num_rows, dtype=dtype, seed=1)
    product, magnitudes = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    assert_within(ops.linear(x, record, spec), product, magnitudes, width)
    found, shift = ops.linear(x, record, spec, bias), bias.double()
    assert_within(found, product + shift, magnitudes + shift.abs(), width + 1)
    magnitudes = y.double().abs() @ exact.abs()
    assert_within(ops.matmul(y, record, spec), y.double() @ exact, magnitudes, num_rows)


@each_dtype
@pytest.mark.parametrize("block_size", [32, 64])
def test_numbers_of_inputs(block_size, dtype):
    for num_inputs in NUM_INPUTS:
        check_products(num_inputs, 19, 150, dtype, block_size=block_size)


@each_dtype
@pytest.mark.parametrize("num_inputs", [1, 5, 9])
def test_numbers_of_rows_and_widths(num_inputs, dtype):
    for i, num_rows in enumerate(NUM_ROWS):
        check_products(num_inputs, num_rows, WIDTHS[-1 - i], dtype)
    for i, width in enumerate(WIDTHS):
        check_products(num_inputs, NUM_ROWS[i % 5], width, dtype, block_size=128)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_every_border(width, dtype):
    for num_rows in NUM_ROWS:
        for num_inputs in NUM_INPUTS:
            check_products(num_inputs, num_rows, width, dtype)


@pytest.mark.slow
def test_inputs_of_many_blocks():
    check_products(1030, 9, 8200, torch.float32)  # 8 MB hold 255 of them
    check_products(33, 9, 300000, torch.bfloat16)


@each_dtype
@pytest.mark.parametrize("num_inputs", [1, 4, 5, 9, 70])
def test_nan_and_infinity_stay_in_their_rows_and_columns(num_inputs, dtype):
    """Also where rows, columns and inputs are filled up with zeros beside them."""
    bad_input, bad_row, bad_column = num_inputs // 2, 10, 68
    for width, num_rows in ((69, 11), (130, 65)):
        for value in (torch.nan, torch.inf, -torch.inf):
            spec = make_spec(width, 64, "float32")
            record = ops.quantize(dense(num_rows, width), spec)
            weight = ops.dequantize(record, spec, dtype)
            x, y = dense(num_inputs, width, dtype=dtype), dense(num_inputs, num_rows, dtype=dtype)
            bias = torch.zeros(num_rows, dtype=dtype)
            x[bad_input, bad_column] = y[bad_input, bad_row] = bias[3] = value
            start = spec.scales_offset_bytes + 4  # of the second block of a row
            record[5, start : start + 4] = torch.tensor([value]).view(torch.uint8)
            weight[5, 64:128] = torch.nan
            assert_same_kinds(ops.linear(x, record, spec, bias), x, weight.t(), bias)
            assert_same_kinds(ops.matmul(y, record, spec), y, weight, None)


def assert_same_kinds(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    """Check that a product is finite, infinite or NaN where its terms make it so.

    A scale that is infinite makes weights infinite, or NaN where the level is zero; sums of either
    with an infinity are any of these.
    """
    left, right = left.double(), right.double()
    exact = left @ right + (0 if bias is None else bias.double())
    assert torch.equal(found.isfinite(), exact.isfinite())
    spoilt = right.isnan().any(0)
    assert torch.equal(found[:, ~spoilt].isnan(), exact[:, ~spoilt].isnan())
    infinite = exact.isinf() & ~spoilt
    assert torch.equal(found.double()[infinite], exact[infinite])


# Stacks of weights


@pytest.mark.parametrize("lead", [(), (4,), (3, 4), (3, 1), (1,), (0,)])
@pytest.mark.parametrize(
    "shape", [(), (2,), (1, 2), (4, 2), (4, 1), (3, 1, 2), (2, 3, 4, 7), (0, 2)]
)
def test_stacks_broadcast(lead, shape):
    spec = make_spec(80, 16)
    record = ops.quantize(dense(*lead, 9, 80), spec)
    weight = ops.dequantize(record, spec, torch.float32).double()
    for product, right in ((ops.linear, weight.mT), (ops.matmul, weight)):
        x = dense(*shape, right.shape[-2])
        try:
            exact = x.double() @ right
        except RuntimeError:
            with pytest.raises((ValueError, RuntimeError)):
                product(x, record, spec)
            continue
        assert_within(product(x, record, spec), exact, x.double().abs() @ right.abs(), 80)


@each_dtype
def test_nothing_to_multiply(dtype):
    spec = make_spec(80)
    record = ops.quantize(dense(6, 80), spec)
    bias = dense(6, dtype=dtype)
    assert ops.linear(dense(0, 80, dtype=dtype), record, spec).shape == (0, 6)
    assert ops.linear(dense(2, 0, 80, dtype=dtype), record, spec, bias).shape == (2, 0, 6)
    assert ops.matmul(dense(0, 6, dtype=dtype), record, spec).shape == (0, 80)
    assert ops.linear(dense(3, 80, dtype=dtype), record[:0], spec).shape == (3, 0)
    assert_same_bits(
        ops.matmul(dense(3, 0, dtype=dtype), record[:0], spec), torch.zeros(3, 80, dtype=dtype)
    )
    zeros = torch.zeros(3, 80, dtype=dtype)
    assert_same_bits(ops.linear(zeros, record, spec, bias), bias.expand(3, 6))


@pytest.mark.usefixtures("isa")
def test_stacks_are_read_where_they_lie():
    """Expanded and strided stacks give the bits of copies, and are not copied."""
    spec = make_spec(130)
    record = ops.quantize(dense(4, 9, 130), spec)
    x, y = dense(5, 4, 3, 130).transpose(0, 1).transpose(0, 1), dense(4, 1, 9).expand(4, 3, 9)
    for stack in (record, record[:1].expand(4, -1, -1), record[::2].repeat(2, 1, 1)[::1]):
        for product, inputs in ((ops.linear, x), (ops.matmul, y)):
            expected = product(inputs.contiguous(), stack.contiguous(), spec)
            assert_same_bits(product(inputs, stack, spec), expected)
