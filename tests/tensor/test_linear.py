"""Products with a 4-bit weight against the same expression on the decoded one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nf4tensor import linear_nf4
from nf4tensor.errors import DTypeError, ShapeError, UnsupportedError
from tests import bounds
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same, dense, make

OUT, IN = 96, 128
x, y, bias = dense(5, IN, seed=1), dense(5, OUT, seed=2), dense(OUT, seed=3)
batch = dense(4, 2, IN, seed=4)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

# The same arithmetic on both sides: bit for bit.
EXACT = {
    "linear": lambda w: F.linear(x, w),
    "linear with bias": lambda w: F.linear(x, w, bias),
    "linear by keywords": lambda w: F.linear(input=x, weight=w, bias=bias),
    "linear, keywords in any order": lambda w: F.linear(x, bias=bias, weight=w),
    "linear of a vector": lambda w: F.linear(x[0], w, bias),
    "linear of a batch": lambda w: F.linear(batch, w, bias),
    "linear of nothing": lambda w: F.linear(x[:0], w, bias),
    "linear_nf4": lambda w: linear_nf4(x, w, bias),
    "module": lambda w: torch.func.functional_call(
        nn.Linear(IN, OUT), {"weight": w, "bias": bias}, x
    ),
    "x @ w.t()": lambda w: x @ w.t(),
    "x @ w.T": lambda w: x @ w.T,
    "x @ w.mT": lambda w: x @ w.mT,
    "batch @ w.t()": lambda w: batch @ w.t(),
    "y @ w": lambda w: y @ w,
    "w @ vector": lambda w: w @ x[0],
    "vector @ w": lambda w: y[0] @ w,
    "w.t() @ vector": lambda w: w.t() @ y[0],
    "matmul": lambda w: torch.matmul(x, w.t()),
    "matmul by keywords": lambda w: torch.matmul(input=x, other=w.t()),
    "x.matmul": lambda w: x.matmul(w.t()),
    "mm": lambda w: torch.mm(x, w.t()),
    "mm by keywords": lambda w: torch.mm(input=x, mat2=w.t()),
    "x.mm": lambda w: x.mm(w.t()),
    "mv": lambda w: torch.mv(w, x[0]),
    "mv by keywords": lambda w: torch.mv(input=w, vec=x[0]),
    "w.t().mv": lambda w: w.t().mv(y[0]),
    "addmm": lambda w: torch.addmm(bias, x, w.t()),
    "addmm by keywords": lambda w: torch.addmm(input=bias, mat1=x, mat2=w.t()),
    "bias.addmm": lambda w: bias.addmm(x, w.t()),
    "addmm without input": lambda w: torch.addmm(bias * torch.nan, x, w.t(), beta=0),
    "w[1:5]": lambda w: F.linear(x, w[1:5], bias[1:5]),
    "one weight twice": lambda w: F.linear(x, w, bias) @ w,
}
# The dense expression adds up in another order.
CLOSE = {
    "w @ x.t()": lambda w: w @ x.t(),
    "w @ batch": lambda w: w @ batch.mT,
    "w.t() @ y.t()": lambda w: w.t() @ y.t(),
    "w.mm": lambda w: w.mm(x.t()),
    "linear of the transposed with bias": lambda w: F.linear(y, w.t(), x[0]),
    "addmm of a matrix": lambda w: torch.addmm(y[:, :1], x, w.t(), beta=0.5, alpha=2),
    "addmm from the left": lambda w: torch.addmm(bias[:, None], w, x.t()),
    "addmv": lambda w: torch.addmv(bias, w, x[0]),
}


@pytest.mark.parametrize("form", EXACT.values(), ids=EXACT)
def test_every_form_equals_the_dense_one(form):
    q = make(OUT, IN)
    with torch.no_grad():
        assert_same(form(q), form(q.dequantize()))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
@pytest.mark.parametrize("form", [*EXACT.values(), *CLOSE.values()], ids=[*EXACT, *CLOSE])
def test_every_form_in_inference_mode(form):
    q = make(OUT, IN)
    with torch.inference_mode():
        found = form(q)
        torch.testing.assert_close(found, form(q.dequantize()), rtol=1e-4, atol=1e-4)
    assert found.is_inference()


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
@pytest.mark.parametrize("form", CLOSE.values(), ids=CLOSE)
def test_forms_that_add_up_in_another_order(form):
    q = make(OUT, IN)
    found, expected = form(q), form(q.dequantize())
    assert (found.shape, found.dtype, found.stride()) == (
        expected.shape,
        expected.dtype,
        expected.stride(),
    )
    magnitudes = torch.full_like(expected, IN * 40.0)
    bound = 2 * bounds.matmul_bound(magnitudes, IN + 1, torch.float32)
    assert ((found - expected).abs() <= bound).all()


@each_dtype
@pytest.mark.parametrize("logical", DTYPES)
def test_weight_is_decoded_to_the_dtype_of_the_input(dtype, logical):
    q = make(OUT, IN, dtype=logical)
    inputs, offset, w = x.to(dtype), bias.to(dtype), q.dequantize(dtype)
    assert_same(F.linear(inputs, q, offset), F.linear(inputs, w, offset))
    assert_same(F.linear(inputs, q), F.linear(inputs, w))
    assert_same(inputs @ q.t(), inputs @ w.t())
    assert_same(torch.addmm(offset, inputs, q.t()), torch.addmm(offset, inputs, w.t()))
    assert_same(torch.mv(q, inputs[0]), torch.mv(w, inputs[0]))
    assert_same(y.to(dtype) @ q, y.to(dtype) @ w)


@each_dtype
def test_gradients_of_input_and_bias(dtype):
    q = make(OUT, IN, dtype=torch.bfloat16)
    for form in (
        lambda inputs, w, b: F.linear(inputs, w, b),
        lambda inputs, w, b: torch.addmm(b, inputs, w.t()),
        lambda inputs, w, b: (F.linear(inputs, w, b) @ w) @ w.t(),
        lambda inputs, w, b: F.linear(inputs[0], w, b),
    ):
        gradients = []
        for w in (q, q.dequantize(dtype)):
            inputs = x.to(dtype, copy=True).requires_grad_()
            offset = bias.to(dtype, copy=True).requires_grad_()
            output = form(inputs, w, offset)
            output.backward(dense(*output.shape, dtype=dtype, seed=7))
            gradients.append((inputs.grad, offset.grad))
        assert_same(gradients[0][0], gradients[1][0])
        assert_same(gradients[0][1], gradients[1][1])


def test_gradients_of_a_batch():
    q = make(OUT, IN)
    found, expected = [], []
    for w, gradients in ((q, found), (q.dequantize(), expected)):
        inputs = batch.clone().requires_grad_()
        (F.linear(inputs, w).square() + inputs @ w.t()).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(found, expected)


def test_second_derivatives():
    q = make(OUT, IN)

    def second(w):
        inputs = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(F.linear(inputs, w).pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(first.sum(), inputs)[0]

    assert_same(second(q), second(q.dequantize()))


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
    d = q.dequantize(lower)
    cast = (x.to(lower), bias.to(lower))
    with torch.autocast("cpu", lower):
        assert_same(F.linear(x, q, bias), F.linear(*cast[:1], d, cast[1]))
        assert_same(x @ q.t(), cast[0] @ d.t())
        assert_same(torch.addmm(bias, x, q.t()), torch.addmm(cast[1], cast[0], d.t()))
        assert_same(torch.mv(q, x[0]), torch.mv(d, cast[0][0]))
        assert_same(q @ x.t(), d @ cast[0].t())
        assert_same(F.linear(x.half(), q), F.linear(x.half().to(lower), d))
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
    expected = torch.ones(5, OUT, dtype=torch.bfloat16) @ q.dequantize(torch.bfloat16)
    assert_same(inputs.grad, expected.float())


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
