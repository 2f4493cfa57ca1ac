"""The CUDA kernels as nvcc translates them, in the interpreter of ptx/: equal bits.

Whatever csrc/cuda launches runs, on numbers that are delicate on purpose, beside the reference, and
every kernel of a file must have had its turn. What they cost is for test_cuda_ptx_counts.py.
"""

import itertools
import random
from collections.abc import Iterable, Iterator

import pytest
import torch

from nf4tensor.format.codebook import FP4_THRESHOLDS, NF4_THRESHOLDS
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import reference
from tests.bounds import matmul_bound
from tests.kernels.compiled import (
    assert_same_bits,
    make_finite_record,
    make_record,
)
from tests.kernels.ptx.calls import (
    DTYPES,
    Calls,
    dequantize_kernels,
    garbage,
    kernels_of,
    linear_kernels,
    quantize_kernels,
)
from tests.kernels.ptx.launches import needs_compiler, needs_nvcc
from tests.strategies import FINITE_KINDS, NON_FINITE_KINDS, QUANT_TYPES, make_rows

# Whole groups of 64, then groups cut short at every alignment; one value, and rows of many warps.
WIDTHS = (64, 576, 4096, 1, 8, 63, 100, 1000)
BLOCK_SIZES = (16, 32, 64, 4096)
MAPPINGS = (0, 1, 2, 3)
NUM_INPUTS = (1, 7, 16, 40, 64)
FEW_WEIGHTS = 3000

pytestmark = [needs_nvcc, needs_compiler]


def every_spec(widths=WIDTHS, block_sizes=BLOCK_SIZES) -> Iterator[NF4Spec]:
    """Yield specs of every scale kind, rows with one segment and with many."""
    for width, block_size, quant_type in itertools.product(widths, block_sizes, QUANT_TYPES):
        yield NF4Spec.for_weight(width, block_size, None, quant_type)
        yield NF4Spec.for_weight(width, block_size, 256, quant_type)
        spec = NF4Spec.for_weight(width, block_size, 3, quant_type)
        segments = (spec.segment_length, spec.num_segments + 1)
        yield NF4Spec(width, block_size, "square8", *segments, quant_type)
        yield NF4Spec(width, block_size, "dynamic8", *segments, quant_type)


# How many turns each kernel has; every architecture shuffles the cases in its own way.
few_or_many = pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.slow)])


def shuffled(calls: Calls, most: int, *choices: Iterable) -> Iterator[tuple[int, tuple]]:
    """Yield combinations, shuffled for the architecture, until each kernel has had its turns."""
    cases = list(itertools.product(*choices))
    random.Random(calls.capability).shuffle(cases)
    calls.turns.clear()
    for seed, case in enumerate(cases):
        if min(calls.turns[kernel] for kernel in calls.module.kernels) >= most:
            break
        yield seed, case
    assert calls.turns.keys() == calls.module.kernels.keys()


def rows_of(spec: NF4Spec) -> int:
    return max(2, FEW_WEIGHTS // spec.in_features)


@dequantize_kernels
@few_or_many
def test_dequantize(calls, most):
    for seed, (spec, dtype, mapping) in shuffled(calls, most, every_spec(), DTYPES, MAPPINGS):
        rows, skew = rows_of(spec), (0, 0, dtype.itemsize, 16)[seed // 2 % 4]
        with calls.recorder.configured(mapping=mapping):
            call = calls.dequantize(rows, spec, dtype, skew)
        if calls.is_due(call, most):
            record = (make_record, make_finite_record)[seed % 2]((rows,), spec, seed)
            out = garbage(rows, spec.in_features, dtype=dtype)
            calls.run(call, record=record, out=out)
            assert_same_bits(out, reference.dequantize(record, spec, dtype))


@kernels_of("dequantize", 90)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_with_few_blocks(calls, dtype):
    """Each has to go on where the others stopped, in a memory that it shares with itself."""
    for mapping, width in ((0, 1000), *((mapping, 576) for mapping in MAPPINGS)):
        spec = NF4Spec.for_weight(width)
        with calls.recorder.configured(mapping=mapping, max_blocks=2):
            call = calls.dequantize(50, spec, dtype)
        record, out = make_record((50,), spec), garbage(50, width, dtype=dtype)
        calls.run(call, record=record, out=out)
        assert_same_bits(out, reference.dequantize(record, spec, dtype))


@kernels_of("dequantize", 90)
@pytest.mark.parametrize("width", [4096, 1000, 63])
def test_dequantize_past_32_bits(calls, width):
    """The last rows of records and outputs of many GiB, of which only these are there."""
    num_rows, last = 1 << 34 - width.bit_length(), 8 * 4096 // width
    for dtype, scale_block_size in itertools.product(DTYPES, (256, None)):
        spec = NF4Spec.for_weight(width, 64, scale_block_size)
        record, out = make_record((last,), spec), garbage(last, width, dtype=dtype)
        call = calls.dequantize(num_rows, spec, dtype)
        written = calls.run_last(call, num_rows, record=record, out=out)
        expected = reference.dequantize(record, spec, dtype)
        assert_same_bits(out[-written:], expected[-written:])


@quantize_kernels
@few_or_many
def test_quantize(calls, most):
    delicate = [*FINITE_KINDS, *NON_FINITE_KINDS]
    specs = (spec for spec in every_spec() if spec.scale_kind != "dynamic8")
    for seed, (spec, dtype, keep_phase) in shuffled(calls, 2 * most, specs, DTYPES, (False, True)):
        rows, skew = rows_of(spec), (0, dtype.itemsize, 16)[seed % 3]
        with calls.recorder.configured(num_processors=1):
            call = calls.quantize(rows, spec, dtype, skew, keep_phase)
        if calls.is_due(call, 2 * most):
            kinds = random.Random(seed).sample(delicate, 1 + seed % 6)
            weight = make_rows(spec, kinds, rows, seed, dtype)
            record = make_record((rows,), spec, seed)
            expected = reference.quantize(weight, spec) if not keep_phase else record.clone()
            if keep_phase:
                reference.quantize_into(weight, spec, expected)
            calls.run(call, weight=weight, record=record)
            assert torch.equal(record, expected), (spec, dtype, kinds)


@quantize_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_with_few_blocks(calls, dtype):
    """Each goes on where the others stopped, with weights that divide to thresholds, nearly."""
    for block_size, quant_type in itertools.product((64, 4096), QUANT_TYPES):
        spec = NF4Spec.for_weight(4200, block_size, 256, quant_type)
        weight = make_quotients(20, spec, seed=block_size).to(dtype)
        record = garbage(20, spec.pitch, dtype=torch.uint8)
        with calls.recorder.configured(num_processors=1):
            call = calls.quantize(20, spec, dtype)
        calls.run(call, weight=weight, record=record)
        assert torch.equal(record, reference.quantize(weight, spec))


def make_quotients(num_rows: int, spec: NF4Spec, seed: int) -> torch.Tensor:
    """Weights within an ulp or two of a threshold times the absmax of their block, any number."""
    generator = torch.Generator().manual_seed(seed)
    thresholds = torch.tensor([*NF4_THRESHOLDS, *FP4_THRESHOLDS])
    scales = 1 + torch.rand(num_rows, spec.num_blocks, 1, generator=generator)
    shape = (num_rows, spec.num_blocks, spec.block_size)
    choice = torch.randint(thresholds.numel(), shape, generator=generator)
    weight = thresholds[choice] * scales
    weight = weight.view(torch.int32) + torch.randint(-1, 2, shape, generator=generator).int()
    weight = weight.view(torch.float32)
    weight[..., :1] = scales
    return weight.flatten(1)[:, : spec.in_features].contiguous()


@quantize_kernels
@pytest.mark.parametrize("width", [4096, 1000, 63])
def test_quantize_past_32_bits(calls, width):
    num_rows, last = 1 << 34 - width.bit_length(), 8 * 4096 // width
    for dtype, scale_block_size in itertools.product(DTYPES, (256, None)):
        spec = NF4Spec.for_weight(width, 64, scale_block_size)
        weight = make_rows(spec, ["gaussian"], last, 0, dtype)
        record = garbage(last, spec.pitch, dtype=torch.uint8)
        with calls.recorder.configured(num_processors=1 << 24):
            call = calls.quantize(num_rows, spec, dtype)
        written = calls.run_last(call, num_rows, weight=weight, record=record)
        assert torch.equal(record[-written:], reference.quantize(weight, spec)[-written:])


@linear_kernels
@few_or_many
def test_linear_multiplies_the_weights_of_dequantize(calls, most):
    """Each weight on its own: every input has a single one."""
    specs = every_spec((8, 200, 584), (16, 64))
    for seed, (spec, dtype, num_inputs) in shuffled(calls, most, specs, DTYPES[1:], NUM_INPUTS):
        rows = (19, 70)[seed % 2]
        # On a small device each block does more inputs.
        with calls.recorder.configured(num_processors=(1, 132)[seed // 2 % 2]):
            call = calls.linear(rows, spec, dtype, num_inputs)
        assert call.launches
        if calls.is_due(call, most):
            record = make_finite_record((rows,), spec, seed)
            columns = (torch.arange(num_inputs) * 7 + seed) % spec.in_features
            inputs = torch.eye(spec.in_features, dtype=dtype)[columns]
            out = garbage(num_inputs, rows, dtype=dtype)
            calls.run(call, record=record, inputs=inputs, out=out)
            weight = reference.dequantize(record, spec, dtype)
            assert torch.equal(out, weight.T[columns]), (spec, dtype, num_inputs)


@linear_kernels
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_linear_sums_in_float32(calls, dtype):
    generator = torch.Generator().manual_seed(0)
    for width, num_inputs, rows in [(64, 1, 5), (1096, 9, 40), (2048, 33, 70)]:
        for scale_block_size, has_bias in ((256, True), (None, False)):
            spec = NF4Spec.for_weight(width, 64, scale_block_size)
            tensors = {
                "record": reference.quantize(torch.randn(rows, width, generator=generator), spec),
                "inputs": torch.randn(num_inputs, width, generator=generator).to(dtype),
                "out": garbage(num_inputs, rows, dtype=dtype),
            }
            bias = torch.randn(rows, generator=generator).to(dtype)
            if has_bias:
                tensors["bias"] = bias
            calls.run(calls.linear(rows, spec, dtype, num_inputs, has_bias), **tensors)
            weight = reference.dequantize(tensors["record"], spec, dtype).double()
            inputs, bias = tensors["inputs"].double(), bias.double() * has_bias
            exact = inputs @ weight.T + bias
            bound = matmul_bound(inputs.abs() @ weight.abs().T + bias.abs(), width + 1, dtype)
            assert (tensors["out"].double() - exact).abs().le(bound).all()


@linear_kernels
def test_linear_past_32_bits(calls):
    spec, num_rows = NF4Spec.for_weight(4096), 1 << 22
    record = make_finite_record((128,), spec)
    inputs, out = torch.zeros(1, 4096), garbage(128, dtype=torch.bfloat16)
    inputs[0, 4000] = 1
    call = calls.linear(num_rows, spec, torch.bfloat16)
    tensors = {"record": record, "inputs": inputs.bfloat16(), "out": out}
    written = calls.run_last(call, num_rows, **tensors)
    weight = reference.dequantize(record, spec, torch.bfloat16)
    assert torch.equal(out[-written:], weight[-written:, 4000])
