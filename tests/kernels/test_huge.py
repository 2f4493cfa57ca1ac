"""Tensors past 2^31 elements and 2^32 bytes, in a few megabytes of memory.

The same few pages are mapped over and over into a range of addresses, so the kernels compute
everything and every offset is real. The number of bytes of these pages does not divide 2^32: an
offset that lost its upper bits ends among the wrong rows.
"""

import contextlib
import ctypes
import mmap
import os

import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import native, ops, reference, select

_backends = {choice.op: choice.backend for choice in select.table() if choice.device == "cpu"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _backends["quantize"] != "cpu",
        reason=f"compiled library not in use: {native.unavailable_because() or 'by choice'}",
    ),
]

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of Linux
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MANY = 384  # rows, or blocks of a row, that repeat
WIDTH = 4096


@pytest.fixture(scope="module")
def libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    library.mmap.restype = pointer
    library.mmap.argtypes = [pointer, ctypes.c_size_t, integer, integer, integer, ctypes.c_int64]
    library.munmap.argtypes = [pointer, ctypes.c_size_t]
    return library


@pytest.fixture
def repeat(libc):
    """Return a function of a tensor and a size: bytes that repeat the tensor, then fresh ones."""

    def map_pages(address: int | None, num_bytes: int, flags: int, file: int) -> int:
        found = libc.mmap(address, num_bytes, READ_WRITE, flags, file, 0)
        assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return found

    with contextlib.ExitStack() as stack:

        def repeat(tensor: torch.Tensor, times: int, num_fresh: int = 0) -> torch.Tensor:
            content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert len(content) % mmap.PAGESIZE == 0
            assert 2**32 % len(content) != 0
            file = os.memfd_create("window")
            stack.callback(os.close, file)
            os.write(file, content)
            total = len(content) * times + num_fresh
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            start = map_pages(None, total, flags, -1)
            stack.callback(libc.munmap, start, total)
            for i in range(times):
                shared = mmap.MAP_SHARED | MAP_FIXED
                map_pages(start + i * len(content), len(content), shared, file)
            buffer = (ctypes.c_uint8 * total).from_address(start)
            return torch.frombuffer(buffer, dtype=torch.uint8)

        yield repeat


def test_many_rows_dequantize(repeat):
    spec = NF4Spec.for_weight(WIDTH, 16, None)
    record = reference.quantize(torch.randn(MANY, WIDTH), spec)
    times = 2**32 // record.numel() + 2
    records = repeat(record, times).view(-1, spec.pitch)
    out = repeat(torch.zeros(MANY, WIDTH, dtype=torch.bfloat16), times)
    ops.dequantize_into(records, spec, out.view(torch.bfloat16).view(-1, WIDTH))
    expected = reference.dequantize(record, spec, torch.bfloat16)
    assert torch.equal(
        out[-2 * expected.numel() :].view(torch.bfloat16).view_as(expected), expected
    )


def test_many_rows_quantize(repeat):
    spec = NF4Spec.for_weight(WIDTH, 16, None)
    weight = torch.randn(MANY, WIDTH).to(torch.bfloat16)
    expected = reference.quantize(weight, spec)
    times = 2**31 // weight.numel() + 2
    weights = repeat(weight, times).view(torch.bfloat16).view(-1, WIDTH)
    records = repeat(torch.zeros_like(expected), times)
    ops.quantize_into(weights, spec, records.view(-1, spec.pitch))
    assert torch.equal(records[-expected.numel() :].view_as(expected), expected)


def test_one_wide_row(repeat):
    """Blocks of 4096: the scales of two thousand million weights are two megabytes."""
    spec = NF4Spec.for_weight(MANY * WIDTH, 4096, None)
    weight = torch.randn(spec.in_features).to(torch.bfloat16)
    record = reference.quantize(weight, spec)
    codes, scales = record[: spec.codes_bytes], record[spec.codes_bytes :][: 4 * MANY]
    times = 2**31 // spec.in_features + 1
    wide = NF4Spec.for_weight(times * spec.in_features, 4096, None)
    assert wide.in_features > 2**31

    row = repeat(torch.zeros_like(codes), times, wide.pitch - wide.codes_bytes)
    ops.quantize_into(repeat(weight, times).view(torch.bfloat16), wide, row)
    assert torch.equal(row[wide.codes_bytes - spec.codes_bytes : wide.codes_bytes], codes)
    assert torch.equal(
        row[wide.codes_bytes :][: 4 * MANY * times].view(times, -1), scales.expand(times, -1)
    )

    out = repeat(torch.zeros_like(weight), times).view(torch.bfloat16)
    ops.dequantize_into(row, wide, out)
    expected = reference.dequantize(record, spec, torch.bfloat16)
    assert torch.equal(out[-spec.in_features :], expected)
