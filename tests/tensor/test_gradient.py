"""What autograd keeps of a 4-bit weight, and that it never trains one without a word."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nf4tensor import NF4Tensor
from nf4tensor.errors import GradientError
from tests.tensor.weights import assert_same, dense, make

OUT, IN = 96, 128
bias = dense(OUT, seed=3)


def leaf(*shape: int) -> torch.Tensor:
    """Return a dense tensor that wants a gradient."""
    return dense(*shape, seed=5).requires_grad_()


PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w, bias.clone().requires_grad_()),
    "x @ w.t()": lambda x, w: x @ w.t(),
    "w @ x.t()": lambda x, w: w @ x.t(),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "mv": lambda x, w: torch.mv(w, x[0]),
    "addmm": lambda x, w: torch.addmm(bias.clone().requires_grad_(), x, w.t()),
    "addmm of a matrix": lambda x, w: torch.addmm(bias[None], x, w.t()),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "one row block": lambda x, w: F.linear(x, w[:10]),
    "a cut of columns": lambda x, w: F.linear(x[:, 64:], w[:, 64:]),
    "linear of the transposed": lambda x, w: F.linear(x[:, :OUT], w.t(), x[0]),
    "linear twice": lambda x, w: F.linear(F.linear(x, w), w.t()),
    "bmm": lambda x, w: torch.bmm(x[:, None].expand(5, 2, IN)[:1], w[None].mT),
}
OTHERS = {
    "sum": lambda x, w: w.sum(),
    "multiplication": lambda x, w: w * x[0],
    "norm": lambda x, w: w.norm(),
    "embedding": lambda x, w: F.embedding(torch.tensor([1, 2]), w),
    "embedding_bag": lambda x, w: F.embedding_bag(torch.tensor([[1, 2]]), w),
    "dequantize": lambda x, w: w.dequantize(),
    "get_original_weight": lambda x, w: F.linear(x, w.get_original_weight()),
    "cast": lambda x, w: F.linear(x, w.to(torch.bfloat16)),
    "clone": lambda x, w: F.linear(x, w.clone()),
    "cat": lambda x, w: F.linear(x, torch.cat([w, w])),
    "view": lambda x, w: F.linear(x, w.view(2, 48, IN)[0]),
    "addmv": lambda x, w: torch.addmv(bias, w, x[0]),
    "inner": lambda x, w: torch.inner(x, w),
}
every_product = pytest.mark.parametrize("form", PRODUCTS.values(), ids=PRODUCTS)
every_form = pytest.mark.parametrize(
    "form", [*PRODUCTS.values(), *OTHERS.values()], ids=[*PRODUCTS, *OTHERS]
)


@every_product
def test_backward_holds_packed_bytes_only(form):
    q, x = make(OUT, IN), leaf(5, IN)
    saved: list[torch.Tensor] = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = form(x, q)
    floats = [t for t in saved if t.is_floating_point() and t.numel() >= OUT * IN]
    assert not floats
    records = [t for t in saved if t.dtype == torch.uint8]
    assert records
    output.sum().backward()
    assert x.grad is not None


def test_backward_keeps_the_record_itself():
    """FSDP2 frees and refills the storage of a gathered record: a copy would keep it alive."""
    q, x = make(OUT, IN), leaf(5, IN)
    addresses = []
    with saved_tensors_hooks(lambda t: (addresses.append(t.data_ptr()), t)[1], lambda t: t):
        F.linear(x, q)
    assert addresses == [q.data_ptr()]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    q = make(OUT, IN)
    gradients = []
    for run in (lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant), lambda f, x: f(x)):
        x = leaf(5, IN)
        run(lambda a: F.linear(a, q).square() @ q, x).sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)


@every_product
def test_saved_tensors_on_the_cpu(form):
    q = make(OUT, IN)
    gradients = []
    for context in (save_on_cpu(), saved_tensors_hooks(*REPACK), saved_tensors_hooks(*PLAIN)):
        x = leaf(5, IN)
        with context:
            output = form(x, q)
        output.square().sum().backward()
        gradients.append(x.grad)
    assert_same(gradients[0], gradients[2])
    assert_same(gradients[1], gradients[2])


PLAIN = (lambda t: t, lambda t: t)
REPACK = (lambda t: (t.clone().flatten(), t.shape), lambda packed: packed[0].view(packed[1]))


# requires_grad=True


@every_form
@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_backward_to_the_weight_raises(form, is_parameter):
    q = make(OUT, IN)
    q = nn.Parameter(q) if is_parameter else q.requires_grad_()
    assert q.requires_grad
    for x in (leaf(5, IN), dense(5, IN)):
        output = form(x, q)
        with pytest.raises(GradientError, match=r"call weight.requires_grad_\(False\)"):
            output.sum().backward()
    assert q.grad is None


@every_product
def test_gradient_of_the_input_alone_is_given(form):
    q, frozen, x = make(OUT, IN).requires_grad_(), make(OUT, IN), leaf(5, IN)
    (found,) = torch.autograd.grad(form(x, q).sum(), x)
    (expected,) = torch.autograd.grad(form(x, frozen).sum(), x)
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_every_way_to_ask_for_a_gradient():
    x = dense(5, IN)
    property_set = make(OUT, IN)
    property_set.requires_grad = True
    model = nn.Linear(IN, OUT, bias=False)
    model.weight = nn.Parameter(make(OUT, IN), requires_grad=False)
    model.requires_grad_(True)
    casted = copy.deepcopy(model).bfloat16().float()
    for weight in (property_set, model.weight, copy.deepcopy(model.weight), casted.weight):
        assert weight.requires_grad
        with pytest.raises(GradientError, match="NF4Tensor"):
            F.linear(x, weight).sum().backward()
        with pytest.raises(GradientError, match="NF4Tensor"):
            (weight * 1.0).sum().backward()


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_freezing_again_helps():
    q, x = nn.Parameter(make(OUT, IN)), leaf(5, IN)
    for _ in range(2):
        q.requires_grad_(True)
        assert len(q._backward_hooks) == 1
        q.requires_grad_(False)
    (F.linear(x, q).sum() + (q * x[0]).sum()).backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_without_gradients_nothing_is_refused():
    q = nn.Parameter(make(OUT, IN))
    x = dense(5, IN)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for form in (*PRODUCTS.values(), *OTHERS.values()):
                assert not form(x, q).requires_grad


def test_views_in_inference_mode_stay_normal_tensors():
    q = make(OUT, IN)
    views = (
        lambda w: w[3],
        lambda w: w[3:5],
        lambda w: w.t(),
        lambda w: w.view(-1),
        lambda w: w.squeeze(),
        lambda w: w[:, :64],
        lambda w: w.expand(2, OUT, IN),
        lambda w: w.chunk(3)[1],
        lambda w: nn.Parameter(w, requires_grad=False),
    )
    with torch.inference_mode():
        found = [view(q) for view in views]
        assert make(OUT, IN).is_inference()
        assert q.clone().is_inference()
    for tensor, view in zip(found, views, strict=True):
        assert isinstance(tensor, NF4Tensor)
        assert not tensor.is_inference()
        assert_same(tensor, view(q))
    F.linear(leaf(5, IN), found[-1]).sum().backward()


VIEWS = {
    "all": lambda q: q[:],
    "rows": lambda q: q[0:3],
    "a row": lambda q: q[1],
    "flat": lambda q: q.view(-1),
    "transposed": lambda q: q.t(),
    "detached": lambda q: q.detach(),
    "data": lambda q: q.data,
    "a piece": lambda q: q.chunk(3)[0],
    "an unsafe piece": lambda q: q.unsafe_chunk(3)[0],
    "a view of views": lambda q: q[None][0].view(2, -1, IN)[0][1:],
    "a parameter": lambda q: nn.Parameter(q, requires_grad=False)[:1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_write_through_a_view_before_backward_is_noticed(view, mode):
    for used in (lambda q: q, lambda q: q[:10], lambda q: q.view(2, -1, IN)[0]):
        q = make(OUT, IN)
        output = F.linear(leaf(5, IN), used(q))
        with mode():
            view(q).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_writes_elsewhere_leave_backward_alone():
    q = make(OUT, IN)
    output = F.linear(leaf(5, IN), q)
    q.clone().zero_()
    q[torch.tensor([1])].zero_()
    copy.deepcopy(q)[1:].zero_()
    output.sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda q: q.mul_(2),
        lambda q: q.copy_(dense(OUT, IN, seed=9)),
        lambda q: q.copy_(make(OUT, IN, seed=9)),
        lambda q: q.zero_(),
        lambda q: q.__setitem__(torch.tensor([1, 2]), make(2, IN)),
    ],
)
@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_a_write_before_backward_is_noticed(write):
    q, inputs = make(OUT, IN), leaf(5, IN)
    output = F.linear(inputs, q)
    with torch.no_grad():
        write(q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_decoding_into_what_autograd_saved_is_noticed():
    q, saved = make(OUT, IN), torch.ones(OUT, IN)
    output = (saved * leaf(OUT, IN)).sum()
    q.dequantize(out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_out_that_requires_a_gradient_is_refused():
    q, out = make(OUT, IN), leaf(OUT, IN)
    for target in (out, out * 2):
        with pytest.raises(GradientError, match=r"out requires a gradient.*give out.detach\(\)"):
            q.dequantize(out=target)
    with torch.no_grad():
        assert_same(q.dequantize(out=out), q)
