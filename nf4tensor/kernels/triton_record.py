"""Reading a record in Triton: scales, codes and the weights that they stand for.

Only functions for the kernels of `triton_dequantize.py` and `triton_linear.py`, and the constant
tensors that these are given. Every kernel decodes through here, so all have the same bits.

Sixteen lanes decode a *group*, up to 64 weights of one block: each lane scales and rounds one
level, then each weight is a shuffle of these. That costs a quarter of rounding every weight, so
rounding is done in integers: the same wherever conversions truncate or flush subnormals.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nf4tensor.errors import UnsupportedError
from nf4tensor.format.codebook import DYNAMIC_MAP, LEVELS
from nf4tensor.format.spec import NF4Spec, ceil_div

LANES = 16
MAX_GROUP = 64
# For every launch. No multiply-add: a scale is two roundings.
OPTIONS = {"enable_fp_fusion": False}


@cache
def tables(quant_type: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 16 levels and the 256 entries of the 8-bit map as float32 on a device.

    Raises:
        UnsupportedError: The first call for a device is inside of a CUDA graph's capture, which
            would fill them only when the graph is replayed.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"the first use of {quant_type} weights on {device} is inside of a CUDA graph's "
            "capture: make the call once before, which also compiles its kernel"
        )
    # Tensors and not constants in the code: a lane loads its level once, while choosing one of 16
    # constants is a select for each.
    return (
        torch.tensor(LEVELS[quant_type], dtype=torch.float32, device=device),
        torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=device),
    )


def group_of(spec: NF4Spec) -> int:
    """Return the weights in a group; a block is one group or several."""
    return min(spec.block_size, MAX_GROUP)


def num_groups_of(spec: NF4Spec) -> int:
    """Return the groups in a row; the last may be short."""
    return ceil_div(spec.in_features, group_of(spec))


def is_aligned(record: Tensor) -> bool:
    """Tell whether the numbers in a contiguous record lie at multiples of their sizes."""
    return record.data_ptr() % 4 == 0


@triton.jit
def load_word(pointer, ALIGNED: tl.constexpr):
    """Load four bytes as uint32, the first lowest, from each of some byte pointers."""
    if ALIGNED:
        word = tl.load(pointer.to(tl.pointer_type(tl.uint32)))
    else:
        word = tl.load(pointer).to(tl.uint32)
        for i in tl.static_range(1, 4):
            word |= tl.load(pointer + i).to(tl.uint32) << (8 * i)
    return word


@triton.jit
def load_scales(rows, block, dynamic_map, SPEC: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the float32 scales of blocks, each given by its row's pointer and its index."""
    scales = rows + SPEC.scales_offset_bytes
    if SPEC.scale_kind == "float32":
        scale = load_word(scales + 4 * block, ALIGNED).to(tl.float32, bitcast=True)
    else:
        segments = rows + SPEC.segments_offset_bytes
        pairs = segments + 8
        if SPEC.num_segments > 1:
            place = load_word(segments, ALIGNED).to(tl.int64) + block
            # No phase leads out of the row, not even one that no file reader accepts.
            pairs += 8 * tl.minimum(place // SPEC.segment_length, SPEC.num_segments - 1)
        step = load_word(pairs, ALIGNED).to(tl.float32, bitcast=True)
        base = load_word(pairs + 4, ALIGNED).to(tl.float32, bitcast=True)
        q = tl.load(scales + block).to(tl.int32)
        if SPEC.scale_kind == "square8":
            level = (q * q).to(tl.float32)
        else:
            level = tl.load(dynamic_map + q)
        scale = level * step + base
    return with_one_nan(scale)


@triton.jit
def with_one_nan(x):
    """Return float32 numbers with one NaN in place of all, for `round_bits`."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x != x, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_bits(x, DTYPE: tl.constexpr):
    """Round float32 numbers to DTYPE, to nearest even: its bits are the highest of uint32.

    A NaN must be that of `with_one_nan`, or what an operation made of it.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE == tl.bfloat16:
        # Nvidia's operations make 7FFFFFFF, which would round up to -0.
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFF7FFF).to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
    elif DTYPE == tl.float16:
        magnitude = bits & 0x7FFFFFFF
        # Infinity from 2^16 on, and the float16 NaN.
        capped = tl.where(magnitude > 0x7F800000, 0x47C00000, tl.minimum(magnitude, 0x47800000))
        normal = ((capped + 0xFFF + ((capped >> 13) & 1)) >> 13) - (112 << 10)
        # From 0.5 to 1, the steps of float32 are those of a subnormal float16.
        shifted = magnitude.to(tl.float32, bitcast=True) + 0.5
        subnormal = shifted.to(tl.uint32, bitcast=True) - 0x3F000000
        bits &= 0x80000000
        bits |= tl.where(magnitude < 0x38800000, subnormal, normal) << 16
    else:
        tl.static_assert(DTYPE == tl.float32)
    return bits


@triton.jit
def widened(x):
    """Return 16-bit floats as float32; the interpreter's own cast spoils subnormal bfloat16."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def scaled_levels(scale, levels, DTYPE: tl.constexpr):
    """Return the 16 weights that each group can have, as `round_bits` does: [groups, 16]."""
    level = tl.load(levels + tl.arange(0, 16))
    return round_bits(scale[:, None] * level[None, :], DTYPE)


@triton.jit
def load_codes(codes, lane, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the codes of each lane's weights as int32 [groups, 16], the first byte lowest.

    `codes` points at the bytes of each lane's group, `lane` is from 0 to 15.
    """
    if GROUP == 64:
        codes += 2 * lane
        if ALIGNED:
            loaded = tl.load(codes.to(tl.pointer_type(tl.uint16))).to(tl.int32)
        else:
            loaded = tl.load(codes).to(tl.int32) | (tl.load(codes + 1).to(tl.int32) << 8)
    elif GROUP == 32:
        loaded = tl.load(codes + lane).to(tl.int32)
    else:
        tl.static_assert(GROUP == 16)
        loaded = tl.load(codes + lane // 2).to(tl.int32) >> (4 * (1 - lane % 2))
    return loaded


@triton.jit
def look_up(table, codes, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """Return the bits of weights in their order, as unsigned integers [groups, GROUP]."""
    NUM_GROUPS: tl.constexpr = table.shape[0]
    # Two groups side by side fill a warp: then an index is the lane to shuffle from, and the number
    # of the group can be put into several of them at once. For one group after the other, Triton
    # does that for each weight: 6.4 instructions in place of 5.9.
    BESIDE: tl.constexpr = 2 if NUM_GROUPS > 1 else 1
    table = tl.reshape(table, [NUM_GROUPS // BESIDE, 16 * BESIDE])
    codes = tl.reshape(codes, [NUM_GROUPS // BESIDE, 16 * BESIDE])
    first = (tl.arange(0, 16 * BESIDE) // 16 * 16)[None, :]
    if GROUP == 64:
        # Two indices in 16 bits. Each join adds a dimension behind: [.., lane, byte, nibble], the
        # high nibble first.
        high = ((codes >> 4) & 0x0F0F) | (first * 0x101)
        low = (codes & 0x0F0F) | (first * 0x101)
        weights = tl.join(
            tl.join(tl.gather(table, high & 31, 1), tl.gather(table, high >> 8, 1)),
            tl.join(tl.gather(table, low & 31, 1), tl.gather(table, low >> 8, 1)),
        )
    elif GROUP == 32:
        high, low = (codes >> 4) | first, (codes & 15) | first
        weights = tl.join(tl.gather(table, high, 1), tl.gather(table, low, 1))
    else:
        weights = tl.gather(table, (codes & 15) | first, 1)
    if DTYPE != tl.float32:
        weights = (weights >> 16).to(tl.uint16)
    return tl.reshape(weights, [NUM_GROUPS, GROUP])
