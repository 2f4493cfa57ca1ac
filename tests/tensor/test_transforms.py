"""Products under torch.func and forward-mode differentiation: what a dense weight gives.

Nothing is decoded outside of the ops: a decoded product would warn, and warnings are errors here.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from nf4tensor import NF4Spec
from nf4tensor.kernels import ops
from tests.tensor.weights import dense, make

OUT, IN = 96, 128
x, tangent, bias = dense(5, IN, seed=1), dense(5, IN, seed=2), dense(OUT, seed=3)
outputs, biases, columns = dense(5, OUT), dense(3, OUT), dense(5, 7, OUT)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


def partly_constant(a: Tensor, w: Tensor) -> Tensor:
    """Multiply twice, once unseen by the transform."""
    with torch.no_grad():
        unseen = F.linear(a, w)
    return (F.linear(a, w, bias) * unseen).sum()


TRANSFORMS = {
    "grad": lambda w: torch.func.grad(lambda a: F.linear(a, w, bias).square().sum())(x),
    "grad of grad": lambda w: torch.func.grad(
        lambda a: torch.func.grad(lambda b: (b @ w.t()).pow(3).sum())(a).square().sum()
    )(x),
    "grad of grad, partly constant": lambda w: torch.func.grad(
        lambda a: torch.func.grad(partly_constant)(a, w).square().sum()
    )(x),
    "vjp": lambda w: torch.func.vjp(lambda a: F.linear(a, w), x)[1](outputs)[0],
    "jvp": lambda w: torch.func.jvp(lambda a: F.linear(a, w), (x,), (tangent,))[1],
    "jvp of the bias": lambda w: torch.func.jvp(lambda b: F.linear(x, w, b), (bias,), (biases[0],))[
        1
    ],
    "jvp of both": lambda w: torch.func.jvp(
        lambda a, b: F.linear(a, w, b), (x, bias), (tangent, biases[0])
    )[1],
    "jvp of grad": lambda w: torch.func.jvp(
        torch.func.grad(lambda a: (a @ w.t()).pow(3).sum()), (x,), (tangent,)
    )[1],
    "jacrev": lambda w: torch.func.jacrev(lambda a: w @ a)(x[0]),
    "jacfwd": lambda w: torch.func.jacfwd(lambda a: w @ a)(x[0]),
    "hessian": lambda w: torch.func.hessian(lambda a: (w @ a).pow(3).sum())(x[0]),
    "vmap": lambda w: torch.func.vmap(lambda a: F.linear(a, w, bias))(x),
    "vmap over columns": lambda w: torch.func.vmap(lambda a: a @ w, 1)(columns),
    "vmap of a stack of weights": lambda w: torch.func.vmap(lambda a: w.view(2, 48, IN) @ a)(x),
    "vmap over biases": lambda w: torch.func.vmap(lambda b: F.linear(x, w, b))(biases),
    "gradients of each sample": lambda w: torch.func.vmap(
        torch.func.grad(lambda a: F.linear(a, w, bias).square().sum())
    )(x),
}
QUICKLY_COMPILED = ("jvp of both", "grad of grad, partly constant", "gradients of each sample")
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare but for another order of float32 sums."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@every_transform
def test_transforms_equal_those_of_the_decoded_weight(transform):
    q = make(OUT, IN)
    assert_close(transform(q), transform(q.dequantize()))


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(transform, id=name, marks=() if name in QUICKLY_COMPILED else pytest.mark.slow)
        for name, transform in TRANSFORMS.items()
    ],
)
def test_compiled_transforms(transform):
    q = make(OUT, IN)
    torch._dynamo.reset()
    compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)
    assert_close(compiled(q), transform(q.dequantize()))


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_mode(compiled):
    q, weight = make(OUT, IN), make(OUT, IN).dequantize()

    def function(a: Tensor) -> Tensor:
        return F.linear(a, q, bias).square() @ q

    torch._dynamo.reset()
    run = torch.compile(function, backend="aot_eager") if compiled else function
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent))).tangent
    expected = (2 * F.linear(x, weight, bias) * F.linear(tangent, weight)) @ weight
    assert_close(found, expected)


def test_tangents_of_gradients():
    q, weight = make(OUT, IN), make(OUT, IN).dequantize()
    with forward_ad.dual_level():
        a = forward_ad.make_dual(x, tangent).requires_grad_()
        (gradient,) = torch.autograd.grad(F.linear(a, q).square().sum(), a)
        found = forward_ad.unpack_dual(gradient).tangent
    assert_close(found, 2 * F.linear(tangent, weight) @ weight)


@pytest.mark.parametrize(
    ("lead", "rows"),
    [
        (lead, rows)
        for lead in [(), (2,), (3, 2)]
        for rows in [(), (4,), (2, 4), (1, 4), (3, 1, 4), (5, 3, 2, 4)]
    ],
)
def test_batches_of_records_and_biases(lead, rows):
    """As the ops take them: leading dimensions broadcast, and a vector goes to each weight."""
    spec = NF4Spec.for_weight(64)
    record = ops.quantize(dense(7, *lead, 6, 64), spec)
    inputs, biases = dense(7, *rows, 64), dense(7, 6, seed=2)
    for product in (
        lambda i, r, b: ops.linear(i, r, spec, b),
        lambda i, r, b: ops.linear(i, r, spec),
        lambda i, r, b: ops.matmul(i[..., :6], r, spec),
    ):
        for dims in ((0, 0, 0), (0, None, 0), (None, 0, 0), (0, None, None), (None, None, 0)):
            batches = (inputs, record, biases)
            given = [t if d == 0 else t[0] for t, d in zip(batches, dims, strict=True)]
            found = torch.func.vmap(product, dims)(*given)
            each = [
                product(*(t[n] if d == 0 else t for t, d in zip(given, dims, strict=True)))
                for n in range(7)
            ]
            assert_close(found, torch.stack(each))
