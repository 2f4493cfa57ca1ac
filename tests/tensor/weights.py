"""Weights for the tests of this folder, and what it means for two tensors to be the same."""

import io
from typing import Any

import torch
from torch import Tensor

from nf4tensor import NF4Spec, NF4Tensor, to_nf4
from tests import bounds

INTEGERS = {4: torch.int32, 2: torch.int16}


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any):
    """Return a random weight of a shape as an NF4Tensor."""
    return to_nf4(dense(*shape, dtype=dtype, seed=seed), **options)


def dense(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a random dense tensor of a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_dynamic8(*lead: int) -> NF4Tensor:
    """Return rows with imported scales, which no write may touch."""
    spec = NF4Spec(64, 16, "dynamic8", 4, 1)
    record = torch.zeros(*lead, spec.pitch, dtype=torch.uint8)
    return NF4Tensor(record, spec, torch.float32)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Check shape, dtype and every bit, signs of zeros included."""
    found = found.dequantize() if isinstance(found, NF4Tensor) else found
    expected = expected.dequantize() if isinstance(expected, NF4Tensor) else expected
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.is_floating_point() and found.numel():
        integers = INTEGERS[found.element_size()]
        found, expected = found.contiguous().view(integers), expected.contiguous().view(integers)
    assert torch.equal(found, expected)


def assert_same_products(
    found: Tensor, expected: Tensor, magnitudes: Tensor, length: int, num_roundings: int = 1
) -> None:
    """Check shape, dtype, stride, and that two orders of float32 sums explain all differences.

    Args:
        found: What came.
        expected: What torch makes of the decoded weight.
        magnitudes: Of what is multiplied, as `bounds.products_bound` takes them; so are the others.
        length: Terms of the sums.
        num_roundings: How many products follow one another.
    """
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    magnitudes = magnitudes.detach().double()
    bound = bounds.products_bound(magnitudes, length, found.dtype, num_roundings)
    assert ((found.double() - expected.double()).abs() <= bound).all()


def shares_memory(first: NF4Tensor, second: NF4Tensor) -> bool:
    """Tell whether two tensors are views of one record."""
    return first.data_ptr() == second.data_ptr()


def file_of(thing: Any) -> bytes:
    """Return the file that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def load(file: bytes, **options: Any) -> Any:
    """Read a file as an untrusting user does."""
    return torch.load(io.BytesIO(file), weights_only=True, **options)
