"""Other ways to call, and to hold, a 4-bit tensor: keywords, old forms, modules, views of views."""

import copy
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from nf4tensor import NF4Tensor, to_nf4
from nf4tensor.errors import NF4TensorError, UnsupportedError
from tests.tensor.weights import assert_same, dense, make

pytestmark = pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
x, bias = dense(3, 64, seed=1), dense(8, seed=2)


@pytest.fixture
def q() -> NF4Tensor:
    """A small weight."""
    return make(8, 64)


CALLS = {
    "mm by keywords": lambda w: torch.mm(input=x, mat2=w.T),
    "matmul by keywords": lambda w: torch.matmul(other=w.T, input=x),
    "matmul of the class": lambda w: torch.Tensor.matmul(x, other=w.T),
    "bmm by keywords": lambda w: torch.bmm(input=x[None], mat2=w.T[None]),
    "mv by keywords": lambda w: torch.mv(vec=x[0], input=w),
    "addmm by keywords": lambda w: torch.addmm(mat2=w.T, mat1=x, input=bias, beta=2),
    "addmm of old": lambda w: torch.addmm(2, bias, 3, x, w.T),
    "addmm of old with one factor": lambda w: torch.addmm(2, bias, x, w.T),
    "addmm_": lambda w: torch.ones(3, 8).addmm_(x, w.T, beta=0.5),
    "linear by keywords": lambda w: F.linear(bias=bias, weight=w, input=x),
    "linear with out": lambda w: torch._C._nn.linear(x, w, bias, out=torch.empty(3, 8)),
    "mm with out": lambda w: torch.mm(x, w.T, out=torch.empty(3, 8)),
    "matmul with out": lambda w: torch.matmul(x, w.T, out=torch.empty(3, 8)),
    "einsum of a list": lambda w: torch.einsum("bi,oi->bo", [x, w]),
    "einsum of sublists": lambda w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]),
    "@ from the right": lambda w: w.T.__rmatmul__(x),
    "multi_dot": lambda w: torch.linalg.multi_dot([x, w.T, w]),
    "an op by name": lambda w: torch.ops.aten.linear(x, w),
    "an op by packet": lambda w: torch.ops.aten.add(w, 1),
    "an op by overload": lambda w: torch.ops.aten.select.int(w, 1, 2),
    "embedding by keywords": lambda w: F.embedding(weight=w, input=torch.tensor([1])),
    "rank with out": lambda w: torch.linalg.matrix_rank(w, out=torch.tensor(0)),
    "attention": lambda w: F.scaled_dot_product_attention(w[None], w[None], w[None]),
    "random like the transposed": lambda w: torch.manual_seed(0) and torch.rand_like(w.T),
    "dropout of the transposed": lambda w: torch.manual_seed(0) and F.dropout(w.T, 0.5),
}


@pytest.mark.filterwarnings("ignore:This overload of addmm:UserWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_forms_of_a_call(call, q):
    found, expected = call(q), call(q.dequantize())
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


IN_PLACE = {
    "+=": lambda w: w.__iadd__(1),
    "-=": lambda w: w.__isub__(x[0]),
    "*=": lambda w: w.__imul__(2),
    "/=": lambda w: w.__itruediv__(2),
    "add_ by keywords": lambda w: torch.Tensor.add_(w, other=x[0], alpha=2),
    "mul_ by keywords": lambda w: torch.Tensor.mul_(w, other=x[0]),
    "fill_ by keywords": lambda w: w.fill_(value=1.5),
    "copy_ without waiting": lambda w: w.copy_(x[0], non_blocking=True),
    "an op by overload": lambda w: torch.ops.aten.mul_.Tensor(w, torch.tensor(2.0)),
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_forms_of_a_write(write, q):
    expected = to_nf4(write(q.dequantize()))
    assert_same(write(q), expected)


def test_data_of_a_view_is_written_through(q):
    q[2:4].data = dense(2, 64, seed=5)
    assert_same(q[2:4], to_nf4(dense(2, 64, seed=5)))
    assert_same(q[4:], make(8, 64)[4:])
    with pytest.raises(UnsupportedError, match=r"would change a copy: clone\(\) it first"):
        q[:, :32].data = dense(8, 32)


VIEWS = {
    "itself": lambda w: w[:],
    "rows": lambda w: w[1:3],
    "a row": lambda w: w[1],
    "every other row": lambda w: w[::2],
    "columns 0 to 16": lambda w: w[..., :16],
    "columns 3 to 20": lambda w: w[..., 3:20],
    "a column": lambda w: w[..., 3],
    "flat": lambda w: w.view(-1),
    "transposed": lambda w: w.mT,
    "unsqueezed": lambda w: w[None],
    "halves": lambda w: w.unflatten(0, (2, -1)),
    "diagonal": lambda w: w.diagonal(),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "last piece": lambda w: w.chunk(3)[-1],
    "unbound": lambda w: w.unbind()[1],
    "expanded": lambda w: w.expand(2, *w.shape),
    "detached": lambda w: w.detach(),
    "movedim": lambda w: w.movedim(0, -1),
    "unfold": lambda w: w.unfold(0, 2, 1),
    "as_strided": lambda w: w.as_strided((2,), (1,)),
    "unsafe pieces": lambda w: w.unsafe_chunk(2)[1],
}


@pytest.mark.parametrize("first", VIEWS.values(), ids=VIEWS)
def test_writes_through_views_of_views_arrive_or_raise(first):
    for second in VIEWS.values():
        q = make(8, 64)
        d = q.dequantize()
        try:
            second(first(d)).zero_()
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError, NF4TensorError)):
                second(first(q)).zero_()
            continue
        try:
            second(first(q)).zero_()
        except UnsupportedError:
            assert_same(q, make(8, 64))
        else:
            assert_same(q, d)


# In modules


def linear(weight: torch.Tensor) -> nn.Linear:
    """Return a frozen layer of a weight."""
    layer = nn.Linear(64, 8, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def test_functional_call_puts_a_weight_in_or_takes_it_out(q):
    quantized, plain = linear(q), linear(dense(8, 64))
    assert_same(torch.func.functional_call(plain, {"weight": q}, (x,)), F.linear(x, q))
    d = q.dequantize()
    assert_same(torch.func.functional_call(quantized, {"weight": d}, (x,)), F.linear(x, d))
    assert isinstance(quantized.weight, NF4Tensor)


class Twice(nn.Module):
    """A parametrization that computes."""

    def forward(self, weight):
        return weight * 2


def test_parametrizations_see_the_decoded_weight(q):
    layer = linear(q.clone())
    parametrize.register_parametrization(layer, "weight", Twice())
    assert_same(layer(x), F.linear(x, q.dequantize() * 2))
    assert torch.equal(layer.parametrizations.weight.original.record, q.record)
    parametrize.remove_parametrizations(layer, "weight")
    assert_same(layer.weight.detach(), q.dequantize() * 2)
    layer = linear(q.clone())
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert_same(layer(x), F.linear(x, q))
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight.record, q.record)


@pytest.mark.parametrize(
    "normalize",
    [parametrizations.weight_norm, parametrizations.orthogonal],
    ids=lambda f: f.__name__,
)
def test_normalizations_of_torch(normalize, q):
    found, expected = normalize(linear(q.clone())), normalize(linear(q.dequantize()))
    assert torch.allclose(found(x), expected(x), rtol=1e-4, atol=1e-4)


def test_swapping_tensors(q):
    for other in (dense(8, 64, seed=5), make(4, 128, seed=5)):
        one = nn.Parameter(q.clone(), requires_grad=False)
        two = nn.Parameter(other.clone(), requires_grad=False)
        torch.utils.swap_tensors(one, two)
        assert isinstance(two, NF4Tensor)
        assert torch.equal(two.record, q.record)
        assert_same(one.detach(), other)
        assert_same(F.linear(x, two), F.linear(x, q))


def test_swapping_on_conversion(q):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = linear(q.clone()).to(torch.bfloat16)
        assert layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.weight.record, q.record)
        layer.load_state_dict({"weight": make(8, 64, seed=5)})
        assert torch.equal(layer.weight.record, make(8, 64, seed=5).record)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_hooks(q):
    layer, calls, inputs = linear(q), [], x.clone().requires_grad_()
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer(inputs).sum().backward()
    assert calls == ["before", "after", "backward"]
    assert_same(inputs.grad, torch.ones(3, 8) @ q)


# The tensor itself


def test_shallow_copies_share_the_record(q):
    for tensor in (q, nn.Parameter(q), nn.Parameter(q, requires_grad=False)):
        twin = copy.copy(tensor)
        assert twin is not tensor
        assert isinstance(twin, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert twin.requires_grad == tensor.requires_grad
        assert twin.data_ptr() == tensor.data_ptr()
    assert weakref.ref(q)() is q


def test_the_same_look_at_the_same_memory(q):
    assert q.is_set_to(q.detach())
    assert not q.is_set_to(q.clone())
    assert not q.is_set_to(q[1:])
    assert not make(8, 8).is_set_to(make(8, 8).T)
    assert not q.is_set_to(q.dequantize())


def test_shared_memory_of_views(q):
    q[2:].share_memory_()
    assert q[2:].is_shared()
    assert_same(q, make(8, 64))


def test_arithmetic_on_what_is_not_filled_raises(q):
    """torch computes 1 - w as `empty_like(w).fill_(1).sub_(w)` in gradients: it would round."""
    start = x[0].clone().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"made of an NF4Tensor.*or compute on dequantize"):
        torch.lerp(start, dense(8, 64), q).sum().backward()
    torch.lerp(start, dense(8, 64), q.dequantize()).sum().backward()
    for maker in (torch.empty_like, lambda w: w.new_empty(8, 64), lambda w: w.new_zeros(8, 64)):
        with pytest.raises(UnsupportedError, match=r"make the accumulator with torch\.zeros"):
            maker(q).fill_(1).sub_(q)
        assert_same(maker(q).copy_(q).sub_(q), torch.zeros(8, 64))
    loaded = torch.empty_like(q).copy_(dense(8, 64)).add_(1)
    assert_same(loaded, to_nf4(q.dequantize() + 1))


def test_running_statistics_are_never_lost(q):
    images = dense(2, 64, 3)
    for mean in (q[0].clone(), q.T.expand(1, 64, 8)[0, :, 0]):
        assert_same(
            F.batch_norm(images, mean, torch.ones(64)),
            F.batch_norm(images, mean + 0, torch.ones(64)),
        )
        with pytest.raises(UnsupportedError, match="would write into"):
            F.batch_norm(images, mean, torch.ones(64), training=True)


def test_combinations_of_rows_and_views_have_the_values_of_torch(q):
    d = q.dequantize()
    for first, second in itertools.product(VIEWS.values(), repeat=2):
        try:
            expected = second(first(d))
        except (RuntimeError, IndexError):
            continue
        try:
            found = second(first(q))
        except UnsupportedError:
            continue
        assert_same(found.clone(), expected.clone())
