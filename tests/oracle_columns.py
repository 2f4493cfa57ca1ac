"""Cuts and joins of columns in plain Python: the other half of `oracle.py`.

Written from clauses 8 and 9 of `nf4tensor/format/README.md`, independent of `format/layout.py` and
of the tensor. A join that the specification refuses is None here.
"""

import math

from tests.oracle import ZERO_CODE, Parts, Spec, assemble, take_apart, to_bits


def pairs_bits(parts: Parts) -> list[int]:
    """Return the float32 bits of all pairs: clause 9.3 compares bytes, not numbers."""
    return [to_bits(number) for pair in parts.pairs for number in pair]


def is_zero(record: bytes, spec: Spec) -> bool:
    """Clause 9.4: a zero row, or a cut of one, which has a phase."""
    parts = take_apart(record, spec)
    zero_codes = set(parts.codes[: spec.in_features]) == {ZERO_CODE[spec.quant_type]}
    return zero_codes and not any(parts.scales) and not any(pairs_bits(parts))


def split_blocks(record: bytes, spec: Spec, block_size: int) -> tuple[Parts, Spec]:
    """Clause 8.4: the same row in smaller blocks; scales are repeated, pairs stay."""
    f = spec.block_size // block_size
    new = spec._replace(block_size=block_size, segment_length=f * spec.segment_length)
    parts = take_apart(record, spec)
    repeated = [scale for scale in parts.scales for _ in range(f)][: new.blocks]
    return parts._replace(scales=repeated, phase=f * parts.phase), new


def cut(record: bytes, spec, start: int, stop: int) -> tuple[bytes, Spec]:
    """Clauses 8.1 to 8.5: the record of columns [start, stop)."""
    spec = Spec.of(spec)
    assert 0 <= start < stop <= spec.in_features
    assert start % 16 == 0
    assert stop % 16 == 0 or stop == spec.in_features
    divisors = [spec.block_size, start] + ([stop] if stop != spec.in_features else [])
    block_size = max(2**i for i in range(4, 13) if all(d % 2**i == 0 for d in divisors))
    parts, fine = split_blocks(record, spec, block_size)
    new = fine._replace(in_features=stop - start)
    first = start // block_size
    codes = parts.codes[start : start + new.in_features + new.in_features % 2]
    kept = parts.scales[first : first + new.blocks]
    return assemble(Parts(codes, kept, parts.phase + first, parts.pairs), new), new


def join(left: bytes, left_spec, right: bytes, right_spec) -> tuple[bytes, Spec] | None:
    """Clauses 9.1 to 9.5: one row of both; None where they do not fit."""
    left_spec, right_spec = Spec.of(left_spec), Spec.of(right_spec)
    block_size = math.gcd(left_spec.block_size, right_spec.block_size, left_spec.in_features)
    if block_size < 16:
        return None
    zero_left, zero_right = is_zero(left, left_spec), is_zero(right, right_spec)
    (l_parts, l_spec), (r_parts, r_spec) = (
        split_blocks(left, left_spec, block_size),
        split_blocks(right, right_spec, block_size),
    )
    if l_spec._replace(in_features=0) != r_spec._replace(in_features=0):
        return None
    spec = l_spec._replace(in_features=l_spec.in_features + r_spec.in_features)
    phase, pairs = l_parts.phase, l_parts.pairs
    if zero_left and not zero_right:
        phase, pairs = r_parts.phase - l_spec.blocks, r_parts.pairs
    elif not zero_right:
        if pairs_bits(l_parts) != pairs_bits(r_parts):
            return None
        if spec.scale_kind != "float32" and r_parts.phase != phase + l_spec.blocks:
            return None
    if spec.scale_kind != "float32":
        last = (phase + spec.blocks - 1) // spec.segment_length
        if phase < 0 or last >= spec.num_segments:
            return None
    codes = l_parts.codes + r_parts.codes
    return assemble(Parts(codes, l_parts.scales + r_parts.scales, phase, pairs), spec), spec
