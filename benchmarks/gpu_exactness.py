"""Sections of `gpu_check.py` that compare: every kernel's bits with the CPU's.

The CPU's kernels are proven against the reference by the tests, and make what is expected here.
Records are those of `tests/kernels/compiled.py`. Nothing is timed.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import bench_linear
import harness
import torch
from gpu_worker import ALWAYS, MAPPINGS

import nf4tensor
from nf4tensor import NF4Spec
from nf4tensor.format.spec import QUANT_TYPES, ceil_div
from nf4tensor.kernels import native, ops, select
from nf4tensor.kernels.schema import WEIGHT_DTYPES

# Behind everything else: the nf4tensor of this folder is not the one that was built.
sys.path.append(str(Path(__file__).parents[1]))
from tests.kernels.compiled import make_record, make_weight

make_weight = functools.cache(make_weight)
BLOCK_SIZES = (16, 32, 64, 4096)
WIDTHS = (1, 63, 64, 100, 576, 1000, 4096, 14336)
NUM_ROWS = (1, 3, 37)
QUICK_BLOCK_SIZES, QUICK_WIDTHS, QUICK_NUM_ROWS = (16, 64), (63, 128), (1, 3)
LARGE, QUICK_LARGE = (4096, 14336), (64, 1024)
GUARD = 7.0
SHOWN = 3
LEAST_SECONDS = 2.0
# Shapes of weights [out, in], and rows of inputs around every change of kernel.
PRODUCTS = ((96, 256), (40, 1000), (24, 100), (1024, 4096))
INPUT_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200)
ONE_HOT_ROWS = (1, 3, 16, 17, 64)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def library(check) -> None:
    """Say what is checked; refuse a build without kernels for the GPU."""
    chosen = {c.op: c.backend for c in select.table() if c.device == check.device}
    folder = Path(nf4tensor.__file__).parent
    assert check.package in (None, str(folder.parent)), (
        f"nf4tensor comes from {folder}, not from what was built: an editable install comes first; "
        "check that one with --skip-build"
    )
    row = {"folder": str(folder), **harness.environment()}
    del row["command"]  # of this process
    check.row("nf4tensor", row | {"compiled": native.unavailable_because() or "yes"})
    for op, backend in chosen.items():
        check.row("kernels", {"op": op, "backend": backend})
    if check.device == "cpu":
        left_out = "pinned memory, NCCL, CUDA graphs, store mappings, goals"
        check.left_out[left_out] = "a dry run on the CPU: its times mean nothing"
        return
    for op in ("quantize", "dequantize", "dequantize_into", "linear"):
        backend = chosen.get(op, "reference")
        assert backend != "reference", f"{op} has no CUDA kernel here: {chosen}"


class Tally:
    """Counts comparisons by what is compared, and reports the first differences of each."""

    def __init__(self, check) -> None:
        self._check = check
        self._counts: dict[str, list[int]] = {}

    def expect(self, what: str, case: str, difference: str | None) -> None:
        """Count a comparison, and what differs."""
        count = self._counts.setdefault(what, [0, 0])
        count[0] += 1
        if difference is not None:
            count[1] += 1
            if count[1] <= SHOWN:  # at once: the next call may be the last
                self._check.row("differences", {"of": what, "case": case, "how": difference})

    def close(self) -> None:
        """Report.

        Raises:
            AssertionError: Something differs.
        """
        for what, (cases, differ) in self._counts.items():
            self._check.row("bits", {"what": what, "cases": cases, "differ": differ})
        differ = {what: count for what, (_, count) in self._counts.items() if count}
        assert not differ, f"comparisons that differ: {differ}"


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Say how two tensors differ in their bits; which NaN a NaN is, clause 6.3 leaves open."""
    expected = expected.to(actual.device)
    bits = INTEGERS[expected.itemsize]
    wrong = actual.view(bits) != expected.view(bits)
    wrong &= ~(actual.isnan() & expected.isnan())
    count = int(wrong.sum())
    if not count:
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    values = f"{actual[place].item()}, expected {expected[place].item()}"
    return f"{count} of {wrong.numel()}, the first at {place}: {values}"


def exactness(check) -> None:
    """Compare quantize, dequantize, linear and matmul with the CPU's bits, or within a bound."""
    tally = Tally(check)
    try:
        for part in (large, one_hot, products, quantize, dequantize):  # short ones first
            part(check, tally)
    finally:
        tally.close()


def in_time(check, what: str, settings: Iterable) -> Iterator:
    """Yield settings while there is time."""
    for number, setting in enumerate(settings):
        if check.left() < LEAST_SECONDS:
            check.left_out[what] = f"no time left after {number} settings"
            return
        yield setting


def specs(check) -> Iterator[NF4Spec]:
    """Yield specs of every width, block size, codebook and scales, also as cuts leave them."""
    widths = QUICK_WIDTHS if check.quick else WIDTHS
    blocks = QUICK_BLOCK_SIZES if check.quick else BLOCK_SIZES
    for width, block, quant_type in itertools.product(widths, blocks, QUANT_TYPES):
        num_blocks = ceil_div(width, block)
        yield NF4Spec.for_weight(width, block, None, quant_type)
        yield NF4Spec.for_weight(width, block, 256, quant_type)
        for kind, length in (("square8", 3), ("dynamic8", 5)):  # segments that begin anywhere
            yield NF4Spec(width, block, kind, length, num_blocks // length + 2, quant_type)


def text_of(spec: NF4Spec, dtype: torch.dtype, num_rows: int) -> str:
    """Return what a case is called."""
    name = f"{num_rows}x{spec.in_features} {dtype}, {spec.quant_type}, blocks of {spec.block_size}"
    return f"{name}, {spec.scale_kind} by {spec.segment_length}"


def quantize(check, tally: Tally) -> None:
    """Compare records: of zeros, subnormals, NaN, with gaps between rows, over phases to keep."""
    rows = QUICK_NUM_ROWS if check.quick else NUM_ROWS
    settings = itertools.product(specs(check), rows)
    for spec, num_rows in in_time(check, "quantize", settings):
        if spec.scale_kind == "dynamic8":
            continue
        for dtype in WEIGHT_DTYPES:
            case = text_of(spec, dtype, num_rows)
            check.at(f"quantize {case}")
            weight = make_weight((num_rows,), spec.in_features, dtype)
            expected = ops.quantize(weight, spec)
            moved = weight.to(check.device)
            tally.expect("quantize", case, difference(ops.quantize(moved, spec), expected))
            gaps = moved.new_empty(num_rows, spec.in_features + 3)[:, 1:-2].copy_(moved)
            found = ops.quantize(gaps, spec)
            tally.expect("quantize, rows with gaps", case, difference(found, expected))
            record = make_record((num_rows,), spec)
            written = record.to(check.device)
            ops.quantize_into(moved, spec, written)
            ops.quantize_into(weight, spec, record)
            tally.expect("quantize_into", case, difference(written, record))


def dequantize(check, tally: Tally) -> None:
    """Compare decoded weights, of any bytes as records, by every store mapping."""
    rows = QUICK_NUM_ROWS if check.quick else NUM_ROWS
    settings = itertools.product(specs(check), rows)
    for spec, num_rows in in_time(check, "dequantize", settings):
        record = make_record((num_rows,), spec)
        moved = record.to(check.device)
        shifted = moved.new_empty(moved.numel() + 1)[1:].view(moved.shape).copy_(moved)
        for dtype in WEIGHT_DTYPES:
            case = text_of(spec, dtype, num_rows)
            check.at(f"dequantize {case}")
            expected = ops.dequantize(record, spec, dtype).to(check.device)
            for mapping in check.choices("tune_dequantize", MAPPINGS):
                case = f"{text_of(spec, dtype, num_rows)}, mapping {mapping}"
                found = ops.dequantize(moved, spec, dtype)
                tally.expect("dequantize", case, difference(found, expected))
                found = ops.dequantize(shifted, spec, dtype)
                tally.expect("dequantize, odd address", case, difference(found, expected))
                for what, told in guarded(moved, spec, expected):
                    tally.expect(what, case, told)


def guarded(record, spec: NF4Spec, expected: torch.Tensor) -> Iterator[tuple[str, str | None]]:
    """Decode into outputs with something around them: off alignment, and with gaps."""
    num_rows, width = expected.shape
    line = expected.new_full((expected.numel() + 2,), GUARD)
    out = line[1:-1].view(num_rows, width)
    ops.dequantize_into(record, spec, out)
    yield "dequantize_into, odd address", difference(out, expected)
    yield "around it", difference(line[:: line.numel() - 1], line.new_full((2,), GUARD))
    room = expected.new_full((num_rows, width + 3), GUARD)
    ops.dequantize_into(record, spec, room[:, 1:-2])
    yield "dequantize_into, rows with gaps", difference(room[:, 1:-2], expected)
    room[:, 1:-2] = GUARD
    yield "the gaps", difference(room, torch.full_like(room, GUARD))


def large(check, tally: Tally) -> None:
    """Compare a whole weight of a large model."""
    shape = QUICK_LARGE if check.quick else LARGE
    moved = torch.randn(shape, dtype=torch.bfloat16, device=check.device)
    weight = moved.cpu()
    for scale_block_size in (256, None):
        spec = NF4Spec.for_weight(shape[1], 64, scale_block_size)
        case = text_of(spec, weight.dtype, shape[0])
        check.at(case)
        record = ops.quantize(weight, spec)
        tally.expect("quantize", case, difference(ops.quantize(moved, spec), record))
        expected = ops.dequantize(record, spec, weight.dtype).to(check.device)
        record = record.to(check.device)
        for mapping in check.choices("tune_dequantize", MAPPINGS):
            found = ops.dequantize(record, spec, weight.dtype)
            tally.expect("dequantize", f"{case}, mapping {mapping}", difference(found, expected))


def one_hot(check, tally: Tally) -> None:
    """Take the weights out of products with one-hot inputs: those of dequantize, none another."""
    shapes = PRODUCTS[2:3] if check.quick else PRODUCTS[:3]
    settings = itertools.product(shapes, QUANT_TYPES, (256, None), WEIGHT_DTYPES)
    for (num_rows, width), quant_type, scale_block_size, dtype in in_time(
        check, "linear", settings
    ):
        spec = NF4Spec.for_weight(width, 64, scale_block_size, quant_type)
        record = ops.quantize(torch.randn(num_rows, width, device=check.device), spec)
        expected = ops.dequantize(record, spec, dtype)
        identity = torch.eye(width, dtype=dtype, device=check.device)
        for fused in check.choices("fuse_linear", (ALWAYS, 0)):
            for inputs in ONE_HOT_ROWS:
                case = f"{text_of(spec, dtype, num_rows)}, {inputs} inputs, fused {fused}"
                check.at(f"one-hot linear {case}")
                parts = [ops.linear(part, record, spec) for part in identity.split(inputs)]
                same = torch.equal(torch.cat(parts).T, expected)  # -0.0 is 0.0 in a sum
                tally.expect("linear, one-hot inputs", case, None if same else "other weights")


def products(check, tally: Tally) -> None:
    """Compare products with exact ones, within what float32 sums may round."""
    inputs = (1, 17) if check.quick else INPUT_ROWS
    settings = itertools.product(PRODUCTS[: 2 if check.quick else 4], WEIGHT_DTYPES)
    for (num_rows, width), dtype in in_time(check, "products", settings):
        spec = NF4Spec.for_weight(width)
        weight = torch.randn(num_rows, width, dtype=dtype, device=check.device)
        record = ops.quantize(weight, spec)
        with float32_sums():
            for fused in check.choices("fuse_linear", (ALWAYS, 0)):
                for rows in inputs:
                    case = f"{text_of(spec, dtype, num_rows)}, {rows} inputs, fused {fused}"
                    check.at(f"products {case}")
                    for what, told in check_products(record, spec, weight.new_empty(rows, width)):
                        tally.expect(f"{what}, within its bound", case, told)


@contextlib.contextmanager
def float32_sums() -> Iterator[None]:
    """Keep cuBLAS from adding up in 16 bits, which it may by default."""
    flags = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = [getattr(flags, name) for name in names]
    for name in names:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(flags, name, value)


def check_products(record, spec: NF4Spec, input) -> Iterator[tuple[str, str | None]]:
    """Multiply random inputs, of the shape and dtype of one, each way; say what is off."""
    exact = ops.dequantize(record, spec, input.dtype).double()
    input.normal_()
    bias = torch.randn_like(input[0, 0].expand(record.shape[0]))
    gradient = torch.randn_like(input[:, :1].expand(-1, record.shape[0]))
    # A bias is one more term: of a column that is multiplied by ones.
    with_one = torch.cat([input, torch.ones_like(input[:, :1])], 1)
    with_bias = torch.cat([exact, bias.double()[:, None]], 1)
    for what, result, left, right in (
        ("linear", ops.linear(input, record, spec), input, exact.T),
        ("linear with a bias", ops.linear(input, record, spec, bias), with_one, with_bias.T),
        ("matmul", ops.matmul(gradient, record, spec), gradient, exact),
    ):
        try:
            bench_linear.check_bound(result, left.double(), right)
        except AssertionError as error:
            yield what, str(error)
        else:
            yield what, None
