"""The format in plain PyTorch: the oracle of every other backend, and the fallback on every device.

Arithmetic only, one float32 operation at a time as the specification (`format/README.md`)
prescribes. Called through `ops.py`; tests call it directly. Rows are worked through in chunks, so
that temporaries stay small.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nf4tensor.format.codebook import (
    DYNAMIC_MAP,
    FP4_CODE_BY_COUNT,
    FP4_THRESHOLDS,
    LEVELS,
    NF4_THRESHOLDS,
    ZERO_CODE,
)
from nf4tensor.format.spec import NF4Spec

_CHUNK_ELEMENTS = 1 << 20


@cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Cached, so that decoding on a GPU does not wait for a copy from the host.
    return torch.tensor(values, dtype=dtype, device=device)


def _row_chunks(num_rows: int, spec: NF4Spec) -> Iterator[slice]:
    chunk = max(1, _CHUNK_ELEMENTS // spec.in_features)
    return (slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk))


class Parts(NamedTuple):
    """What the bytes of a record are.

    Attributes:
        packed: Codes, two a byte, uint8 `[rows, codes_bytes]`.
        scales: As they are stored, `[rows, num_blocks]`: float32, or the uint8 of 8-bit scales.
        phase: int64 `[rows]`; None for float32 scales, like the next.
        pairs: (step, base) of each segment, float32 `[rows, num_segments, 2]`.
    """

    packed: Tensor
    scales: Tensor
    phase: Tensor | None = None
    pairs: Tensor | None = None


# Quantization


def quantize(weight: Tensor, spec: NF4Spec) -> Tensor:
    """Return the record `[*lead, pitch]` of a float weight `[*lead, in_features]`, with phase 0."""
    rows = weight.reshape(-1, spec.in_features)
    phase = torch.zeros(rows.shape[0], dtype=torch.int64, device=weight.device)
    return _quantize_rows(rows, spec, phase).view(*weight.shape[:-1], spec.pitch)


def quantize_into(weight: Tensor, spec: NF4Spec, record: Tensor) -> None:
    """Write a float weight over a record, keeping the phase of each row."""
    phase = read_phase(record.reshape(-1, spec.pitch), spec)
    rows = _quantize_rows(weight.reshape(-1, spec.in_features), spec, phase)
    record.copy_(rows.view(record.shape))


def _quantize_rows(weight: Tensor, spec: NF4Spec, phase: Tensor) -> Tensor:
    record = torch.zeros(weight.shape[0], spec.pitch, dtype=torch.uint8, device=weight.device)
    for rows in _row_chunks(weight.shape[0], spec):
        _quantize_chunk(weight[rows], spec, phase[rows], record[rows])
    return record


def _quantize_chunk(weight: Tensor, spec: NF4Spec, phase: Tensor, record: Tensor) -> None:
    missing = spec.num_blocks * spec.block_size - spec.in_features
    blocks = F.pad(weight.float(), (0, missing)).unflatten(-1, (spec.num_blocks, spec.block_size))
    absmax = blocks.abs().amax(-1)
    finite = absmax.isfinite()
    usable = (finite & (absmax > 0)).unsqueeze(-1)
    # Blocks of zeros, and those with a NaN or an infinity, store the zero code.
    normalized = torch.where(usable, blocks / absmax.unsqueeze(-1), 0.0).flatten(-2)
    codes = _encode(normalized[:, : 2 * spec.codes_bytes].contiguous(), spec)
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]

    absmax = torch.where(finite, absmax, torch.nan)
    if spec.scale_kind == "float32":
        _write(record, spec, Parts(packed, absmax))
    else:
        q, pairs = _square8(absmax, spec, phase)
        _write(record, spec, Parts(packed, q, phase, pairs))


def _encode(normalized: Tensor, spec: NF4Spec) -> Tensor:
    """Return the codes (uint8) of weights divided by their block's absmax."""
    device = normalized.device
    if spec.quant_type == "nf4":
        thresholds = _constant(NF4_THRESHOLDS, torch.float32, device)
        return torch.bucketize(normalized, thresholds, out_int32=True).to(torch.uint8)
    thresholds = _constant(FP4_THRESHOLDS, torch.float32, device)
    count = torch.bucketize(normalized.abs(), thresholds, out_int32=True)
    magnitude = _constant(FP4_CODE_BY_COUNT, torch.uint8, device)[count]
    return magnitude + 8 * ((normalized < 0) & (count > 0)).to(torch.uint8)


def _square8(absmax: Tensor, spec: NF4Spec, phase: Tensor) -> tuple[Tensor, Tensor]:
    """Fit `fl(fl(q * q * step) + base)` to the absmax of each segment's blocks that are not zero.

    Returns:
        q as uint8 `[rows, num_blocks]` and the pairs (step, base) as float32 `[rows, num_segments,
        2]`.
    """
    segment = segment_of_blocks(spec, phase)
    positive = absmax > 0
    empty = absmax.new_full((absmax.shape[0], spec.num_segments), torch.inf)
    # A NaN wins every reduction, so that its whole segment becomes NaN.
    highest = (-empty).scatter_reduce(1, segment, absmax, "amax")
    lowest = empty.scatter_reduce(1, segment, torch.where(absmax == 0, torch.inf, absmax), "amin")
    is_nan = highest.isnan()
    base = torch.where(lowest.isinf(), 0.0, lowest)
    # A tensor, not a Python number: CUDA divides by a number with its reciprocal.
    max_square = _constant((255.0 * 255.0,), torch.float32, absmax.device)
    step = torch.where(lowest.isinf(), 0.0, (highest - base) / max_square)
    overflows = (step * max_square + base).isinf()
    step = torch.where(overflows, step.nextafter(torch.zeros_like(step)), step)

    step_of_block, base_of_block = step.gather(1, segment), base.gather(1, segment)
    square = (absmax - base_of_block) / step_of_block
    # torch's float32 square root is an ulp off on some processors; by way of float64 it is not.
    root = square.double().sqrt().float().round().clamp(0, 255)
    q = torch.where(positive & (step_of_block > 0), root, 0.0).to(torch.uint8)
    pairs = torch.stack([step, base], -1)
    return q, torch.where(is_nan.unsqueeze(-1), torch.nan, pairs)


def assemble(parts: Parts, spec: NF4Spec) -> Tensor:
    """Return the record `[rows, pitch]` of its parts: bytes are moved, nothing is computed."""
    packed = parts.packed
    record = torch.zeros(packed.shape[0], spec.pitch, dtype=torch.uint8, device=packed.device)
    _write(record, spec, parts)
    return record


def _write(record: Tensor, spec: NF4Spec, parts: Parts) -> None:
    record[:, : spec.codes_bytes] = parts.packed
    start = spec.scales_offset_bytes
    scales = parts.scales.contiguous().view(torch.uint8)
    record[:, start : start + spec.scales_bytes] = scales
    if parts.phase is None or parts.pairs is None:
        return
    start = spec.segments_offset_bytes
    record[:, start : start + 8] = parts.phase.contiguous().view(torch.uint8).view(-1, 8)
    record[:, start + 8 : spec.end_bytes] = parts.pairs.flatten(1).contiguous().view(torch.uint8)


# Dequantization


def dequantize(record: Tensor, spec: NF4Spec, dtype: torch.dtype) -> Tensor:
    """Return the weight `[*lead, in_features]` of a record `[*lead, pitch]` in `dtype`."""
    out = torch.empty(*record.shape[:-1], spec.in_features, dtype=dtype, device=record.device)
    dequantize_into(record, spec, out)
    return out


def dequantize_into(record: Tensor, spec: NF4Spec, out: Tensor) -> None:
    """Decode a record into `out`, in its dtype."""
    rows = record.reshape(-1, spec.pitch)
    target = (
        out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    target_rows = target.view(-1, spec.in_features)
    for chunk in _row_chunks(rows.shape[0], spec):
        target_rows[chunk] = _dequantize_chunk(rows[chunk], spec)
    if target is not out:
        out.copy_(target)


def linear(input: Tensor, record: Tensor, spec: NF4Spec, bias: Tensor | None = None) -> Tensor:
    """Return `input @ W.T + bias` by torch's own product; stacks of W broadcast.

    Args:
        input: `[*, in_features]`, of the dtype that W `[*lead, out_features, in_features]` is
            decoded to.
        record: `[*lead, out_features, pitch]`.
        spec: of the record.
        bias: `[out_features]` of the input's dtype.
    """
    return multiply(input, dequantize(record, spec, input.dtype), bias)


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `input @ weight.T + bias` for a weight or a stack of them."""
    if weight.dim() == 2:
        return F.linear(input, weight, bias)
    output = input @ weight.mT
    return output if bias is None else output + bias


def _dequantize_chunk(record: Tensor, spec: NF4Spec) -> Tensor:
    """Return float32 weights: level times scale, one rounding; the caller's cast is the second."""
    packed = record[:, : spec.codes_bytes]
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten(1)
    levels = _constant(LEVELS[spec.quant_type], torch.float32, record.device)[codes.int()]
    missing = spec.num_blocks * spec.block_size - levels.shape[1]
    blocks = F.pad(levels, (0, missing)).unflatten(-1, (spec.num_blocks, spec.block_size))
    weight = blocks * read_scales(record, spec).unsqueeze(-1)
    return weight.flatten(1)[:, : spec.in_features]


def read_scales(record: Tensor, spec: NF4Spec) -> Tensor:
    """Return the float32 scale of every block `[rows, num_blocks]` of a record `[rows, pitch]`."""
    start = spec.scales_offset_bytes
    stored = record[:, start : start + spec.scales_bytes]
    if spec.scale_kind == "float32":
        return _as_float32(stored)
    step, base = read_pairs_of_blocks(record, spec)
    if spec.scale_kind == "square8":
        level = stored.float().square()
    else:
        level = _constant(DYNAMIC_MAP, torch.float32, record.device)[stored.int()]
    return level * step + base


def read_phase(record: Tensor, spec: NF4Spec) -> Tensor:
    """Return the phase (int64) of each row of a record `[rows, pitch]`; 0 for float32 scales."""
    if spec.scale_kind == "float32":
        return torch.zeros(record.shape[0], dtype=torch.int64, device=record.device)
    start = spec.segments_offset_bytes
    # Eight bytes: the upper four are zero by the format.
    return _contiguous(record[:, start : start + 8]).view(torch.int64).flatten() & 0xFFFFFFFF


def read_pairs(record: Tensor, spec: NF4Spec) -> Tensor:
    """Return the (step, base) pairs as float32 `[rows, num_segments, 2]`."""
    start = spec.segments_offset_bytes + 8
    return _as_float32(record[:, start : spec.end_bytes]).unflatten(-1, (spec.num_segments, 2))


def read_pairs_of_blocks(record: Tensor, spec: NF4Spec) -> tuple[Tensor, Tensor]:
    """Return the step and the base of every block's segment, float32 `[rows, num_blocks]` each."""
    segment = segment_of_blocks(spec, read_phase(record, spec))
    pairs = read_pairs(record, spec)
    return pairs[..., 0].gather(1, segment), pairs[..., 1].gather(1, segment)


def segment_of_blocks(spec: NF4Spec, phase: Tensor) -> Tensor:
    """Return the segment index of every block `[rows, num_blocks]`, kept inside the row."""
    block = torch.arange(spec.num_blocks, device=phase.device)
    segment = (phase.unsqueeze(-1) + block) // spec.segment_length
    return segment.clamp_(max=spec.num_segments - 1)


def zero_record(lead: tuple[int, ...], spec: NF4Spec, device: torch.device) -> Tensor:
    """Return zero rows: zero codes, with scales, phase and pairs zero. Never all zero bytes."""
    record = torch.zeros(*lead, spec.pitch, dtype=torch.uint8, device=device)
    record[..., : spec.codes_bytes] = ZERO_CODE[spec.quant_type] * 0x11
    return record


def _contiguous(values: Tensor) -> Tensor:
    # Not `contiguous()`: a single row is contiguous at an offset that float32 cannot view.
    return values.clone(memory_format=torch.contiguous_format)


def _as_float32(values: Tensor) -> Tensor:
    return _contiguous(values).view(torch.float32)
