"""Experts of Mixtral, Qwen MoE and gpt-oss in 4 bits: how they load, and what is decoded."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="the extra `hf` is missing")

from nf4tensor import NF4Tensor, quantize_
from nf4tensor.checkpoint.transform import quantize_files
from nf4tensor.integrations.transformers import NF4Config
from tests.integrations.tiny_models import EXPERT_MODELS, TOKENS, load, logits, save

pytestmark = [
    pytest.mark.hf,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::nf4tensor.errors.NF4TensorWarning"),
]


class Decoded(TorchDispatchMode):
    """Lists the storages of the 3-D records that ops decode rows of, and how many rows at once."""

    def __init__(self, model):
        super().__init__()
        self.experts = {
            weight.record.untyped_storage().data_ptr(): (name, weight.record)
            for name, weight in model.named_parameters()
            if isinstance(weight, NF4Tensor) and weight.dim() == 3
        }
        self.used: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "nf4tensor":
            for record in args:
                self.note(record)
        return func(*args, **(kwargs or {}))

    def note(self, record):
        if not isinstance(record, torch.Tensor):
            return
        address = record.untyped_storage().data_ptr()
        if address in self.experts:
            name, whole = self.experts[address]
            assert record.shape == whole.shape[1:], f"{name}: {record.shape} at once"
            expert = record.storage_offset() // whole.stride(0)
            self.used.setdefault(name, set()).add(expert)


@pytest.fixture(scope="module", params=EXPERT_MODELS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture
def model(folder):
    return load(folder, quantization_config=NF4Config())


def test_experts_are_quantized_and_saved(folder, model, tmp_path):
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dim() == 3
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert isinstance(weight, NF4Tensor)
    same = quantize_(load(folder), progress=False)
    for name, weight in same.named_parameters():
        if isinstance(weight, NF4Tensor):
            assert torch.equal(weight.record, model.get_parameter(name).record), name
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model), logits(load(tmp_path)))


def test_experts_are_left_on_request(folder):
    model = load(folder, quantization_config=NF4Config(quantize_experts=False))
    assert not isinstance(model.model.layers[0].mlp.experts.down_proj, NF4Tensor)


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_only_experts_that_are_hit_are_decoded(model, num_tokens):
    """Forward and backward, one expert at a time."""
    chosen: dict[int, set[int]] = {}

    def note(index):
        def hook(module, args, kwargs):
            chosen[index] = set(args[1].flatten().tolist())

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(note(index), with_kwargs=True)
    inputs = model.model.embed_tokens(TOKENS[:1, :num_tokens]).detach().requires_grad_()
    with Decoded(model) as decoded:
        model(inputs_embeds=inputs).logits.sum().backward()
    for index, experts in chosen.items():
        for weight in ("gate_up_proj", "down_proj"):
            assert decoded.used[f"model.layers.{index}.mlp.experts.{weight}"] == experts
        assert num_tokens > 1 or len(experts) == 2
    assert inputs.grad.norm() > 0


def test_logits_and_gradients_are_those_of_decoded_experts(model):
    dense = copy.deepcopy(model).dequantize()
    found = []
    for each in (model, dense):
        inputs = each.model.embed_tokens(TOKENS).detach().requires_grad_()
        output = each(inputs_embeds=inputs).logits
        output.float().square().sum().backward()
        found.append((output.detach(), inputs.grad))
    for ours, theirs in zip(*found, strict=True):
        error = (ours - theirs).float().norm() / theirs.float().norm()
        assert error < 2e-2


def test_generate(model):
    tokens = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, TOKENS.shape[1] + 4)


def test_no_copy_of_an_expert_is_saved_for_backward(model):
    addresses = {
        w.record.untyped_storage().data_ptr()
        for w in model.parameters()
        if isinstance(w, NF4Tensor)
    }
    packed = []

    def pack(tensor):
        if tensor.dtype == torch.uint8:
            packed.append(tensor.untyped_storage().data_ptr() in addresses)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(TOKENS)
    assert packed
    assert all(packed)


def test_experts_quantized_by_the_command_line(kind, folder, model, tmp_path):
    """Under the names of the original checkpoint, one expert at a time where it has them so."""
    quantize_files(folder, tmp_path / "packed")
    again = load(tmp_path / "packed")
    for name, weight in model.named_parameters():
        if isinstance(weight, NF4Tensor):
            other = again.get_parameter(name)
            if isinstance(other, NF4Tensor):
                assert torch.equal(weight.record, other.record), name
    assert isinstance(again.model.layers[0].mlp.experts.down_proj, NF4Tensor)
