"""How far a result may be from the exact one: derived from the format, never tuned to a run.

Used where two sides do not do the same arithmetic; where they do, tests ask for equal bits.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nf4tensor.format.codebook import LEVELS

FLOAT32_ROUNDOFF = 2.0**-24
SMALLEST = 2.0**-149


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to `dtype`: half its epsilon."""
    return torch.finfo(dtype).eps / 2


def half_gap(quant_type: str) -> float:
    """Return half the largest distance of neighbouring levels: a weight is no farther from one."""
    levels = sorted(LEVELS[quant_type])
    return max(above - below for below, above in pairwise(levels)) / 2


def scale_bound(smallest: Tensor, largest: Tensor) -> Tensor:
    """Return how far a `square8` scale may be from the absmax of its block.

    With r = (absmax - base) / step and q the root of r rounded, |r - q * q| is at most q + 1/4, at
    most 255 altogether; 255 steps are 1/255 of the segment's range. The second level does five
    float32 operations on numbers no larger than the largest absmax. A subnormal step is rounded to
    a multiple of the smallest number, which 65025 times over may show.

    Args:
        smallest: Smallest absmax of the block's segment that is not zero, float64.
        largest: Largest absmax of it, float64.
    """
    return (largest - smallest) / 255 + 8 * FLOAT32_ROUNDOFF * largest + 65025 * SMALLEST


def weight_bound(
    absmax: Tensor, scale_error: Tensor | float, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """Return how far a decoded weight may be from the weight.

    The normalized weight is at most half a gap from its level, the level is at most 1, and the two
    divisions, the product and the output round.

    Args:
        absmax: Largest magnitude of the weight's block, float64.
        scale_error: `scale_bound` of the block, or 0 with float32 scales.
        quant_type: "nf4" or "fp4".
        dtype: What the weight was decoded to; it must hold the absmax.
    """
    exact = half_gap(quant_type) * absmax + scale_error
    rounding = (4 * FLOAT32_ROUNDOFF + roundoff(dtype)) * (absmax + scale_error)
    return exact + rounding + SMALLEST + torch.finfo(dtype).smallest_normal * roundoff(dtype)


def matmul_bound(magnitudes: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return how far a product of matrices may be from the exact one.

    Any order of n float32 products and sums is within `gamma = n u / (1 - n u)` of the sum of
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 3.5), u = 2^-24; then the
    output rounds.

    Args:
        magnitudes: `abs(input) @ abs(weight).T`, float64, of what is multiplied.
        length: Terms of each sum, one more with a bias.
        dtype: The output's.
    """
    gamma = length * FLOAT32_ROUNDOFF / (1 - length * FLOAT32_ROUNDOFF)
    return (gamma + roundoff(dtype) * (1 + gamma)) * magnitudes


def products_bound(
    magnitudes: Tensor, length: int, dtype: torch.dtype, num_roundings: int = 1
) -> Tensor:
    """Return how far two results of one expression of products may be from each other.

    Both are float32 sums, in orders of their own: each is within `matmul_bound` of the exact one.
    Where products follow one another, the errors of each are multiplied like its magnitudes: the
    lengths add up, and so do the roundings. No sum has magnitudes that are subnormal.

    Args:
        magnitudes: The expression with the magnitudes of all operands, float64.
        length: Terms of the sums, one more with a bias, of all products that follow one another.
        dtype: The one to which each product is rounded.
        num_roundings: How often that is.
    """
    gamma = length * FLOAT32_ROUNDOFF / (1 - length * FLOAT32_ROUNDOFF)
    return 2 * ((1 + gamma) * (1 + roundoff(dtype)) ** num_roundings - 1) * magnitudes
