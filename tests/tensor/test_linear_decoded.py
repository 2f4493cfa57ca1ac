"""Products that have no kernel of their own: decoded, and right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nf4tensor import to_nf4
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


def test_lora_of_functional_call():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, 3))
    model[0].weight = nn.Parameter(to_nf4(model[0].weight), requires_grad=False)
    parameters = dict(model.named_parameters())
    assert_same(torch.func.functional_call(model, parameters, x), model(x))
