"""Which cuts and joins of a row are records again, and what their geometry is.

Integers only (README.md, clauses 8 and 9): bytes are moved by `tensor/columns.py`. A cut's spec
depends on its ends and on the old spec only, never on data.
"""

from dataclasses import dataclass, replace
from math import gcd

from nf4tensor.errors import SpecError
from nf4tensor.format.spec import MIN_BLOCK_SIZE, NF4Spec


@dataclass(frozen=True)
class Cut:
    """How the columns [start, stop) of a row become a row of their own.

    Attributes:
        spec: Geometry of the cut.
        repeats: Scales of the cut for one old scale: old block size over new.
        first_block: Index, in repeated scales, of the cut's first block.
    """

    spec: NF4Spec
    repeats: int
    first_block: int


def is_legal_cut(spec: NF4Spec, start: int, stop: int) -> bool:
    """Tell whether the columns [start, stop) of a row can be a record.

    Both ends must be multiples of 16, but the row's own ends always may.
    """
    if not 0 <= start < stop <= spec.in_features:
        return False
    return start % MIN_BLOCK_SIZE == 0 and (stop % MIN_BLOCK_SIZE == 0 or stop == spec.in_features)


def cut(spec: NF4Spec, start: int, stop: int) -> Cut:
    """Work out the record of columns [start, stop).

    Raises:
        SpecError: The cut is not legal.
    """
    if not is_legal_cut(spec, start, stop):
        raise SpecError(
            f"columns {start} to {stop} of {spec.in_features} cannot be cut: each end must be a "
            "multiple of "
            f"{MIN_BLOCK_SIZE} or the row's own; call dequantize() first, or choose other sizes"
        )
    block_size = gcd(spec.block_size, start)
    if stop != spec.in_features:
        block_size = gcd(block_size, stop)
    repeats = spec.block_size // block_size
    new_spec = replace(
        spec,
        in_features=stop - start,
        block_size=block_size,
        segment_length=spec.segment_length * repeats,
    )
    return Cut(new_spec, repeats, start // block_size)


def with_block_size(spec: NF4Spec, block_size: int) -> NF4Spec:
    """Return the geometry of the same row with every block split into blocks of `block_size`."""
    assert spec.block_size % block_size == 0, (spec, block_size)
    repeats = spec.block_size // block_size
    return replace(spec, block_size=block_size, segment_length=spec.segment_length * repeats)


def join(left: NF4Spec, right: NF4Spec) -> NF4Spec:
    """Work out the geometry of two rows side by side.

    The block size is the smaller one, small enough for the boundary to lie between two blocks.

    Raises:
        SpecError: The kinds, codebooks or segments differ, or the boundary is not a multiple of 16.
    """
    block_size = gcd(left.block_size, right.block_size, left.in_features)
    if block_size < MIN_BLOCK_SIZE:
        raise SpecError(
            f"columns cannot be joined at {left.in_features}, which is not a multiple of "
            f"{MIN_BLOCK_SIZE}: "
            "join what dequantize() returns"
        )
    left, right = with_block_size(left, block_size), with_block_size(right, block_size)
    if _segments(left) != _segments(right):
        raise SpecError(
            f"columns of different geometry cannot be joined: {left} and {right}: join what "
            "dequantize() returns"
        )
    return replace(left, in_features=left.in_features + right.in_features)


def _segments(spec: NF4Spec) -> tuple[str, int, int, str]:
    return spec.scale_kind, spec.segment_length, spec.num_segments, spec.quant_type
