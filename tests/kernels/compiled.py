"""What the tests of the compiled kernels share: when they run, and what they run on.

Weights and records here are delicate on purpose; conftest.py goes through the instruction sets.
"""

import contextlib
import ctypes
import math
import mmap

import pytest
import torch

from nf4tensor.errors import NF4TensorError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import native, select
from tests.oracle_tensors import INTEGERS

INFINITY = math.inf
_backends = {choice.op: choice.backend for choice in select.table() if choice.device == "cpu"}
needs_compiled = pytest.mark.skipif(
    _backends["quantize"] != "cpu",
    reason=f"compiled library not in use: {native.unavailable_because() or 'NF4TENSOR_BACKEND'}",
)


def usable_isas() -> list[str]:
    """The instruction sets of this processor; test_native_grid.py emulates the others."""
    if native.unavailable_because() is not None:
        return ["scalar"]
    best, usable = native.isa(), []
    for name in ("scalar", "neon", "avx2", "avx512", "avx512vbmi"):
        with contextlib.suppress(NF4TensorError):
            native.use_isa(name)
            usable.append(name)
    native.use_isa(best)
    return usable


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bit for bit, but for the bits of a NaN, which clause 6.3 leaves open."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = actual.nan_to_num(0.5, INFINITY), expected.nan_to_num(0.5, INFINITY)
    integer = INTEGERS[actual.dtype]
    assert torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer))


def make_weight(lead: tuple[int, ...], in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows over many decades: with zeros, subnormals of each dtype, and here and there a NaN."""
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(*lead, in_features, generator=generator)
    weight *= torch.exp2(torch.randint(-30, 15, weight.shape, generator=generator))
    weight[weight.abs() < 2.0**-26] = 0
    if in_features % 5 == 0:
        weight *= 2.0**-120
    if in_features % 7 == 0:
        weight.flatten()[-1:] = torch.nan if in_features % 2 else INFINITY
    return weight.to(dtype)


def make_record(lead: tuple[int, ...], spec: NF4Spec, seed: int = 0) -> torch.Tensor:
    """Any bytes at all, as an import could bring them: only the phase is a legal one."""
    generator = torch.Generator().manual_seed(seed)
    record = torch.randint(256, (*lead, spec.pitch), dtype=torch.uint8, generator=generator)
    if spec.scale_kind != "float32":
        room = spec.segment_length * spec.num_segments - spec.num_blocks
        phase = torch.randint(room + 1, (*lead, 1), generator=generator)
        start = spec.segments_offset_bytes
        record[..., start : start + 8] = phase.view(torch.uint8)
    return record


def layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same values: off alignment by one element, with gaps between rows, and transposed."""
    shifted = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    gaps = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 3)[..., 1:-2]
    transposed = tensor.new_empty(tensor.shape[::-1]).permute(*range(tensor.dim())[::-1])
    return [view.copy_(tensor) for view in (shifted, gaps, transposed)]


def before_a_wall(tensor: torch.Tensor) -> torch.Tensor:
    """The same values right before memory that nobody may touch: whoever reads on crashes."""
    num_bytes = tensor.numel() * tensor.element_size()
    wall = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = torch.frombuffer(mmap.mmap(-1, wall + mmap.PAGESIZE), dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(buffer.data_ptr() + wall, mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    return buffer[wall - num_bytes : wall].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def make_finite_record(lead: tuple[int, ...], spec: NF4Spec, seed: int = 0) -> torch.Tensor:
    """Any codes, with scales that every dtype holds: from 2^-149 to 1, of either sign, and zeros.

    The scales of segments are made up of a step and a base, whatever bytes the blocks have.
    """
    record = make_record(lead, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    start = spec.scales_offset_bytes
    count = spec.num_blocks
    if spec.scale_kind != "float32":
        start, count = spec.segments_offset_bytes + 8, 2 * spec.num_segments
    floats = torch.exp2(-torch.randint(17, 150, (*lead, count), generator=generator).float())
    if spec.scale_kind == "float32":
        floats[..., ::2] *= 2.0**16
    floats *= 1 + torch.rand(floats.shape, generator=generator)
    floats[torch.rand(floats.shape, generator=generator) < 0.1] = 2.0**-149
    floats[torch.rand(floats.shape, generator=generator) < 0.1] = 0.0
    floats *= torch.randint(2, floats.shape, generator=generator) * 2 - 1
    record[..., start : start + 4 * count] = floats.contiguous().view(torch.uint8)
    return record
