"""Under torch.compile: one graph, no dense weight in it, the bits of eager mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from nf4tensor import to_nf4
from nf4tensor.errors import GradientError, UnsupportedError
from tests.fsdp.training import LoRALinear, is_base
from tests.tensor.weights import assert_same, dense, make

# torch's own, at its first compilation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture
def counter() -> CompileCounterWithBackend:
    """A backend that counts graphs and runs them as they are."""
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


def lora(seed: int, **options) -> LoRALinear:
    """Return a layer with a 4-bit base."""
    torch.manual_seed(seed)
    layer = LoRALinear(64, 96)
    layer.lora_b.weight.data.normal_()
    layer.base.weight = nn.Parameter(to_nf4(layer.base.weight, **options), requires_grad=False)
    assert is_base(layer, "base")
    return layer


def results(run, layer: nn.Module) -> list[torch.Tensor]:
    """Return the output and every gradient."""
    x = dense(5, 64).requires_grad_()
    layer.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output, x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


def test_layers_equal_eager_mode_without_compiling_twice(counter):
    for seed, options, graphs in (
        (0, {}, 1),
        (1, {}, 1),
        (2, {"block_size": 32}, 2),  # of another spec, whose record has the same shape
        (3, {"block_size": 32}, 2),
    ):
        layer = lora(seed, **options)
        assert layer.base.weight.record.shape == (96, 64)
        expected = results(layer, layer)
        found = results(torch.compile(layer, fullgraph=True, backend=counter), layer)
        assert counter.frame_count == graphs
        for one, other in zip(found, expected, strict=True):
            assert_same(one.detach(), other.detach())


def test_other_products_and_casts(counter):
    def function(w, x):
        y = x @ w.t() + torch.einsum("bi,oi->bo", x, w) + torch.addmm(torch.ones(96), x, w.t())
        z = F.linear(x, torch.cat([w, w])[32:128]) + F.linear(x[:, 16:], w[:, 16:])
        return y + z, y @ w, w.dequantize(torch.bfloat16), F.embedding(torch.tensor([3]), w)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for q in (make(96, 64), make(96, 64, seed=1)):
        for one, other in zip(compiled(q, dense(3, 64)), function(q, dense(3, 64)), strict=True):
            assert_same(one, other)
    assert counter.frame_count == 1


def test_autocast_and_quantizing(counter):
    def function(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w), to_nf4(x).record

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    q, x = make(96, 64), dense(3, 64)
    for one, other in zip(compiled(q, x), function(q, x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_backward_to_the_weight_raises(counter):
    layer = lora(0)
    layer.base.weight.requires_grad_(True)
    with pytest.raises(GradientError, match=r"requires_grad_\(False\)"):
        results(torch.compile(layer, fullgraph=True, backend=counter), layer)


def test_what_new_zeros_made_stays_an_accumulator(counter):
    q = make(96, 64)
    zeros = torch.compile(lambda w: w.new_zeros(4, 64), fullgraph=True, backend=counter)(q)
    with pytest.raises(UnsupportedError, match="what new_zeros made"):
        zeros.add_(1)


def test_what_changes_code_changes_the_key_of_caches():
    q = make(96, 64)
    others = {
        "codebook": make(96, 64, quant_type="fp4"),
        "block size": make(96, 64, block_size=32),
        "dtype": q.to(torch.bfloat16),
        "view": q.t(),
        "columns that were cut": make(96, 128)[:, :64],
        "rows": q[:95],
        "strides": make(192, 64)[::2],
        "made by new_zeros": q.new_zeros(96, 64),
        "requires_grad": make(96, 64).requires_grad_(),
        "device": q.to("meta"),
    }
    keys = {name: other._stable_hash_for_caching() for name, other in others.items()}
    keys["itself"] = q._stable_hash_for_caching()
    assert len(set(keys.values())) == len(keys)
    assert make(96, 64, seed=1)._stable_hash_for_caching() == keys["itself"]


@pytest.mark.slow
def test_caches_of_inductor_tell_specs_apart():
    torch._dynamo.reset()
    for options in ({}, {"block_size": 32}, {"quant_type": "fp4"}, {}):
        q = make(96, 64, **options)
        assert q.record.shape == (96, 64)
        found = torch.compile(lambda w: w.dequantize().abs() * 2, fullgraph=True)(q)
        torch._dynamo.reset()  # the caches on disk stay
        assert_same(found, q.dequantize().abs() * 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_changes_no_bits(dtype):
    def function(w, x):
        h = F.linear(torch.relu(x) * 2, w)
        return h, torch.relu(h) @ w, w.dequantize(dtype) * 2

    torch._dynamo.reset()
    q, x = make(96, 64), dense(7, 64).to(dtype)
    found = torch.compile(function, fullgraph=True)(q, x)
    for one, other in zip(found, function(q, x), strict=True):
        assert_same(one, other)
