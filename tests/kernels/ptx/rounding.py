"""Correct rounding where numpy has no operation that rounds once."""

import numpy as np


def _to_odd(rounded: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Return an inexact result with an odd last bit, so that rounding it again goes right.

    Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008.

    Args:
        rounded: Rounded to nearest.
        error: The exact value minus that, or something of its sign.
    """
    bits = rounded.view(np.int64 if rounded.itemsize == 8 else np.int32)
    inexact = (error != 0) & np.isfinite(rounded) & np.isfinite(error) & (bits & 1 == 0)
    away = np.where((error > 0) == (rounded > 0), 1, -1).astype(bits.dtype)
    return np.where(inexact, bits + away, bits).view(rounded.dtype)


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return float32 x * y + z, rounded once."""
    product = x.astype(np.float64) * y  # exact
    addend = np.asarray(z, np.float64)
    total = product + addend
    # The error of a sum is a float64 (Knuth, 4.2.2).
    back = total - product
    error = (product - (total - back)) + (addend - back)
    return _to_odd(total, error).astype(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16 of each float32, ties to even; NaN is 0x7FFF."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 of each bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
