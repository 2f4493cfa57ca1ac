"""What a result is, beside the dense one: the verdicts of `op_trials.py`, and who is let off.

Equal means all bits. `LISTED` has the operators of which another result is right, with the reason.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nf4tensor import NF4Tensor
from nf4tensor.errors import NF4TensorError
from nf4tensor.tensor.decoded import DecodedView
from tests import bounds

VERDICTS = ("equal", "close", "refused", "both raise", "listed", "wrong", "unclear", "crash")
_UNINITIALIZED = "uninitialized memory: shape and dtype are compared"
_ROUNDED_ONCE = "decoded to the new dtype at once, not by way of the old one: bfloat16 is compared"
_ROUNDED_TWICE = "in place it multiplies, then adds: quantized after each, within the bound of both"
_UNFUSED = "of decoded views torch makes it of products that round to bfloat16: 5 % of the largest"
_SATURATED = "softmax is saturated in bfloat16: its gradient is rounding, below 1e-5 in both"
LISTED = {
    **dict.fromkeys(("bfloat16", "float", "half", "to", "type_as"), _ROUNDED_ONCE),
    "nn.functional.alpha_dropout": _ROUNDED_TWICE,
    "nn.functional.feature_alpha_dropout": _ROUNDED_TWICE,
    "nn.functional.scaled_dot_product_attention": _UNFUSED,
    "nn.functional.multi_head_attention_forward": _SATURATED,
    "empty": _UNINITIALIZED,
    "empty_like": _UNINITIALIZED,
    "empty_permuted": _UNINITIALIZED,
    "empty_strided": _UNINITIALIZED,
    "new_empty": _UNINITIALIZED,
    "new_empty_strided": _UNINITIALIZED,
}
# Products of matrices sum in another order; everything else does the same arithmetic.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def values(tensor: Tensor) -> Tensor:
    """Return a dense copy of any tensor."""
    if isinstance(tensor, NF4Tensor):
        return tensor.dequantize()
    return tensor.dense.clone() if isinstance(tensor, DecodedView) else tensor.detach().clone()


def verdict_on(found: Any, expected: Any, name: str) -> str:
    """Judge the result of an operator with 4-bit arguments by that with dense ones."""
    if isinstance(expected, Exception):
        return "both raise" if isinstance(found, Exception) else "wrong"
    if isinstance(found, NF4TensorError):
        return "refused"
    if isinstance(found, Exception):
        return "unclear"
    verdict = comparison(found, expected)
    if verdict != "wrong" or name not in LISTED:
        return verdict
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    reason = LISTED[name]
    return "listed" if all(_is_as_listed(*pair, reason) for pair in pairs) else "wrong"


def _is_as_listed(found: Any, expected: Any, reason: str) -> bool:
    if not isinstance(expected, Tensor):
        return found == expected
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if reason is _UNINITIALIZED:
        return True
    found, expected = values(found).float(), values(expected).float()
    if reason is _SATURATED and max(found.abs().max(), expected.abs().max()) < 1e-5:
        return True
    bound = {
        _ROUNDED_ONCE: 2 * bounds.roundoff(torch.bfloat16),
        _ROUNDED_TWICE: 3 * bounds.half_gap("nf4"),  # two of them, and one of the other side
        _UNFUSED: 0.05,
        _SATURATED: TOLERANCE[torch.bfloat16],
    }[reason]
    return bool(((found - expected).abs() <= bound * expected.abs().max()).all())


def is_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and values."""
    return comparison(one, other) == "equal"


def is_close(one: Tensor, other: Tensor) -> bool:
    """Tell whether they differ by the order of sums at most."""
    return comparison(one, other) != "wrong"


def comparison(found: Any, expected: Any) -> str:
    """Compare two results, of which the first may be 4-bit: "equal", "close" or "wrong"."""
    ones, others = tree_leaves(found), tree_leaves(expected)
    if len(ones) != len(others):
        return "wrong"
    verdicts = {_comparison(one, other) for one, other in zip(ones, others, strict=True)}
    return next((v for v in ("wrong", "close") if v in verdicts), "equal")


def _comparison(one: Any, other: Any) -> str:
    if not isinstance(other, Tensor):
        return "equal" if one == other or (one != one and other != other) else "wrong"
    if not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return "wrong"
    one, other = values(one), values(other)
    if other.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if other.dtype == torch.complex32:  # which torch.equal does not take
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
        return "equal"
    tolerance = TOLERANCE.get(one.dtype, 0) * float(other.abs().nan_to_num().max())
    is_close = torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)
    return "close" if is_close else "wrong"
