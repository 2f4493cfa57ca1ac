"""Weights inside of modules: state dicts, casts, moves, swaps, buffers, parametrizations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

from nf4tensor import NF4Tensor, NF4TensorWarning, dequantize_, quantize_, to_nf4
from nf4tensor.errors import DTypeError
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same, dense, file_of, load, make, shares_memory


def dense_model(seed: int = 0) -> nn.Module:
    """Return two linears, to be quantized or not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 128))


def model(seed: int = 0, **options) -> nn.Module:
    """Return the model with 4-bit weights."""
    return quantize_(dense_model(seed), progress=False, **options)


def records(module: nn.Module) -> list[torch.Tensor]:
    """Return the records of a module's weights."""
    return [p.record for p in module.parameters() if isinstance(p, NF4Tensor)]


def assert_equal_records(one: nn.Module, other: nn.Module) -> None:
    assert len(records(one)) == len(records(other)) == 2
    assert all(map(torch.equal, records(one), records(other)))


x = dense(3, 128)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_quantized_into_quantized_keeps_bytes(assign, through_a_file):
    source, target = model(), model(seed=1)
    before = target[0].weight
    state = load(file_of(source.state_dict())) if through_a_file else source.state_dict()
    assert target.load_state_dict(state, assign=assign).missing_keys == []
    assert_equal_records(target, source)
    assert isinstance(target[0].weight, nn.Parameter)
    assert (target[0].weight is before) != assign
    assert not target[0].weight.requires_grad
    assert_same(target(x), source(x))


def test_state_dict_shares_memory_and_is_detached():
    source = model()
    state = source.state_dict()
    assert shares_memory(state["0.weight"], source[0].weight)
    assert not isinstance(state["0.weight"], nn.Parameter)
    assert source.state_dict(keep_vars=True)["0.weight"] is source[0].weight


@pytest.mark.parametrize(
    "options", [{"block_size": 32}, {"scale_block_size": None}, {"quant_type": "fp4"}]
)
def test_another_spec_is_refused_naming_both_and_assign(options):
    source, target = model(), model(**options)
    before = copy.deepcopy(target)
    specs = (source[0].weight.spec, target[0].weight.spec)
    with pytest.raises(RuntimeError, match="load with assign=True") as error:
        target.load_state_dict(source.state_dict())
    text = str(error.value).replace("\\'", "'")
    assert all(str(spec) in text for spec in specs)
    assert_equal_records(target, before)
    target.load_state_dict(source.state_dict(), assign=True)
    assert_equal_records(target, source)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_into_quantized_quantizes(dtype):
    source = dense_model(seed=1).to(dtype)
    target = model()
    with pytest.warns(NF4TensorWarning, match="copy_ of a float tensor.*rounds to 4 bits"):
        target.load_state_dict(source.state_dict())
    assert torch.equal(target[0].weight.record, to_nf4(source[0].weight).record)
    assert torch.equal(target[2].weight.record, to_nf4(source[2].weight).record)


def test_quantized_into_dense_decodes():
    source, target = model(), dense_model(seed=1)
    target.load_state_dict(source.state_dict())
    assert type(target[0].weight) is nn.Parameter
    assert_same(target[0].weight.detach(), source[0].weight)


def test_assign_puts_quantized_weights_into_a_dense_module():
    source, target = model(), dense_model(seed=1)
    target.load_state_dict(source.state_dict(), assign=True)
    assert_equal_records(target, source)
    assert isinstance(target[0].weight, NF4Tensor)
    on_meta = dense_model().to("meta")
    on_meta.load_state_dict(source.state_dict(), assign=True)
    assert_same(on_meta(x), source(x))


def test_sizes_and_keys_are_checked_by_torch():
    state = model().state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        quantize_(nn.Sequential(nn.Linear(64, 96)), progress=False).load_state_dict(state)
    state["extra"] = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*0.weight"):
        model().load_state_dict(state)


def test_hooks_of_state_dicts_see_the_weights():
    source, seen = model(), []
    source[0].register_state_dict_post_hook(lambda m, state, prefix, _: seen.append(list(state)))
    source[0].register_load_state_dict_pre_hook(
        lambda m, state, prefix, *_: seen.append(type(state[f"{prefix}weight"]))
    )
    source.load_state_dict(source.state_dict())
    assert seen == [["0.weight", "0.bias"], NF4Tensor]


# Casts and moves


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cast",
    [
        lambda m, d: m.to(d),
        lambda m, d: m.to("cpu", d),
        lambda m, d: m.type(d),
        lambda m, d: {torch.float32: m.float, torch.float16: m.half}.get(d, m.bfloat16)(),
    ],
)
def test_casts_change_the_logical_dtype_only(cast, dtype):
    before, cast_model = model(), model()
    weight = cast_model[0].weight
    assert cast(cast_model, dtype) is cast_model
    assert cast_model[0].weight is weight
    assert weight.dtype == dtype
    assert cast_model[0].bias.dtype == dtype
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert weight.record.dtype == torch.uint8
    assert_equal_records(cast_model, before)
    expected = nn.functional.linear(x.to(dtype), before[0].weight, cast_model[0].bias)
    assert_same(cast_model[0](x.to(dtype)).detach(), expected.detach())


def test_doubles_are_refused_naming_the_way_out():
    with pytest.raises(DTypeError, match=r"float64.*call dequantize_\(model\)"):
        model().double()
    doubled = dequantize_(model()).double()
    assert doubled[0].weight.dtype == torch.float64


def test_every_part_leaves_meta():
    on_meta = model().to("meta")
    assert all(t.is_meta for t in (*on_meta.parameters(), *records(on_meta)))
    on_cpu = on_meta.to_empty(device="cpu")
    assert not any(t.is_meta for t in (*on_cpu.parameters(), *records(on_cpu)))
    on_cpu.load_state_dict(model().state_dict())
    assert_equal_records(on_cpu, model())
    fresh = model().to("meta").to_empty(device="cpu")
    with pytest.warns(NF4TensorWarning, match="rounds"):
        fresh.load_state_dict(dense_model().state_dict())
    assert_equal_records(fresh, model())


def test_loading_into_meta_without_assign_is_the_warning_of_torch():
    with pytest.warns(UserWarning, match="is a no-op"):
        model().to("meta").load_state_dict(model().state_dict())


def test_swap_tensors():
    one, other = make(4, 65), make(6, 32, seed=1)
    expected = (other.record, one.record)
    torch.utils.swap_tensors(one, other)
    assert (one.shape, other.shape) == ((6, 32), (4, 65))
    assert one.record is expected[0]
    assert other.record is expected[1]
    assert_same(one, make(6, 32, seed=1))
    plain = dense(3, 3)
    torch.utils.swap_tensors(one, plain)
    assert isinstance(plain, NF4Tensor)
    assert type(one) is torch.Tensor


def test_swapping_on_conversion():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        target = model(seed=1)
        target.load_state_dict(model().state_dict())
        assert_equal_records(target.half(), model())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# Other places


def test_buffers():
    module = nn.Module()
    module.register_buffer("weight", make(4, 65))
    assert_same(module.half().weight, make(4, 65).half())
    assert isinstance(module.state_dict()["weight"], NF4Tensor)
    module.load_state_dict({"weight": make(4, 65, seed=1)})
    assert torch.equal(module.weight.record, make(4, 65, seed=1).record)
    assert_same(copy.deepcopy(module).weight, module.weight)


class Doubled(nn.Module):
    """A parametrization that computes with the weight."""

    def forward(self, weight):
        return weight.dequantize() * 2


def test_parametrizations():
    linear = model()[0]
    expected = 2 * linear.weight.dequantize()
    parametrize.register_parametrization(linear, "weight", Doubled(), unsafe=True)
    assert_same(linear.weight, expected)
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
    assert isinstance(linear.weight, NF4Tensor)


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_vectors_of_parameters():
    weights = [nn.Parameter(make(4, 65), requires_grad=False)] * 2
    vector = parameters_to_vector(weights)
    assert vector.shape == (2 * 4 * 65,)
    target = [make(4, 65, seed=1), make(4, 65, seed=2)]
    vector_to_parameters(vector, target)
    assert all(torch.equal(t.record, weights[0].record) for t in target)
    vector_to_parameters(dense(4 * 65), target[:1])
    assert torch.equal(target[0].record, to_nf4(dense(4 * 65).view(4, 65)).record)


def test_training_beside_a_frozen_weight_leaves_it_alone():
    base = model()
    adapter = nn.Linear(128, 96, bias=False)
    before = copy.deepcopy(base)
    optimizer = torch.optim.AdamW([*base.parameters(), *adapter.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (base[0](x) + adapter(x)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_([*base.parameters(), *adapter.parameters()], 1.0)
        optimizer.step()
    assert_equal_records(base, before)
    assert not torch.equal(base[0].bias, before[0].bias)
    with pytest.raises(RuntimeError, match=r"does not require grad"):
        base[0].weight.backward()
