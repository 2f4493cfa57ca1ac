"""The CUDA kernels as nvcc translates them, in the interpreter of ptx/: equal bits, and counts.

Whatever csrc/cuda launches runs, on numbers that are delicate on purpose, beside the reference, and
every kernel of a file must have had its turn.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator

import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import reference
from tests.bounds import matmul_bound
from tests.kernels.compiled import (
    assert_same_bits,
    make_finite_record,
    make_record,
)
from tests.kernels.machine_code import ops
from tests.kernels.ptx.calls import DTYPES, Calls
from tests.kernels.ptx.execute import Execution
from tests.kernels.ptx.launches import Recorder, needs_compiler, needs_nvcc
from tests.strategies import FINITE_KINDS, NON_FINITE_KINDS, QUANT_TYPES, make_rows

# The sources ask for no other architecture than sm_100 and later.
CAPABILITIES = [90, 100, *(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86, 89, 120))]
# Whole groups of 64, then groups cut short at every alignment; one value, and rows of many warps.
WIDTHS = (64, 576, 4096, 1, 8, 63, 100, 1000)
BLOCK_SIZES = (16, 32, 64, 4096)
MAPPINGS = (0, 1, 2, 3)
NUM_INPUTS = (1, 7, 16, 40, 64)
FEW_WEIGHTS = 3000

pytestmark = [needs_nvcc, needs_compiler]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("launches"))


@pytest.fixture(scope="module", params=CAPABILITIES, ids=lambda capability: f"sm_{capability}")
def calls_of(request, recorder, tmp_path_factory: pytest.TempPathFactory):
    """Each op's kernels for an architecture, compiled when first asked for."""
    folder, made = tmp_path_factory.mktemp("ptx"), {}

    def of(op: str) -> Calls:
        if op not in ops():
            pytest.skip(f"csrc/cuda/{op}.cu is yet to be written")
        if op not in made:
            made[op] = Calls(op, request.param, recorder, folder)
        return made[op]

    return of


def every_spec(widths=WIDTHS, block_sizes=BLOCK_SIZES) -> Iterator[NF4Spec]:
    """Yield specs of every scale kind, rows with one segment and with many."""
    for width, block_size, quant_type in itertools.product(widths, block_sizes, QUANT_TYPES):
        yield NF4Spec.for_weight(width, block_size, None, quant_type)
        yield NF4Spec.for_weight(width, block_size, 256, quant_type)
        spec = NF4Spec.for_weight(width, block_size, 3, quant_type)
        segments = (spec.segment_length, spec.num_segments + 1)
        yield NF4Spec(width, block_size, "square8", *segments, quant_type)
        yield NF4Spec(width, block_size, "dynamic8", *segments, quant_type)


# One turn for each kernel, or all cases, which take minutes.
few_or_all = pytest.mark.parametrize(
    "most", [1, pytest.param(math.inf, marks=pytest.mark.slow)], ids=["few", "all"]
)


def shuffled(calls: Calls, most: float, *choices: Iterable) -> Iterator[tuple[int, tuple]]:
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


def garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What an output holds before it is written: numbers, as any NaN is as good as another."""
    return torch.full((*shape, dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype).squeeze(-1)


@few_or_all
def test_dequantize(calls_of, most):
    calls = calls_of("dequantize")
    for seed, (spec, dtype, mapping) in shuffled(calls, most, every_spec(), DTYPES, MAPPINGS):
        rows, skew = rows_of(spec), (0, 0, dtype.itemsize, 16)[seed // 2 % 4]
        with calls.recorder.configured(mapping=mapping):
            call = calls.dequantize(rows, spec, dtype, skew)
        if calls.is_due(call, most):
            record = (make_record, make_finite_record)[seed % 2]((rows,), spec, seed)
            out = garbage(rows, spec.in_features, dtype=dtype)
            calls.run(call, record=record, out=out)
            assert_same_bits(out, reference.dequantize(record, spec, dtype))


def count_dequantize(
    calls: Calls, num_rows: int, width: int, dtype: torch.dtype, mapping: int = 0
) -> Execution:
    """Decode whole blocks of threads with the default spec, records at a multiple of a sector."""
    spec = NF4Spec.for_weight(width)
    with calls.recorder.configured(mapping=mapping):
        call = calls.dequantize(num_rows, spec, dtype, record=1 << 40)
    out = garbage(num_rows, width, dtype=dtype)
    (execution,) = calls.run(call, record=make_record((num_rows,), spec), out=out)
    return execution


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_moves_whole_sectors(calls_of, dtype):
    for num_rows, width in ((128, 576), (8, 4096)):
        execution = count_dequantize(calls_of("dequantize"), num_rows, width, dtype)
        stores = [access for access in execution.accesses if access.is_store]
        (codes,) = (
            access
            for access in execution.accesses
            if ".v4." in access.opcode and access not in stores
        )
        assert all(access.fills_sectors for access in (codes, *stores))
        assert sum(access.num_bytes for access in stores) == num_rows * width * dtype.itemsize
        assert codes.num_bytes == num_rows * width // 2
        assert not any(access.name == "shared" for access in execution.accesses)


def test_dequantize_takes_few_instructions(calls_of):
    execution = count_dequantize(calls_of("dequantize"), 16, 4096, torch.bfloat16)
    # Of PTX, with what a thread does once; ptxas makes fewer of them, and another test counts.
    assert sum(execution.thread_instructions.values()) / (16 * 4096) <= 8


def test_dequantize_by_way_of_shared_memory_has_no_bank_conflicts(calls_of):
    execution = count_dequantize(calls_of("dequantize"), 8, 4096, torch.bfloat16, mapping=3)
    shared = [access for access in execution.accesses if access.name == "shared"]
    assert shared
    assert all(access.wavefronts == access.ideal_wavefronts for access in shared)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_with_few_blocks(calls_of, dtype):
    """Each has to go on where the others stopped, in a memory that it shares with itself."""
    calls = calls_of("dequantize")
    for mapping, width in itertools.product(MAPPINGS, (1000, 576)):
        spec = NF4Spec.for_weight(width)
        with calls.recorder.configured(mapping=mapping, max_blocks=2):
            call = calls.dequantize(50, spec, dtype)
        record, out = make_record((50,), spec), garbage(50, width, dtype=dtype)
        calls.run(call, record=record, out=out)
        assert_same_bits(out, reference.dequantize(record, spec, dtype))


@pytest.mark.parametrize("width", [4096, 1000, 63])
def test_dequantize_past_32_bits(calls_of, width):
    """The last rows of records and outputs of many GiB, of which only these are there."""
    calls = calls_of("dequantize")
    num_rows, last = 1 << 34 - width.bit_length(), 8 * 4096 // width
    for dtype, scale_block_size in itertools.product(DTYPES, (256, None)):
        spec = NF4Spec.for_weight(width, 64, scale_block_size)
        record, out = make_record((last,), spec), garbage(last, width, dtype=dtype)
        call = calls.dequantize(num_rows, spec, dtype)
        written = calls.run_last(call, num_rows, record=record, out=out)
        expected = reference.dequantize(record, spec, dtype)
        assert_same_bits(out[-written:], expected[-written:])


@few_or_all
def test_quantize(calls_of, most):
    calls = calls_of("quantize")
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_reads_each_weight_once(calls_of, dtype):
    calls, spec = calls_of("quantize"), NF4Spec.for_weight(4096)
    weight, record = torch.ones(8, 4096, dtype=dtype), garbage(8, spec.pitch, dtype=torch.uint8)
    call = calls.quantize(8, spec, dtype, record=1 << 40)
    (execution,) = calls.run(call, weight=weight, record=record)
    loads = [access for access in execution.accesses if access.name == "weight"]
    assert sum(access.num_bytes for access in loads) == weight.nbytes
    codes = [access for access in execution.accesses if access.opcode.startswith("st.global.cs")]
    assert all(access.fills_sectors for access in codes)
    assert sum(access.num_bytes for access in codes) == 8 * spec.codes_bytes
    shared = [access for access in execution.accesses if access.name == "shared"]
    assert all(access.wavefronts == access.ideal_wavefronts for access in shared)


@pytest.mark.parametrize("width", [4096, 1000, 63])
def test_quantize_past_32_bits(calls_of, width):
    calls = calls_of("quantize")
    num_rows, last = 1 << 34 - width.bit_length(), 8 * 4096 // width
    for dtype, scale_block_size in itertools.product(DTYPES, (256, None)):
        spec = NF4Spec.for_weight(width, 64, scale_block_size)
        weight = make_rows(spec, ["gaussian"], last, 0, dtype)
        record = garbage(last, spec.pitch, dtype=torch.uint8)
        with calls.recorder.configured(num_processors=1 << 24):
            call = calls.quantize(num_rows, spec, dtype)
        written = calls.run_last(call, num_rows, weight=weight, record=record)
        assert torch.equal(record[-written:], reference.quantize(weight, spec)[-written:])


@few_or_all
def test_linear_multiplies_the_weights_of_dequantize(calls_of, most):
    """Each weight on its own: every input has a single one."""
    calls = calls_of("linear")
    specs = every_spec((8, 200, 576, 1096), (16, 64))
    for seed, (spec, dtype, num_inputs) in shuffled(calls, most, specs, DTYPES[1:], NUM_INPUTS):
        call = calls.linear(19, spec, dtype, num_inputs, False)
        if calls.is_due(call, most):
            record = make_finite_record((19,), spec, seed)
            columns = (torch.arange(num_inputs) * 7 + seed) % spec.in_features
            inputs = torch.eye(spec.in_features, dtype=dtype)[columns]
            out = garbage(num_inputs, 19, dtype=dtype)
            calls.run(call, record=record, inputs=inputs, out=out)
            weight = reference.dequantize(record, spec, dtype)
            assert torch.equal(out, weight.T[columns]), (spec, dtype, num_inputs)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_linear_sums_in_float32(calls_of, dtype):
    calls = calls_of("linear")
    generator = torch.Generator().manual_seed(0)
    for width, num_inputs, rows in [(64, 1, 5), (576, 8, 40), (1096, 3, 17), (4096, 33, 70)]:
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
