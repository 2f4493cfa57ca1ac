"""Every operator that torch tests, with a 4-bit argument: the dense result, or a clear error."""

import collections

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from nf4tensor import NF4Tensor, to_nf4
from nf4tensor.errors import NF4TensorError

SAMPLES = 6
UNINITIALIZED = ("empty", "new_empty", "empty_permuted", "empty_strided")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def can_be_quantized(leaf) -> bool:
    """Tell whether an argument is a float matrix of finite numbers."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and leaf.dtype == torch.float32
        and leaf.dim() >= 1
        and leaf.shape[-1] > 0
        and bool(leaf.isfinite().all())
    )


def samples(op):
    """Yield arguments of an operator, as a flat list and its structure."""
    inputs = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    for sample, _ in zip(inputs, range(SAMPLES), strict=False):
        yield tree_flatten(([sample.input, *sample.args], sample.kwargs))


def fresh(leaves: list) -> list:
    """Copy dense arguments, which operators may write into."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def run(function, leaves: list, structure):
    """Call a function, with the same random numbers each time."""
    args, kwargs = tree_unflatten(leaves, structure)
    torch.manual_seed(0)
    return function(*args, **kwargs)


def are_close(found, expected) -> bool:
    """Compare two results, of which the first may be 4-bit."""
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(other, torch.Tensor):
            if one != other:
                return False
        elif other.layout == torch.strided:
            one = one.dequantize() if isinstance(one, NF4Tensor) else one
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return False
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True):
                return False
    return True


def verdicts(op, function, writes: bool):
    """Yield what came of calling an operator with some of its arguments quantized."""
    for leaves, structure in samples(op):
        places = [i for i, leaf in enumerate(leaves) if can_be_quantized(leaf)]
        for chosen in {tuple(places[:1]), tuple(places[1:2]), tuple(places)} - {()}:
            quantized, dense = fresh(leaves), fresh(leaves)
            for i in chosen:
                quantized[i] = to_nf4(leaves[i].detach())
                dense[i] = quantized[i].dequantize()
            try:
                expected = run(function, dense, structure)
            except Exception:
                with pytest.raises(Exception):  # noqa: B017, PT011 - torch's own, of any class
                    run(function, quantized, structure)
                continue
            try:
                found = run(function, quantized, structure)
            except NF4TensorError:
                yield "refused"
                continue
            rounds = writes and isinstance(tree_leaves(found)[0], NF4Tensor)
            yield "right" if rounds or are_close(found, expected) else "wrong"


@pytest.mark.parametrize("writes", [False, True])
def test_every_operator_is_right_or_refused(writes):
    total, wrong = collections.Counter(), []
    for op in op_db:
        function = op.inplace_variant if writes else op.op
        if function is None or torch.float32 not in op.dtypes or op.name in UNINITIALIZED:
            continue
        if op.name.removesuffix("_like").removeprefix("new_") in ("empty", "empty_strided"):
            continue
        counts = collections.Counter(verdicts(op, function, writes))
        total += counts
        if counts["wrong"]:
            wrong.append(f"{op.name}.{op.variant_test_name}")
    assert not wrong
    assert total["right"] > (100 if writes else 10 * total["refused"])
