"""Decoding a record with Triton: one kernel, compiled for each spec and dtype.

A program decodes a tile of up to 64 groups (see `triton_record.py`), several rows high where rows
are short. Called through `triton_backend.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nf4tensor.format.spec import NF4Spec, ceil_div
from nf4tensor.kernels import triton_record
from nf4tensor.kernels.triton_record import load_codes, load_scales, look_up, scaled_levels

# 64 weights a lane: each of 64 threads then decodes one scale for all 16 lanes of its group.
MAX_TILE = 64
NUM_WARPS = 2


def dequantize_into(record: Tensor, spec: NF4Spec, out: Tensor) -> None:
    """Decode a contiguous record `[*lead, pitch]` into a contiguous `out`, in its dtype."""
    num_rows = out.numel() // spec.in_features
    if num_rows == 0:
        return
    rows, groups = tile_of(spec, num_rows)
    group = triton_record.group_of(spec)
    grid = (ceil_div(num_rows, rows) * ceil_div(triton_record.num_groups_of(spec), groups),)
    dequantize_kernel[grid](
        record,
        out,
        *triton_record.tables(spec.quant_type, record.device),
        num_rows,
        SPEC=spec,
        GROUP=group,
        ROWS=rows,
        GROUPS=groups,
        ALIGNED=triton_record.is_aligned(record),
        STORE=store_width(out, spec.in_features, group // triton_record.LANES),
        num_warps=NUM_WARPS,
        **triton_record.OPTIONS,
    )


def tile_of(spec: NF4Spec, num_rows: int) -> tuple[int, int]:
    """Choose the rows and groups, powers of two, of a tile that wastes an eighth at most."""
    in_row = triton_record.num_groups_of(spec)
    groups = MAX_TILE
    while groups > in_row or 8 * ceil_div(in_row, groups) * groups > 9 * in_row:
        groups //= 2
    rows = MAX_TILE // groups
    while rows > num_rows:
        rows //= 2
    return rows, groups


def store_width(out: Tensor, in_features: int, widest: int) -> int:
    """Return how many weights of a row, `widest` at most, one store may write."""
    width = widest
    while in_features % width or out.data_ptr() % (width * out.element_size()):
        width //= 2
    return width


@triton.jit
def dequantize_kernel(
    record,
    out,
    levels,
    dynamic_map,
    num_rows,
    SPEC: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    STORE: tl.constexpr,
):
    """Decode ROWS rows of GROUPS groups, the last ones again where a row or a weight has fewer."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    TILE: tl.constexpr = ROWS * GROUPS
    in_row: tl.constexpr = (SPEC.in_features + GROUP - 1) // GROUP
    tiles_in_row: tl.constexpr = (in_row + GROUPS - 1) // GROUPS
    tile = tl.program_id(0)
    first_row = tl.minimum(tile // tiles_in_row * ROWS, num_rows - ROWS).to(tl.int64)
    first_group = tl.minimum(tile % tiles_in_row * GROUPS, in_row - GROUPS).to(tl.int64)
    record += first_row * SPEC.pitch

    # Offsets come from a range over all elements, so that most of them are constants in the code.
    element = tl.reshape(tl.arange(0, TILE * 16), [TILE, 16])
    row, group, lane = element // (16 * GROUPS), element // 16 % GROUPS, element % 16
    # Groups end within the row's pitch, also where they end behind the codes.
    codes = record + first_group * (GROUP // 2) + (row * SPEC.pitch + group * (GROUP // 2))
    codes = load_codes(codes, lane, GROUP, ALIGNED)

    element = tl.arange(0, TILE)
    rows = record + element // GROUPS * SPEC.pitch
    block = (first_group + element % GROUPS) // (SPEC.block_size // GROUP)
    scale = load_scales(rows, block, dynamic_map, SPEC, ALIGNED)
    weights = look_up(scaled_levels(scale, levels, DTYPE), codes, GROUP, DTYPE)

    element = tl.reshape(tl.arange(0, TILE * GROUP), [TILE, GROUP])
    row, column = element // (GROUPS * GROUP), element % (GROUPS * GROUP)
    out += first_row * SPEC.in_features + first_group * GROUP
    out += row * SPEC.in_features + column
    out = tl.max_contiguous(tl.multiple_of(out, [1, STORE * DTYPE.primitive_bitwidth // 8]), [1, STORE])
    out = out.to(tl.pointer_type(weights.dtype))
    if SPEC.in_features % GROUP == 0:
        tl.store(out, weights)
    else:
        inside = first_group * GROUP + column < SPEC.in_features
        tl.store(out, weights, mask=tl.max_constancy(inside, [1, STORE]))
