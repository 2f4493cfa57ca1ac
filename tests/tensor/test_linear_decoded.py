"""Products that have no kernel of their own: decoded, and right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from nf4tensor import NF4TensorWarning, to_nf4
from tests.tensor.weights import assert_same, dense, make

OUT, IN = 96, 128
x, bias = dense(5, IN, seed=1), dense(OUT, seed=3)


@pytest.mark.parametrize(
    "form",
    [
        lambda w: w @ w.t(),
        lambda w: torch.mm(x, w.t(), out=torch.empty(5, OUT)),
        lambda w: torch.addmm(bias, x, w.t(), out=torch.empty(5, OUT)),
        lambda w: torch.addmm(w[:5, :OUT], x, w.t()),
        lambda w: F.linear(w, w),
        lambda w: F.linear(w, x),
        lambda w: F.linear(x, w[0]),
        lambda w: x @ w[0],
        lambda w: torch.dot(w[0], x[0]),
        lambda w: torch.inner(x, w),
        lambda w: torch.linalg.multi_dot([x, w.t(), w]),
        lambda w: torch.baddbmm(dense(1, 5, OUT), x[None], w[None].mT),
        lambda w: torch.eye(OUT).to_sparse() @ w,
    ],
)
@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_other_products(form):
    q = make(OUT, IN)
    torch.testing.assert_close(form(q), form(q.dequantize()), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:(aten|a product):nf4tensor.NF4TensorWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_transforms_of_functions_and_forward_mode():
    """torch.library's gradients know none of these: `jvp` would return zeros without a word."""
    q = make(OUT, IN)
    with pytest.warns(NF4TensorWarning, match=r"torch.func or forward-mode"):
        torch.func.vmap(lambda a: F.linear(a, q))(x)
    for transform in (
        lambda w: torch.func.grad(lambda a: F.linear(a, w, bias).square().sum())(x),
        lambda w: torch.func.jvp(lambda a: F.linear(a, w), (x,), (x,))[1],
        lambda w: torch.func.vmap(lambda a: F.linear(a, w, bias))(x),
        lambda w: torch.func.jacrev(lambda a: w @ a)(x[0]),
    ):
        assert_same(transform(q), transform(q.dequantize()))
    # Over rows of the weight, torch makes it one product with all of them.
    assert_same(torch.func.vmap(lambda row: row @ x[0])(q), q @ x[0])
    with forward_ad.dual_level():
        output = F.linear(forward_ad.make_dual(x, x), q)
        assert_same(forward_ad.unpack_dual(output).tangent, F.linear(x, q.dequantize()))


def test_lora_of_functional_call():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, 3))
    model[0].weight = nn.Parameter(to_nf4(model[0].weight), requires_grad=False)
    parameters = dict(model.named_parameters())
    assert_same(torch.func.functional_call(model, parameters, x), model(x))
