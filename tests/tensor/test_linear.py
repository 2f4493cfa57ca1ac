"""Products with a 4-bit weight against the same expression on the decoded one."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nf4tensor import linear_nf4
from nf4tensor.errors import DTypeError, ShapeError, UnsupportedError
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same, assert_same_products, dense, make

OUT, IN = 96, 128
x, y, bias = dense(5, IN, seed=1), dense(5, OUT, seed=2), dense(OUT, seed=3)
batch = dense(4, 2, IN, seed=4)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Operands(NamedTuple):
    """What products are made of."""

    w: Tensor
    x: Tensor = x
    y: Tensor = y
    batch: Tensor = batch
    bias: Tensor = bias

    def magnitudes(self) -> "Operands":
        """Return the magnitudes of all operands, which are summed up by the same products."""
        return Operands(*(operand.double().abs() for operand in self.decoded()))

    def decoded(self) -> "Operands":
        """Return the operands with a dense weight, of the dtype of the others."""
        return self._replace(w=self.w.dequantize(self.x.dtype))

    def to(self, dtype: torch.dtype) -> "Operands":
        """Return the operands with all dense ones in a dtype."""
        return Operands(self.w, *(operand.to(dtype) for operand in self[1:]))


FORMS = {
    "linear": lambda o: F.linear(o.x, o.w),
    "linear with bias": lambda o: F.linear(o.x, o.w, o.bias),
    "linear by keywords": lambda o: F.linear(input=o.x, weight=o.w, bias=o.bias),
    "linear, keywords in any order": lambda o: F.linear(o.x, bias=o.bias, weight=o.w),
    "linear with a bias that broadcasts": lambda o: F.linear(o.x, o.w, o.bias[None]),
    "linear of a vector": lambda o: F.linear(o.x[0], o.w, o.bias),
    "linear of a batch": lambda o: F.linear(o.batch, o.w, o.bias),
    "linear of nothing": lambda o: F.linear(o.x[:0], o.w, o.bias),
    "linear_nf4": lambda o: linear_nf4(o.x, o.w, o.bias),
    "module": lambda o: torch.func.functional_call(
        nn.Linear(IN, OUT), {"weight": o.w, "bias": o.bias}, o.x
    ),
    "x @ w.t()": lambda o: o.x @ o.w.t(),
    "x @ w.T": lambda o: o.x @ o.w.T,
    "x @ w.mT": lambda o: o.x @ o.w.mT,
    "batch @ w.t()": lambda o: o.batch @ o.w.t(),
    "y @ w": lambda o: o.y @ o.w,
    "w @ vector": lambda o: o.w @ o.x[0],
    "vector @ w": lambda o: o.y[0] @ o.w,
    "w.t() @ vector": lambda o: o.w.t() @ o.y[0],
    "matmul": lambda o: torch.matmul(o.x, o.w.t()),
    "matmul by keywords": lambda o: torch.matmul(input=o.x, other=o.w.t()),
    "x.matmul": lambda o: o.x.matmul(o.w.t()),
    "mm": lambda o: torch.mm(o.x, o.w.t()),
    "mm by keywords": lambda o: torch.mm(input=o.x, mat2=o.w.t()),
    "x.mm": lambda o: o.x.mm(o.w.t()),
    "mv": lambda o: torch.mv(o.w, o.x[0]),
    "mv by keywords": lambda o: torch.mv(input=o.w, vec=o.x[0]),
    "w.t().mv": lambda o: o.w.t().mv(o.y[0]),
    "addmm": lambda o: torch.addmm(o.bias, o.x, o.w.t()),
    "addmm by keywords": lambda o: torch.addmm(input=o.bias, mat1=o.x, mat2=o.w.t()),
    "bias.addmm": lambda o: o.bias.addmm(o.x, o.w.t()),
    "addmm without input": lambda o: torch.addmm(o.bias * torch.nan, o.x, o.w.t(), beta=0),
    "w[1:5]": lambda o: F.linear(o.x, o.w[1:5], o.bias[1:5]),
    "one weight twice": lambda o: F.linear(o.x, o.w, o.bias) @ o.w,
    "w @ x.t()": lambda o: o.w @ o.x.t(),
    "w @ batch": lambda o: o.w @ o.batch.mT,
    "w.t() @ y.t()": lambda o: o.w.t() @ o.y.t(),
    "w.mm": lambda o: o.w.mm(o.x.t()),
    "linear of the transposed with bias": lambda o: F.linear(o.y, o.w.t(), o.x[0]),
    "addmm of a matrix": lambda o: torch.addmm(o.y[:, :1], o.x, o.w.t(), beta=0.5, alpha=2),
    "addmm from the left": lambda o: torch.addmm(o.bias[:, None], o.w, o.x.t()),
    "addmv": lambda o: torch.addmv(o.bias, o.w, o.x[0]),
}


# Forms of one op on the same operands.
ALIKE = {
    "linear": ("x @ w.t()", "x @ w.T", "x @ w.mT", "matmul", "x.matmul", "mm", "x.mm"),
    "matmul by keywords": ("linear", "mm by keywords", "addmm without input"),
    "linear with bias": ("linear by keywords", "linear, keywords in any order", "linear_nf4"),
    "addmm": ("addmm by keywords", "bias.addmm", "linear with bias", "module"),
    "w @ vector": ("mv", "mv by keywords"),
    "vector @ w": ("w.t() @ vector", "w.t().mv"),
}


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_dense_one(name, inference):
    form, operands = FORMS[name], Operands(make(OUT, IN))
    length = IN + 1 + (OUT if name == "one weight twice" else 0)
    with torch.inference_mode(inference):
        found, expected = form(operands), form(operands.decoded())
        assert_same_products(found, expected, form(operands.magnitudes()), length)
    assert found.is_inference() == inference


@pytest.mark.parametrize("name", ALIKE)
def test_forms_of_one_op_have_the_same_bits(name):
    operands = Operands(make(OUT, IN))
    for other in ALIKE[name]:
        assert_same(FORMS[other](operands), FORMS[name](operands))


@each_dtype
@pytest.mark.parametrize("logical", DTYPES)
def test_weight_is_decoded_to_the_dtype_of_the_input(dtype, logical):
    operands = Operands(make(OUT, IN, dtype=logical)).to(dtype)
    for name in ("linear with bias", "linear", "x @ w.t()", "addmm", "mv", "y @ w"):
        form = FORMS[name]
        found, expected = form(operands), form(operands.decoded())
        assert_same_products(found, expected, form(operands.magnitudes()), IN + 1)


@each_dtype
def test_gradients_of_input_and_bias(dtype):
    q = make(OUT, IN, dtype=torch.bfloat16)
    for form, length, num_products in (
        (lambda inputs, w, b: F.linear(inputs, w, b), OUT, 1),
        (lambda inputs, w, b: torch.addmm(b, inputs, w.t()), OUT, 1),
        (lambda inputs, w, b: (F.linear(inputs, w, b) @ w) @ w.t(), OUT + IN + OUT, 3),
        (lambda inputs, w, b: F.linear(inputs[0], w, b), OUT, 1),
    ):
        gradients = []
        operands = Operands(q).to(dtype)
        for o in (operands, operands.decoded(), operands.magnitudes()):
            inputs, offset = o.x.clone().requires_grad_(), o.bias.clone().requires_grad_()
            output = form(inputs, o.w, offset)
            upper = dense(*output.shape, dtype=dtype, seed=7).to(output.dtype)
            output.backward(upper.abs() if output.dtype == torch.float64 else upper)
            gradients.append((inputs.grad, offset.grad))
        for found, expected, magnitudes in zip(*gradients, strict=True):
            assert_same_products(found, expected, magnitudes, length, num_products)
        if num_products == 1:  # the bias's is the sum of what came from above
            assert_same(gradients[0][1], gradients[1][1])


def test_gradients_of_a_batch():
    q = make(OUT, IN)
    operands, gradients = Operands(q), []
    for o in (operands, operands.decoded(), operands.magnitudes()):
        inputs = o.batch.clone().requires_grad_()
        (F.linear(inputs, o.w).square() + inputs @ o.w.t()).sum().backward()
        gradients.append(inputs.grad)
    assert_same_products(*gradients, IN + OUT + 1, num_roundings=3)


def test_second_derivatives():
    q = make(OUT, IN)

    def second(o):
        inputs = o.x.clone().requires_grad_()
        output = F.linear(inputs, o.w).pow(3).sum()
        (first,) = torch.autograd.grad(output, inputs, create_graph=True)
        return torch.autograd.grad(first.sum(), inputs)[0]

    operands = Operands(q)
    found, expected = second(operands), second(operands.decoded())
    assert_same_products(found, expected, second(operands.magnitudes()), 2 * IN + OUT + 2, 3)


STACKED = {
    "bmm": lambda w: torch.bmm(dense(4, 2, 64), w.mT),
    "bmm by keywords": lambda w: torch.bmm(input=dense(4, 2, 64), mat2=w.transpose(1, 2)),
    "bmm of rows": lambda w: dense(4, 2, 96).bmm(w),
    "matmul": lambda w: dense(4, 2, 64) @ w.mT,
    "matmul that broadcasts the input": lambda w: dense(2, 64) @ w.mT,
    "matmul that broadcasts the weight": lambda w: dense(3, 1, 2, 64) @ w.mT,
    "matmul of a vector": lambda w: dense(64) @ w.mT,
    "one expert": lambda w: F.linear(dense(2, 64), w[1]),
    "one expert of the transposed": lambda w: dense(2, 64) @ w.mT[1],
    "each expert": lambda w: torch.stack([F.linear(dense(2, 64), expert) for expert in w]),
    "a choice of experts": lambda w: dense(2, 1, 64) @ w[[3, 0]].mT,
    "w @ vector": lambda w: w @ dense(64),
}


@pytest.mark.parametrize("form", STACKED.values(), ids=STACKED)
def test_stacked_weights(form):
    q = make(4, 96, 64)
    torch.testing.assert_close(form(q), form(q.dequantize()), rtol=1e-5, atol=1e-5)


def test_gradients_through_stacked_weights():
    q = make(4, 96, 64)
    for shape in ((4, 2, 64), (2, 64), (3, 1, 2, 64), (64,)):
        inputs = dense(*shape).requires_grad_()
        (found,) = torch.autograd.grad((inputs @ q.mT).square().sum(), inputs)
        (expected,) = torch.autograd.grad((inputs @ q.dequantize().mT).square().sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


# Autocast


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_under_autocast_everything_runs_in_its_dtype(lower):
    q = make(OUT, IN)
    operands = Operands(q)
    names = ("linear with bias", "x @ w.t()", "addmm", "mv", "w @ x.t()")
    expected = {name: FORMS[name](operands.to(lower)) for name in names}
    expected_of_half = F.linear(x.half().to(lower), q)
    with torch.autocast("cpu", lower):
        for name in names:
            assert_same(FORMS[name](operands), expected[name])
        assert_same(F.linear(x.half(), q), expected_of_half)
        assert torch.einsum("bi,oi->bo", x, q).dtype == lower
        with torch.autocast("cpu", enabled=False):
            assert F.linear(x, q).dtype == torch.float32


def test_gradients_under_autocast_have_the_dtype_of_their_input():
    q = make(OUT, IN)
    inputs = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = F.linear(inputs, q, bias)
    output.sum().backward()
    assert inputs.grad.dtype == torch.float32
    assert_same(inputs.grad, (torch.ones(5, OUT, dtype=torch.bfloat16) @ q).float())


# Errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("autocast", [False, True])
def test_other_inputs_are_refused(dtype, autocast):
    q, inputs = make(OUT, IN), x.to(dtype)
    words = f"{dtype}.*expected float32, bfloat16 or float16: cast it first"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for form in (F.linear, lambda a, w: torch.mm(a, w.t())):
            with pytest.raises(DTypeError, match=words):
                form(inputs, q)
        # A TypeError from an operator would become "unsupported operand type(s)".
        for form in (lambda: inputs @ q.t(), lambda: q @ inputs.t()):
            with pytest.raises(UnsupportedError, match=words):
                form()


def test_a_bias_of_another_dtype_is_refused():
    with pytest.raises(DTypeError, match=r"bias is torch.float32, expected the input's .*bfloat16"):
        F.linear(x.bfloat16(), make(OUT, IN), bias)
    for offset in (bias, bias[None]):
        with pytest.raises(DTypeError, match=r"float32, expected the (input's|product's)"):
            torch.addmm(offset, x.bfloat16(), make(OUT, IN).t())


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_shapes_that_do_not_fit_are_refused():
    q, stacked = make(OUT, IN), make(4, 96, 64)
    with pytest.raises(ShapeError, match=r"input has shape \(5, 96\), expected \[\*, 128\]"):
        F.linear(y, q)
    refused = (
        lambda w: x @ w,
        lambda w: w @ x,
        lambda w: torch.tensor(1.0) @ w,
        lambda w: torch.mm(batch, w.t()),
        lambda w: torch.mm(x[0], w.t()),
        lambda w: torch.mv(w, x.t()),
        lambda w: torch.bmm(x, w.t()),
        lambda w: torch.addmm(dense(7, 5, OUT), x, w.t()),
        lambda w: torch.addmm(bias, batch, w.t()),
    )
    for form in refused:
        for w in (q, q.dequantize()):
            with pytest.raises(RuntimeError):
                form(w)
    for w in (stacked, stacked.dequantize()):
        with pytest.raises(RuntimeError):
            torch.bmm(dense(1, 2, 64), w.mT)
        with pytest.raises(RuntimeError):
            F.linear(dense(2, 64), w)
