"""`torch.einsum` with a 4-bit weight against the same equation on the decoded one."""

import pytest
import torch

from nf4tensor import NF4TensorWarning
from nf4tensor.errors import DTypeError
from tests.tensor.weights import assert_same_products, dense, make

A, B, E, I, O = 2, 3, 4, 64, 48  # noqa: E741

PRODUCTS = [
    ("bi,oi->bo", (B, I), (O, I)),
    ("oi,bi->ob", (B, I), (O, I)),
    ("oi, bi -> bo", (B, I), (O, I)),
    ("bo,oi->bi", (B, O), (O, I)),
    ("bo,oi->ib", (B, O), (O, I)),
    ("i,oi->o", (I,), (O, I)),
    ("abi,oi->abo", (A, B, I), (O, I)),
    ("aib,oi->oba", (A, I, B), (O, I)),
    ("...i,oi->...o", (A, B, I), (O, I)),
    ("...i,oi->...o", (I,), (O, I)),
    ("a...i,oi->a...o", (A, B, I), (O, I)),
    ("ebi,eoi->ebo", (E, B, I), (E, O, I)),
    ("bei,eoi->beo", (B, E, I), (E, O, I)),
    ("bi,eoi->ebo", (B, I), (E, O, I)),
    ("bi,eoi->beo", (B, I), (E, O, I)),
    ("abei,eoi->oeab", (A, B, E, I), (E, O, I)),
    ("i,eoi->eo", (I,), (E, O, I)),
    ("bo,eoi->ebi", (B, O), (E, O, I)),
    ("bai,baoi->bao", (B, A, I), (B, A, O, I)),
]
DECODED = [
    ("bi,oi->b", (B, I), (O, I)),
    ("bi,oi->bio", (B, I), (O, I)),
    ("bi,eoi->bo", (B, I), (E, O, I)),
    ("ii,oi->io", (I, I), (O, I)),
    ("bi,oi", (B, I), (O, I)),
    ("oi,oi->o", (O, I), (O, I)),
]


def split(equation, input_shape, weight_shape):
    """Return the operands in the order of the equation."""
    q, x = make(*weight_shape), dense(*input_shape, seed=1)
    return (q, x) if equation.startswith("oi, bi") or equation == "oi,bi->ob" else (x, q)


@pytest.mark.parametrize("view", ["rows", "transposed"])
@pytest.mark.parametrize(("equation", "input_shape", "weight_shape"), PRODUCTS)
def test_products(equation, input_shape, weight_shape, view):
    first, second = split(equation, input_shape, weight_shape)
    q = first if first.shape == weight_shape else second
    if view == "transposed":
        weight_term = equation.split("->")[0].replace(" ", "").split(",")[second is q]
        swapped = weight_term[:-2] + weight_term[-1] + weight_term[-2]
        equation = equation.replace(weight_term, swapped)
        first, second = (t.mT if t is q else t for t in (first, second))
    found = torch.einsum(equation, first, second)
    decoded = [t.dequantize() if hasattr(t, "spec") else t for t in (first, second)]
    expected = torch.einsum(equation, *decoded)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("equation", "input_shape", "weight_shape"), DECODED)
def test_other_equations_decode(equation, input_shape, weight_shape):
    operands = split(equation, input_shape, weight_shape)
    with pytest.warns(NF4TensorWarning, match="decodes an NF4Tensor"):
        found = torch.einsum(equation, *operands)
    decoded = [t.dequantize() if hasattr(t, "spec") else t for t in operands]
    torch.testing.assert_close(found, torch.einsum(equation, *decoded), rtol=1e-5, atol=1e-5)


def test_gradient():
    q, x = make(E, O, I), dense(B, E, I, seed=1).requires_grad_()
    magnitudes = x.detach().double().abs().requires_grad_(), q.dequantize().double().abs()
    gradients = [
        torch.autograd.grad(torch.einsum("bei,eoi->beo", x, w).square().sum(), x)[0]
        for x, w in ((x, q), (x, q.dequantize()), magnitudes)
    ]
    assert_same_products(*gradients, I + O, num_roundings=2)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_operands_in_a_list_and_more_than_two():
    q, x = make(O, I), dense(B, I, seed=1)
    expected = x @ q.t()
    torch.testing.assert_close(torch.einsum("bi,oi->bo", [x, q]), expected)
    found = torch.einsum("bi,oi,o->b", x, q, torch.ones(O))
    torch.testing.assert_close(found, expected.sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_what_does_not_fit_is_refused():
    q = make(O, I)
    with pytest.raises(RuntimeError):
        torch.einsum("bi,oi->bo", dense(B, O), q)
    with pytest.raises(RuntimeError):
        torch.einsum("bi,eoi->bo", dense(B, I), q)
    with pytest.raises(DTypeError, match="float64"):
        torch.einsum("bi,oi->bo", dense(B, I).double(), q)
