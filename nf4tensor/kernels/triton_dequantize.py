"""Decoding a record with Triton: one kernel, compiled for each spec and dtype.

A program decodes a tile of up to 64 groups (see `triton_record.py`), several rows high where rows
are short. Called through `triton_backend.py`.
"""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from nf4tensor.format.spec import NF4Spec, ceil_div
from nf4tensor.kernels import triton_record
from nf4tensor.kernels.triton_record import load_codes, load_scales, look_up, scaled_levels

# As many groups as threads: one thread decodes the scale of a group for all its lanes. Stores are
# of 8 bytes for 16-bit weights, 128 bytes a group; making them 16 bytes costs a trip through
# shared memory: 0.8 instructions a weight.
MAX_TILE = 64
WIDTHS = (64, 32, 16, 8, 4, 2, 1)
NUM_WARPS = 2


def dequantize_into(record: Tensor, spec: NF4Spec, out: Tensor) -> None:
    """Decode a contiguous record `[*lead, pitch]` into a contiguous `out`, in its dtype."""
    num_rows = out.numel() // spec.in_features
    if num_rows == 0:
        return
    group, in_row = triton_record.group_of(spec), triton_record.num_groups_of(spec)
    rows, groups = tile_of(in_row, num_rows)
    _dequantize_kernel[(ceil_div(num_rows, rows) * ceil_div(in_row, groups),)](
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


@cache
def tile_of(in_row: int, num_rows: int) -> tuple[int, int]:
    """Choose the rows and groups of tiles, powers of two: wide ones, but few of them.

    Args:
        in_row: Groups in a row.
        num_rows: Rows, at least 1.
    """
    lowest = 1 << num_rows.bit_length() - 1
    tiles = [(min(MAX_TILE // groups, lowest), groups) for groups in WIDTHS if groups <= in_row]
    num_tiles = [ceil_div(num_rows, rows) * ceil_div(in_row, groups) for rows, groups in tiles]
    # Wide tiles read and write longer pieces; for that there may be an eighth more of them.
    return next(
        tile for tile, n in zip(tiles, num_tiles, strict=True) if 8 * n <= 9 * min(num_tiles)
    )


def store_width(out: Tensor, in_features: int, widest: int) -> int:
    """Return how many weights, `widest` at most, one store can write in every row."""
    width = widest
    while in_features % width or out.data_ptr() % (width * out.element_size()):
        width //= 2
    return width


@triton.jit
def _dequantize_kernel(
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
    """Decode ROWS rows of GROUPS groups.

    The last tiles of the weight and of a row are moved back to end there, over their neighbours,
    and write the same weights again: so only a short last group needs a mask.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    TILE: tl.constexpr = ROWS * GROUPS
    in_row: tl.constexpr = (SPEC.in_features + GROUP - 1) // GROUP
    tiles_in_row: tl.constexpr = (in_row + GROUPS - 1) // GROUPS
    tile = tl.program_id(0)
    first_row = tl.minimum(tile // tiles_in_row * ROWS, num_rows - ROWS).to(tl.int64)
    first_group = tl.minimum(tile % tiles_in_row * GROUPS, in_row - GROUPS).to(tl.int64)
    record += first_row * SPEC.pitch

    # Offsets are made of one range over all elements: then most are constants of the machine code.
    element = tl.reshape(tl.arange(0, TILE * 16), [TILE, 16])
    row, group, lane = element // (16 * GROUPS), element // 16 % GROUPS, element % 16
    # All bytes of a group are within the pitch, also those of a short one.
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
    # What Triton cannot see through the reshape.
    out = tl.multiple_of(out, [1, STORE * DTYPE.primitive_bitwidth // 8])
    out = tl.max_contiguous(out, [1, STORE]).to(tl.pointer_type(weights.dtype))
    if SPEC.in_features % GROUP == 0:
        tl.store(out, weights)
    else:
        inside = first_group * GROUP + column < SPEC.in_features
        tl.store(out, weights, mask=tl.max_constancy(inside, [1, STORE]))
