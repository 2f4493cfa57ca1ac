"""Products of a record with few inputs in Triton, without a decoded weight in memory.

A program multiplies 16 rows of the weight with all inputs. In each step every one of 8 slices
decodes a group of each row (see `triton_record.py`) and multiplies it into sums of its own, on
matrix units. Called through `triton_backend.py`.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nf4tensor.format.spec import NF4Spec, ceil_div
from nf4tensor.kernels import triton_record
from nf4tensor.kernels.triton_record import (
    load_codes,
    load_scales,
    look_up,
    round_bits,
    scaled_levels,
    widened,
    with_one_nan,
)

# Counted, never measured: no GPU was at hand. A fused weight costs 8 to 13 instructions, half a
# byte of memory and, with 32 inputs, 4 bytes out of the L2; one that is decoded first costs 6
# instructions and 6.5 bytes of memory. More inputs would cost registers and L2 first.
# bitsandbytes measured for its own kernels: they win up to 32 inputs on B200, 64 on H100, 128 on
# A100.
MAX_INPUTS = 32
# So that columns are 32-bit numbers.
MAX_IN_FEATURES = 1 << 30
ROWS = 16
SLICES = 8
NUM_WARPS = 4


def can_fuse(input: Tensor, record: Tensor, spec: NF4Spec) -> bool:
    """Tell whether the kernel takes a product; float32 would become TF32 on matrix units."""
    return (
        input.dtype in (torch.bfloat16, torch.float16)
        and record.dim() == 2
        and _has_matrix_units(record.device)
        and input.numel() <= MAX_INPUTS * spec.in_features
        and spec.in_features <= MAX_IN_FEATURES
    )


@cache
def _has_matrix_units(device: torch.device) -> bool:
    # That Triton knows. For 7.5 it multiplies without: 31 instructions a weight and, with 32
    # inputs, 3.6 KB of spilled registers. Decoding for torch's own product takes 5.8 there.
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def linear(input: Tensor, record: Tensor, spec: NF4Spec, bias: Tensor | None) -> Tensor:
    """Return `input @ W.T + bias` of contiguous `[*, in_features]`, `[rows, pitch]`, `[rows]`."""
    num_rows, num_inputs = record.shape[0], input.numel() // spec.in_features
    output = input.new_empty(*input.shape[:-1], num_rows)
    if output.numel() == 0:
        return output
    _linear_kernel[(ceil_div(num_rows, ROWS),)](
        input,
        record,
        bias,
        output,
        *triton_record.tables(spec.quant_type, record.device),
        num_inputs,
        num_rows,
        SPEC=spec,
        GROUP=triton_record.group_of(spec),
        INPUTS=16 if num_inputs <= 16 else MAX_INPUTS,
        ROWS=ROWS,
        SLICES=SLICES,
        ALIGNED=triton_record.is_aligned(record),
        # The interpreter, which alone runs on the CPU, multiplies the bits of bfloat16.
        WIDEN=input.device.type == "cpu",
        num_warps=NUM_WARPS,
        num_stages=2,
        **triton_record.OPTIONS,
    )
    return output


@triton.jit
def _load_codes(
    record, row, group, lane, SPEC: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr
):
    """Load the codes of groups; behind the row's end, those of its last group."""
    in_row: tl.constexpr = (SPEC.in_features + GROUP - 1) // GROUP
    offset = row * SPEC.pitch + tl.minimum(group, in_row - 1) * (GROUP // 2)
    return load_codes(record + offset, lane, GROUP, ALIGNED)


@triton.jit
def _load_scales(
    record, row, group, dynamic_map, SPEC: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr
):
    """Load the scales of groups; zero behind the row's end."""
    in_row: tl.constexpr = (SPEC.in_features + GROUP - 1) // GROUP
    block = tl.minimum(group, in_row - 1) // (SPEC.block_size // GROUP)
    scale = load_scales(record + row * SPEC.pitch, block, dynamic_map, SPEC, ALIGNED)
    return tl.where(group < in_row, scale, 0.0)


@triton.jit
def _linear_kernel(
    input,
    record,
    bias,
    output,
    levels,
    dynamic_map,
    num_inputs,
    num_rows,
    SPEC: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write ROWS columns of the output `[num_inputs, num_rows]`."""
    DTYPE: tl.constexpr = input.dtype.element_ty
    TILE: tl.constexpr = SLICES * ROWS
    in_row: tl.constexpr = (SPEC.in_features + GROUP - 1) // GROUP
    first_row = tl.program_id(0) * ROWS

    # Rows and inputs that are not there are the last ones again, which are not stored.
    element = tl.reshape(tl.arange(0, TILE * 16), [TILE, 16])
    code_row = tl.minimum(first_row + element // 16 % ROWS, num_rows - 1).to(tl.int64)
    code_group, lane = element // (16 * ROWS), element % 16
    element = tl.arange(0, TILE)
    scale_row = tl.minimum(first_row + element % ROWS, num_rows - 1).to(tl.int64)
    scale_group = element // ROWS
    place = tl.minimum(tl.arange(0, INPUTS), num_inputs - 1).to(tl.int64)
    column = (tl.arange(0, SLICES) * GROUP)[:, None, None] + tl.arange(0, GROUP)[None, :, None]
    input += (place * SPEC.in_features)[None, None, :] + column

    sums = tl.zeros([SLICES, ROWS, INPUTS], tl.float32)
    codes = _load_codes(record, code_row, code_group, lane, SPEC, GROUP, ALIGNED)
    scale = _load_scales(record, scale_row, scale_group, dynamic_map, SPEC, GROUP, ALIGNED)
    for first in range(0, in_row, SLICES):
        # The next step's loads go first, so that the memory works while this one is decoded.
        ahead = first + SLICES
        next_codes = _load_codes(record, code_row, ahead + code_group, lane, SPEC, GROUP, ALIGNED)
        next_scale = _load_scales(
            record, scale_row, ahead + scale_group, dynamic_map, SPEC, GROUP, ALIGNED
        )
        weights = look_up(scaled_levels(scale, levels, DTYPE), codes, GROUP, DTYPE)
        weights = tl.reshape(weights.to(DTYPE, bitcast=True), [SLICES, ROWS, GROUP])
        if SPEC.in_features % (SLICES * GROUP) == 0:
            x = tl.load(input + first * GROUP)
        else:
            inside = column < SPEC.in_features - first * GROUP
            x = tl.load(input + first * GROUP, mask=inside, other=0.0)
            if SPEC.in_features % GROUP != 0:
                # An infinite weight times nothing would be NaN.
                weights = tl.where(tl.permute(inside, [0, 2, 1]), weights, 0.0)
        if WIDEN:
            weights, x = widened(weights), widened(x)
        sums = tl.dot(weights, x, sums)
        codes, scale = next_codes, next_scale

    row, place = first_row + tl.arange(0, ROWS), tl.arange(0, INPUTS)
    total = tl.sum(sums, 0)
    if bias is not None:
        total += widened(tl.load(bias + row, mask=row < num_rows, other=0.0))[:, None]
    rounded = (round_bits(with_one_nan(total), DTYPE) >> 16).to(tl.uint16)
    output += place.to(tl.int64)[None, :] * num_rows + row[:, None]
    there = (row < num_rows)[:, None] & (place < num_inputs)[None, :]
    tl.store(output, rounded.to(DTYPE, bitcast=True), mask=there)
