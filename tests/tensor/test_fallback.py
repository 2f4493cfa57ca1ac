"""Ops that no family implements: decoded with one warning, or refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from nf4tensor import NF4TensorWarning
from nf4tensor.errors import UnsupportedError
from tests.tensor.weights import assert_same, make

OPS = {
    "+": lambda w: w + 1,
    "reversed +": lambda w: 1 + w,
    "reversed -": lambda w: 1 - w,
    "*": lambda w: w * w,
    "/": lambda w: w / 3,
    "**": lambda w: w**2,
    "-": lambda w: -w,
    "abs": abs,
    "==": lambda w: w == w.clone(),
    ">": lambda w: w > 0,
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(0),
    "max": lambda w: w.max(1),
    "norm": lambda w: w.norm(),
    "isnan": lambda w: w.isnan(),
    "argmax": lambda w: w.argmax(),
    "sort": lambda w: w.sort(0),
    "cumsum": lambda w: w.cumsum(1),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "masked_select": lambda w: w.masked_select(w > 0),
    "gather": lambda w: w.gather(1, torch.zeros(8, 1, dtype=int)),
    "take": lambda w: w.take(torch.tensor([3])),
    "tril": lambda w: w.tril(),
    "flip": lambda w: w.flip(0),
    "nonzero": lambda w: w.nonzero(),
    "softmax": lambda w: F.softmax(w, -1),
    "layer_norm": lambda w: F.layer_norm(w, (65,)),
    "normalize": lambda w: F.normalize(w),
    "fft": lambda w: torch.fft.rfft(w).abs(),
    "interpolate": lambda w: F.interpolate(w[None], 4),
    "conv1d": lambda w: F.conv1d(torch.ones(1, 65, 7), w[:, :, None]),
    "attention": lambda w: F.scaled_dot_product_attention(w[None], w[None], w[None]),
    "index_add": lambda w: w.index_add(0, torch.tensor([0]), torch.ones(1, 65)),
    "masked_fill": lambda w: w.masked_fill(w > 0, 1.0),
    "as out": lambda w: torch.mul(w, 2, out=torch.empty(8, 65)),
    "list of tensors": lambda w: torch._foreach_norm([w, torch.ones(3)]),
    "histc": lambda w: w.histc(10),
    "tensor by keyword": lambda w: torch.clamp(input=w, min=0),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_out_of_place_ops_decode_with_a_warning(op):
    q = make(8, 65)
    with pytest.warns(NF4TensorWarning, match="decodes an NF4Tensor to a dense tensor each time"):
        found = op(q)
    expected = op(q.dequantize())
    found, expected = (t if isinstance(t, tuple | list) else [t] for t in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is torch.Tensor
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_comparison_functions():
    q = make(8, 65)
    assert torch.equal(q, q.clone())
    assert torch.allclose(q, q.dequantize())
    assert not torch.equal(q, make(8, 65, seed=1))


def test_each_op_warns_once():
    q = make(8, 65)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            q.abs()
            q.neg()
    assert all(w.category is NF4TensorWarning for w in warned)
    assert [str(w.message).split()[0] for w in warned] == ["aten.abs.default", "aten.neg.default"]


def test_cuts_that_are_no_records_warn_once_whatever_their_columns():
    q = make(8, 65)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for start in range(10):
            q[:, start : start + 3]
    assert len(warned) == 1
    assert "not on multiples of 16" in str(warned[0].message)


def test_strict_mode_makes_errors_of_warnings(monkeypatch: pytest.MonkeyPatch):
    q = make(8, 65)
    monkeypatch.setenv("NF4TENSOR_STRICT", "1")
    for op in (lambda: q + 1, lambda: q.add_(1), lambda: q[:, 3], lambda: q.tolist()):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"\(NF4TENSOR_STRICT=1\)"):
                op()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ones(2, 65) @ q.t()
        q[3:].clone().to(torch.float16).dequantize()
    monkeypatch.setenv("NF4TENSOR_STRICT", "0")
    with pytest.warns(NF4TensorWarning):
        assert_same(q + 1, q.dequantize() + 1)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_errors_of_torch_are_those_of_torch():
    q = make(8, 65)
    for op in (lambda w: w.bernoulli(), lambda w: torch.linalg.det(w), lambda w: w + torch.ones(3)):
        with pytest.raises(RuntimeError) as dense:
            op(q.dequantize())
        with pytest.raises(RuntimeError) as found:
            op(q)
        assert str(found.value) == str(dense.value)


def test_composite_ops_are_taken_apart_in_inference_mode():
    q = make(8, 65)
    with torch.inference_mode():
        assert_same(q.unflatten(0, (2, 4)).flatten(0, 1), q)
        product = torch.ones(2, 65) @ q.t()
    assert_same(product, torch.ones(2, 65) @ q.t())
