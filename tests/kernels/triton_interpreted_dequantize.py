"""The Triton kernel that decodes, under Triton's interpreter: the reference's bits.

Run by test_triton.py in a process of its own, since the interpreter must be chosen before Triton
is imported.
"""

import mmap

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import reference, triton_backend, triton_dequantize, triton_record
from tests.kernels.compiled import (
    assert_same_bits,
    before_a_wall,
    layouts,
    make_record,
    make_weight,
)
from tests.strategies import DTYPES, QUANT_TYPES

SCALE_KINDS = ("float32", "square8", "dynamic8")
HALVES = (torch.bfloat16, torch.float16)
MAP_NORESERVE = 0x4000  # of Linux

pytestmark = pytest.mark.usefixtures("triton_interpreter")


def assert_decodes(record: torch.Tensor, spec: NF4Spec, dtype: torch.dtype) -> None:
    decoded = triton_backend.dequantize(record, spec, dtype)
    assert_same_bits(decoded, reference.dequantize(record, spec, dtype))


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_widths(block_size, quant_type):
    for i, in_features in enumerate((1, 2, 15, 17, 31, 33, 63, 64, 65, 127, 130, 577)):
        spec = NF4Spec.for_weight(in_features, block_size, (None, 3)[i % 2], quant_type)
        weight = make_weight((2,), in_features, torch.float32)
        record = reference.quantize(weight, spec)
        assert_decodes(record, spec, DTYPES[in_features % 3])


@pytest.mark.slow
@pytest.mark.parametrize("scale_block_size", [None, 3])
@pytest.mark.parametrize("block_size", [16, 64])
def test_every_width(block_size, scale_block_size):
    for in_features in range(1, 200):
        spec = NF4Spec.for_weight(in_features, block_size, scale_block_size)
        record = reference.quantize(make_weight((2,), in_features, torch.float32), spec)
        assert_decodes(record, spec, DTYPES[in_features % 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_kind", SCALE_KINDS)
def test_any_record_decodes(scale_kind, dtype):
    for in_features, block_size in ((17, 16), (100, 64), (320, 32), (333, 64), (577, 4096)):
        quant_type = QUANT_TYPES[in_features % 2]
        num_blocks = -(-in_features // block_size)
        length = 1 + in_features % 9
        segments = (0, 0) if scale_kind == "float32" else (length, num_blocks // length + 3)
        spec = NF4Spec(in_features, block_size, scale_kind, *segments, quant_type)
        assert_decodes(make_record((3,), spec, in_features), spec, dtype)


def test_default_specs_of_models():
    for in_features in (576, 4096, 4304, 16448):
        spec = NF4Spec.for_weight(in_features)
        record = reference.quantize(make_weight((1,), in_features, torch.bfloat16), spec)
        assert_decodes(record, spec, torch.bfloat16)


@triton.jit
def _round_kernel(bits, out, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    place = tl.arange(0, SIZE)
    x = tl.load(bits + place).to(tl.float32, bitcast=True)
    tl.store(out + place, triton_record.round_bits(x, DTYPE))


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    # Of every sign and exponent: ties of bfloat16 and float16, their neighbours, and any mantissa.
    lowest = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0xFFFF]).repeat(8)
    mantissas = torch.randint(128, (512, 64), generator=generator) << 16 | lowest
    anything = torch.randint(1 << 23, (512, 60), generator=generator)
    ends = torch.tensor([0, 1, 0x7FFFFE, 0x7FFFFF]).expand(512, 4)
    bits = torch.arange(512)[:, None] << 23 | torch.cat([mantissas, anything, ends], 1)
    # Subnormal float16 tie at odd halves of 2^-24.
    halves = (torch.arange(1, 2**12, 2) * 2.0**-25).view(torch.int32).long()
    bits = torch.cat([bits.flatten(), halves, halves + 1, halves - 1]).to(torch.int32)
    # The NaN of x86, Arm and Nvidia; others have become one of these by then.
    nan = torch.tensor([-0x400000, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    bits = torch.cat([bits[~bits.view(torch.float32).isnan()], nan])
    size = 1 << (bits.numel() - 1).bit_length()
    bits = torch.cat([bits, bits.new_zeros(size - bits.numel())])
    out = torch.empty_like(bits)
    name = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    _round_kernel[(1,)](bits, out, SIZE=size, DTYPE=name)
    rounded = (out >> 16).to(torch.int16).view(dtype)
    assert_same_bits(rounded, bits.view(torch.float32).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_are_no_numbers(dtype):
    """Also where rounding the NaN as it stands would carry into its sign."""
    bits = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001, -0x7FFFFF, 0x7FC00000, 0x7F800000, -0x800000])
    spec = NF4Spec.for_weight(16 * bits.numel(), 16, None)
    record = make_record((2,), spec)
    scales = record[:, spec.scales_offset_bytes :][:, : spec.scales_bytes]
    scales.copy_(bits.to(torch.int32).view(torch.uint8))
    assert_decodes(record, spec, dtype)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0, 3), (70,), (129,)])
def test_leading_dimensions_and_tiles(lead):
    for in_features in (33, 320):
        spec = NF4Spec.for_weight(in_features, 64, 2)
        record = reference.quantize(make_weight(lead, in_features, torch.float16), spec)
        assert_decodes(record, spec, torch.float16)


@pytest.mark.parametrize(
    ("in_row", "num_rows", "expected"),
    [
        (64, 9, (1, 64)),
        (224, 99, (2, 32)),
        (224, 1, (1, 64)),
        (172, 99, (1, 64)),
        (9, 999, (32, 2)),
        (9, 3, (2, 8)),
        (1, 99, (64, 1)),
        (1, 1, (1, 1)),
    ],
)
def test_tiles_are_wide_but_few(in_row, num_rows, expected):
    assert triton_dequantize.tile_of(in_row, num_rows) == expected


@pytest.mark.parametrize(
    ("dtype", "scale_block_size"), [(torch.bfloat16, 2), (torch.float16, None), (torch.float32, 2)]
)
def test_layouts(dtype, scale_block_size):
    """No base address is aligned, and no stride matters, of inputs and outputs alike."""
    spec = NF4Spec.for_weight(192, 64, scale_block_size)
    record = make_record((3, 4), spec)
    expected = reference.dequantize(record, spec, dtype)
    for view in layouts(record):
        assert_same_bits(triton_backend.dequantize(view, spec, dtype), expected)
    for out in layouts(torch.zeros_like(expected)):
        triton_backend.dequantize_into(record, spec, out)
        assert_same_bits(out, expected)


def test_stores_are_as_wide_as_addresses_allow():
    out = torch.zeros(64, dtype=torch.bfloat16)
    widths = [triton_dequantize.store_width(out[i:], 4096, 4) for i in range(5)]
    assert widths == [4, 1, 2, 1, 4]
    assert [triton_dequantize.store_width(out, n, 4) for n in (100, 102, 103)] == [4, 2, 1]


def test_views_write_only_their_own_bytes():
    spec = NF4Spec.for_weight(33, 16)
    record, buffer = make_record((3,), spec), torch.full((5, 33), 3.0)
    triton_backend.dequantize_into(record, spec, buffer[1:4])
    assert_same_bits(buffer[1:4], reference.dequantize(record, spec, torch.float32))
    assert set(buffer[[0, 4]].flatten().tolist()) == {3.0}


def test_nothing_behind_the_record_is_read():
    for in_features in (1, 64, 65, 577):
        spec = NF4Spec.for_weight(in_features)
        assert_decodes(before_a_wall(make_record((3,), spec)), spec, torch.bfloat16)


def test_a_phase_beyond_the_segments_stays_inside_the_row():
    """File readers refuse it; the kernels must not read past the row."""
    for segment_length in (2, 3 * 2**30):
        spec = NF4Spec(80, 16, "square8", segment_length, 3)
        record = make_record((1,), spec)
        start = spec.segments_offset_bytes
        for phase in (2, 5, 2**31 - 1, 2**31, 3 * 2**30, 2**32 - 1):
            record[0, start : start + 8] = torch.tensor([phase]).view(torch.uint8)
            assert_decodes(record, spec, torch.float32)


def test_rows_past_4_gigabytes(monkeypatch):
    """The last tile of 2^27 rows, of memory that is only reserved; no other tile runs."""
    spec, num_rows, last = NF4Spec.for_weight(16, 16, None), 2**27 + 65, 2**27 // 64 + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    record, out = (
        torch.frombuffer(mmap.mmap(-1, num_rows * 32, flags=flags), dtype=torch.uint8)
        for _ in range(2)
    )
    record, out = record.view(num_rows, spec.pitch), out.view(torch.bfloat16).view(num_rows, 16)
    record[-64:] = make_record((64,), spec)

    class LastTile:
        def __getitem__(self, grid):
            assert grid == (last + 1,)
            return kernel[(1,)]

    kernel, set_place = triton_dequantize._dequantize_kernel, interpreter_builder.set_grid_idx

    def set_last(x, y, z):
        interpreter_builder.set_grid_dim(last + 1, 1, 1)
        set_place(last, y, z)

    monkeypatch.setattr(triton_dequantize, "_dequantize_kernel", LastTile())
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_last)
    triton_backend.dequantize_into(record, spec, out)
    assert_same_bits(out[-64:], reference.dequantize(record[-64:], spec, torch.bfloat16))
