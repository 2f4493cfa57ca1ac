"""Faults seen in other 4-bit tensors, one test for each: the right value, or a clear error.

`q = to_nf4(w)` and `d = q.dequantize()` throughout. The families' own tests go through each kind of
fault; these are the cases by which it is known. Those of several ranks are in
`test_collectives.py` (DDP's broadcast keeps bytes) and in `tests/fsdp/test_fully_shard.py` (what
cannot be sharded raises on every rank, before the first collective).
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from nf4tensor import NF4Tensor, NF4TensorWarning, memory_footprint, quantize_, to_nf4
from nf4tensor.errors import GradientError, SpecError, UnsupportedError, WeightError
from tests.tensor.weights import (
    assert_same,
    assert_same_products,
    dense,
    file_of,
    make,
    shares_memory,
)

w = dense(512, 512)
q = to_nf4(w)
d = q.dequantize()
x = dense(3, 512, seed=1)
MAGNITUDES = x.double().abs() @ d.double().abs().t()


def test_matmul_with_the_transposed_and_with_the_weight():
    assert_same_products(x @ q.t(), x @ d.t(), MAGNITUDES, 512)
    assert_same_products(x @ q, x @ d, x.double().abs() @ d.double().abs(), 512)
    assert not torch.equal(x @ q, x @ q.t())


def test_linear_keeps_its_bias_and_takes_keywords():
    bias = dense(512, seed=2)
    found = F.linear(x, q, bias)
    assert_same_products(found, F.linear(x, d, bias), MAGNITUDES + bias.abs(), 513)
    assert_same(F.linear(x, q, bias=bias), found)
    assert_same(F.linear(bias=bias, weight=q, input=x), found)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 100, 511, 512, 600])
def test_chunk_has_the_sizes_of_torch(count):
    assert [c.shape for c in torch.chunk(q, count)] == [c.shape for c in torch.chunk(d, count)]


def test_empty_like_is_fresh_memory():
    other = make(512, 512, seed=1)
    torch.empty_like(q).copy_(other)
    assert_same(q, d)


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.clone(),
        copy.deepcopy,
        lambda t: t.cpu(),
        lambda t: t.to("cpu", copy=True),
        lambda t: t.to(torch.bfloat16).to(torch.float32),
    ],
)
def test_copies_and_moves_never_quantize_again(move):
    assert torch.equal(move(q).record, q.record)


def test_view_has_the_right_size_or_says_why():
    assert q.view(2, 256, 512).shape == (2, 256, 512)
    assert q.view(-1).shape == (512 * 512,)
    with pytest.raises(UnsupportedError, match="as \\(256, 1024\\) would cut its rows"):
        q.view(256, 1024)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half()])
def test_casting_a_module_allocates_no_dense_weight(cast):
    model = quantize_(nn.Sequential(nn.Linear(512, 512, bias=False)), progress=False)
    before = memory_footprint(model)
    record = model[0].weight.record.clone()
    cast(model)
    assert memory_footprint(model) == before == 512 * q.spec.pitch
    assert torch.equal(model[0].weight.record, record)


def test_to_empty_leaves_nothing_on_meta():
    model = quantize_(nn.Sequential(nn.Linear(512, 512)), progress=False).to("meta")
    weight = model.to_empty(device="cpu")[0].weight
    assert weight.device == weight.record.device == torch.device("cpu")
    assert weight.dequantize().shape == (512, 512)


def test_strides_and_offsets_of_the_source_are_not_kept():
    for source in (w.t(), w[256:], w[:, 100:]):
        assert torch.equal(to_nf4(source).record, to_nf4(source.contiguous()).record)
        assert to_nf4(source).is_contiguous()


def test_a_zero_block_beside_an_outlier_is_zero():
    weight = dense(4, 512)
    weight[:, 64:128] = 0
    weight[:, 200] = 1e4
    decoded = to_nf4(weight).dequantize()
    assert not decoded[:, 64:128].any()
    assert not decoded[:, 64:128].signbit().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_element_is_counted_and_placed(value):
    weight = w.clone()
    weight[7, 3] = value
    with pytest.raises(WeightError, match=r"has 1 NaN or infinite elements, the first at \(7, 3\)"):
        to_nf4(weight)


def test_quantizing_by_rank_equals_quantizing_the_whole():
    for world_size in range(1, 9):
        for rows, shard in zip(w.chunk(world_size), q.chunk(world_size), strict=True):
            assert torch.equal(to_nf4(rows).record, shard.record)


def test_saving_a_shard_writes_its_bytes():
    shard = q.chunk(8)[3]
    assert shard.nbytes <= len(file_of(shard)) < shard.nbytes + 2000


def test_share_memory_works():
    shared = q.clone().share_memory_()
    assert shared.is_shared()
    assert_same(shared, d)


def test_another_block_size_is_never_quantized_again_silently():
    other = to_nf4(w, 32)
    with pytest.raises(SpecError, match=r"(?s)block_size=64.*block_size=32.*assign=True"):
        other.copy_(q)
    layer = nn.Linear(512, 512, bias=False)
    layer.weight = nn.Parameter(other, requires_grad=False)
    with pytest.raises(RuntimeError, match=r"(?s)block_size=64.*block_size=32.*assign=True"):
        layer.load_state_dict({"weight": q})
    layer.load_state_dict({"weight": q}, assign=True)
    assert torch.equal(layer.weight.record, q.record)
    twin = make(512, 512, seed=1)
    assert torch.equal(twin.copy_(q).record, q.record)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_writes_into_columns_are_never_lost():
    for write in (
        lambda t: t[:, :64].mul_(0),
        lambda t: t[:, :64].requires_grad_(False).fill_(9),
        lambda t: t[:, 3].mul_(0),
        lambda t: t[:, 3:40].zero_(),
        lambda t: t.diagonal().zero_(),
        lambda t: t.T[3].add_(1),
        lambda t: t.__setitem__((slice(None), 0), 0.0),
        lambda t: t.__setitem__((slice(None), slice(0, 64)), 0.0),
    ):
        with pytest.raises(UnsupportedError, match=r"clone\(\) (it|that copy)|assign whole rows"):
            write(q)
    assert_same(q, d)


def test_new_zeros_is_no_accumulator():
    h = q.new_zeros(3, 512)
    with pytest.raises(UnsupportedError, match=r"make the accumulator with torch.zeros"):
        h += x
    with pytest.raises(UnsupportedError, match=r"make the accumulator with torch.zeros"):
        h[0] += x[0]


def test_a_trained_weight_raises_in_backward():
    weight = nn.Parameter(q)
    with pytest.raises(GradientError, match=r"call weight.requires_grad_\(False\)"):
        F.linear(x, weight).sum().backward()


def test_backward_holds_packed_bytes_only():
    saved = []
    with saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        F.linear(x.clone().requires_grad_(), q)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.uint8, q.nbytes)]


def test_assigning_data_writes_in_place():
    target = make(512, 512, seed=1)
    target.data = q
    assert torch.equal(target.record, q.record)
    with pytest.warns(NF4TensorWarning, match="rounds to 4 bits"):
        target.data = w * 2
    assert torch.equal(target.record, to_nf4(w * 2).record)
    assert_same(F.linear(x, target), F.linear(x, to_nf4(w * 2)))


@pytest.mark.filterwarnings("ignore:aten.sub_.Tensor into:nf4tensor.NF4TensorWarning")
def test_adapters_merge_in_place_and_say_that_it_rounds():
    delta = dense(512, 512, seed=3)
    target = q.clone()
    with pytest.warns(NF4TensorWarning, match=r"loses small changes.*merge into dequantize\(\)"):
        target += delta
    target -= delta * 0.5
    expected = to_nf4(to_nf4(d + delta).dequantize() - delta * 0.5)
    assert torch.equal(target.record, expected.record)


def test_experts_are_quantized_and_one_expert_is_a_view():
    experts = make(4, 96, 512)
    assert experts.shape == (4, 96, 512)
    one = experts[2]
    assert isinstance(one, NF4Tensor)
    one.zero_()
    assert not experts.dequantize()[2].any()
    assert shares_memory(experts[0], experts)


def test_memory_is_reported_as_it_is():
    assert q.nbytes == q.record.nbytes == 512 * q.spec.pitch
    assert q.nbytes < 0.6 * q.numel()


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_an_op_nobody_wrote_is_right_or_refused():
    assert torch.equal(torch.special.erf(q), torch.special.erf(d))
    with pytest.raises(UnsupportedError, match=r"aten.erf_.default would write.*with to_nf4\(\)"):
        q.erf_()
    assert_same(q, d)
