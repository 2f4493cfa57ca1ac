"""Decoded copies that torch takes for views: dense for every use, and never written unnoticed."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from nf4tensor import NF4Tensor
from nf4tensor.errors import UnsupportedError
from nf4tensor.tensor.decoded import DecodedView
from tests.tensor.weights import assert_same, dense, file_of, load, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

VIEWS = {
    "a column": lambda w: w[:, 3],
    "columns": lambda w: w[:, 3:40],
    "every other column": lambda w: w[:, ::2],
    "an element": lambda w: w[1, 2],
    "a piece of a split": lambda w: w.split([10, 86], 1)[1],
    "a piece of an unsafe split": lambda w: w.unsafe_chunk(5, 1)[0],
    "unbound columns": lambda w: w.unbind(1)[2],
    "narrow": lambda w: w.narrow(1, 1, 20),
    "diagonal": lambda w: w.diagonal(),
    "a row of the transposed": lambda w: w.T[3],
    "expanded transposed": lambda w: w.T.expand(1, 96, 32),
    "unfold": lambda w: w.unfold(1, 5, 3),
    "unsqueezed last": lambda w: w[..., None],
    "permuted": lambda w: w.view(4, 8, 96).permute(2, 0, 1),
    "as_strided": lambda w: w.as_strided((2, 3), (1, 1)),
    "bits": lambda w: w.view(torch.int32),
    "a view of a view": lambda w: w[:, 3:40][2:5].T[1:],
    "detached": lambda w: w[:, 3:40].detach(),
    "data": lambda w: w[:, 3:40].data,
    "reshaped": lambda w: w[:, 3].reshape(4, 8),
    "contiguous already": lambda w: w[1, 3:9].contiguous(),
    "asked for no gradient": lambda w: w[:, 3:40].requires_grad_(False),
}
WRITES = {
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(9),
    "mul_": lambda v: v.mul_(0),
    "+=": lambda v: v.__iadd__(1),
    "copy_": lambda v: v.copy_(v.clone()),
    "assignment": lambda v: v.__setitem__(..., 1),
    "out": lambda v: torch.add(v.clone(), 1, out=v),
    "foreach": lambda v: torch._foreach_zero_([v]),
    "data": lambda v: setattr(v, "data", v.clone()),
    "masked_fill_": lambda v: v.masked_fill_(torch.ones_like(v, dtype=torch.bool), 1),
    "resize_": lambda v: v.resize_(3),
    "set_": lambda v: v.set_(v.clone()),
    "random": lambda v: v.random_(),
    "share_memory_": lambda v: v.share_memory_(),
    "storage": lambda v: v.storage(),
    "rank with out": lambda v: torch.linalg.matrix_rank(torch.ones(2, 2), out=v),
    "through numpy": lambda v: v.numpy().fill(1),
    "through an array": lambda v: np.asarray(v).fill(1),
}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@views
def test_every_write_raises_and_changes_nothing(view):
    q = make(32, 96)
    before = q.record.clone()
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        for write in WRITES.values():
            with mode():
                found = view(q)
                assert type(found) is DecodedView
                values = found.clone()
                with pytest.raises(
                    (UnsupportedError, ValueError),
                    match=r"would write into a decoded copy of part of an NF4Tensor|read-only",
                ):
                    write(found)
                assert_same(found.clone(), values)
    assert torch.equal(q.record, before)


USES = {
    "+": lambda v: v + 1,
    "sum": lambda v: v.sum(),
    "clone": lambda v: v.clone(),
    "clone written": lambda v: v.clone().zero_(),
    "stack": lambda v: torch.stack([v, v]),
    "cat": lambda v: torch.cat([v.reshape(-1), v.reshape(-1)]),
    "view and read": lambda v: v[None, None].mT,
    "to": lambda v: v.to(torch.float16),
    "numpy": lambda v: torch.as_tensor(v.numpy()),
    "array": lambda v: torch.as_tensor(np.asarray(v)),
    "dlpack": lambda v: torch.from_dlpack(v),
    "tolist": lambda v: torch.tensor(v.tolist()).to(v.dtype),
    "deepcopy": lambda v: copy.deepcopy(v),
    "file": lambda v: load(file_of(v)),
    "repr": lambda v: torch.tensor(len(repr(v))),
    "vmap": lambda v: torch.vmap(lambda a: a * 2)(v[None]),
    "parameter": lambda v: copy.deepcopy(nn.Parameter(v, requires_grad=False)).detach(),
    "as_strided": lambda v: torch.as_strided(v, (1,), (1,), v.storage_offset()),
    "into a dense tensor": lambda v: torch.ones_like(v).copy_(v),
    "as out of nothing": lambda v: torch.mul(v, 2, out=torch.empty_like(v)),
}


@views
def test_every_use_is_that_of_the_dense_view(view):
    q = make(32, 96)
    d = q.dequantize()
    for use in USES.values():
        assert_same(use(view(q)).clone(), use(view(d)).clone())
    assert view(q).stride() == view(d).stride()
    assert view(q).data_ptr() != 0


def test_single_elements_and_questions():
    v, e = make(32, 96)[:, 3], make(32, 96).dequantize()[:, 3]
    assert f"{v[1]:.3f}" == f"{e[1]:.3f}"
    assert v[1].item() == float(v[1]) == e[1].item()
    assert bool(v[1]) == bool(e[1])
    assert int(torch.linalg.matrix_rank(make(4, 4)[:, :3])) == 3
    assert not v.is_shared()
    assert len(v) == 32


def test_products_with_a_weight_and_gradients():
    q, x = make(32, 96), dense(5, 32).requires_grad_()
    output = F.linear(x, q.T[3:10]) @ F.linear(q[:7, 3:99], q[:, 3:96])
    assert type(output) is torch.Tensor
    output.sum().backward()
    gradient, x.grad = x.grad, None
    d = q.dequantize()
    (F.linear(x, d.T[3:10]) @ F.linear(d[:7, 3:99], d[:, 3:96])).sum().backward()
    assert torch.allclose(gradient, x.grad, rtol=1e-4, atol=1e-4)


# Under torch.compile


@pytest.fixture
def counter() -> CompileCounterWithBackend:
    """A backend that counts graphs and runs them as they are."""
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


def test_compiled_graphs_make_take_and_return_views(counter):
    q = make(32, 96)
    d = q.dequantize()

    def function(w, column):
        return w[:, 3] * column + w.diagonal(), w.T[5]

    found = torch.compile(function, fullgraph=True, backend=counter)(q, q[:, 7])
    assert counter.frame_count == 1
    assert type(found[1]) is DecodedView
    for one, other in zip(found, function(d, d[:, 7]), strict=True):
        assert_same(one.clone(), other)
    with pytest.raises(UnsupportedError, match="would write into a decoded copy"):
        found[1].zero_()


def test_views_across_a_graph_break(counter):
    def function(w):
        column = w[:, 3]
        torch._dynamo.graph_break()
        return column + 1

    q = make(32, 96)
    assert_same(torch.compile(function, backend=counter)(q), q.dequantize()[:, 3] + 1)


def test_compiled_writes_raise_as_eager_ones_do(counter):
    def function(w):
        w[:, 3].mul_(0)

    q = make(32, 96)
    before = q.record.clone()
    with pytest.raises(Unsupported, match="would write into a decoded copy"):
        torch.compile(function, fullgraph=True, backend=counter)(q)
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="would write into a decoded copy"):
        torch.compile(function, backend=counter)(q)
    assert torch.equal(q.record, before)


def test_what_numpy_gets_of_a_whole_weight_is_read_only():
    q = make(32, 96)
    assert isinstance(q, NF4Tensor)
    for array in (q.numpy(), np.asarray(q)):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    np.array(q)[0, 0] = 1
