"""`doctor` in one process: each fault is made, found, and gone once its fix is applied."""

import copy

import pytest
import torch
from torch import nn

from nf4tensor import doctor, memory_footprint, quantize_, to_nf4
from tests.fsdp.doctoring import apply_fix, backward, lora_model
from tests.fsdp.training import WIDTH, LoRALinear, make_model

UP = "blocks.0.up.base.weight"
FLOATS = 67 * WIDTH  # weights of UP


def trainable_base(model):
    model.blocks[0].up.base.weight.requires_grad_()
    return "error", "trainable-base", (UP,), 0


def dense_buffer(model):
    model.blocks[0].up.base.register_buffer("cached", torch.randn(67, WIDTH))
    return "warning", "dense-copy", ("blocks.0.up.base.cached",), 4 * FLOATS


def dense_attribute(model):
    base = model.blocks[0].up.base
    base.original = base.weight.dequantize(torch.bfloat16).mT
    return "warning", "dense-copy", ("blocks.0.up.base.original",), 2 * FLOATS


def dense_duplicate(model):
    base = model.blocks[0].up.base
    base.old = nn.Parameter(base.weight.dequantize(), requires_grad=False)
    return "warning", "dense-copy", ("blocks.0.up.base.old",), 4 * FLOATS


def data_below_python(model):
    torch.Tensor.data.__set__(model.blocks[0].up.base.weight, torch.randn(67, WIDTH))
    return "warning", "hidden-storage", (UP,), 4 * FLOATS


def rows_of_a_larger_weight(model):
    rows = to_nf4(torch.randn(20000, WIDTH))
    model.blocks[0].up.base.weight = nn.Parameter(rows[10:77], requires_grad=False)
    return "warning", "hidden-storage", (UP,), (20000 - 67) * rows.spec.pitch


def view_of_a_larger_tensor(model):
    model.blocks[0].norm.weight = nn.Parameter(torch.ones(2**20)[:WIDTH], requires_grad=False)
    return "warning", "hidden-storage", ("blocks.0.norm.weight",), 4 * (2**20 - WIDTH)


def upcast_norms(model):
    model.to(torch.bfloat16)
    model.blocks[1:].float()
    model.blocks[1:].apply(lambda m: isinstance(m, nn.Linear) and m.to(torch.bfloat16))
    names = tuple(f"blocks.{i}.norm.{key}" for i in (1, 2) for key in ("weight", "bias"))
    return "warning", "upcast", names, 2 * 4 * WIDTH


def another_logical_dtype(model):
    weight = model.blocks[0].up.base.weight
    model.blocks[0].up.base.weight = nn.Parameter(weight.to(torch.float16), requires_grad=False)
    return "warning", "logical-dtype", (UP,), 0


def one_dense_layer(model):
    base = LoRALinear(WIDTH, 4096).base.requires_grad_(False)
    model.blocks[0].up.base = base
    return "warning", "dense-weight", (UP,), 4096 * (4 * WIDTH - to_nf4(base.weight).spec.pitch)


def dense_head(model):
    model.lm_head = nn.Linear(WIDTH, 4096, bias=False).requires_grad_(False)
    saved = 4096 * (4 * WIDTH - to_nf4(model.lm_head.weight).spec.pitch)
    return "note", "dense-weight", ("lm_head.weight",), saved


def tied_head(model):
    model.embed = nn.Embedding(4096, WIDTH).requires_grad_(False)
    _, check, names, saved = dense_head(model)
    model.lm_head.weight = model.embed.weight
    return "note", check, ("embed.weight", *names), saved


def broken_tie(model):
    model.again = copy.deepcopy(model.blocks[0].up.base)
    return "warning", "broken-tie", ("again.weight",), model.again.weight.nbytes


def broken_dense_tie(model):
    model.embed = nn.Embedding(7, WIDTH).requires_grad_(False)
    model.lm_head = nn.Linear(WIDTH, 7, bias=False).requires_grad_(False)
    model.lm_head.weight.data.copy_(model.embed.weight)
    return "warning", "broken-tie", ("lm_head.weight",), 4 * 7 * WIDTH


def trainable_norm(model):
    model.blocks[0].norm.requires_grad_()
    names = ("blocks.0.norm.weight", "blocks.0.norm.bias")
    return "warning", "trainable-dense", names, 2 * 4 * WIDTH


def trainable_bias_of_the_base(model):
    model.blocks[0].up.base.bias.requires_grad_()
    return "warning", "trainable-dense", ("blocks.0.up.base.bias",), 4 * 67


def gradient_of_what_was_frozen_late(model):
    model.blocks[0].norm.weight.requires_grad_()
    backward(model)
    model.blocks[0].norm.weight.requires_grad_(False)
    return "warning", "frozen-gradient", ("blocks.0.norm.weight",), 4 * WIDTH


def no_quantization(model):
    dense = make_model(quantize=False).requires_grad_(False)
    quantized = quantize_(copy.deepcopy(dense), progress=False)
    saved = memory_footprint(dense) - memory_footprint(quantized)
    model.__dict__.update(dense.__dict__)
    return "warning", "no-4-bit", ("",), saved


FAULTS = [
    trainable_base,
    dense_buffer,
    dense_attribute,
    dense_duplicate,
    data_below_python,
    rows_of_a_larger_weight,
    view_of_a_larger_tensor,
    upcast_norms,
    another_logical_dtype,
    one_dense_layer,
    dense_head,
    tied_head,
    broken_tie,
    broken_dense_tie,
    trainable_norm,
    trainable_bias_of_the_base,
    gradient_of_what_was_frozen_late,
    no_quantization,
]


@pytest.mark.parametrize("break_", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_its_fix_mends_it(break_):
    model = lora_model()
    severity, check, names, nbytes = break_(model)
    report = doctor(model)
    (finding,) = report.findings
    assert (finding.severity, finding.check, finding.names) == (severity, check, names)
    assert finding.nbytes == nbytes
    assert report.is_healthy == (severity == "note")
    assert finding.message in str(report)
    apply_fix(finding, model)
    assert not doctor(model).findings, doctor(model)


def test_narrow_rows_are_noted():
    model = lora_model()
    model.gate = nn.Linear(16, 2**15, bias=False).requires_grad_(False)
    (finding,) = doctor(model).findings
    assert (finding.severity, finding.check, finding.nbytes) == ("note", "narrow", 0)
    quantize_(model, progress=False, filter_fn=lambda module, name: name == "gate")
    assert doctor(model).findings == (finding,)


def test_memory_shared_by_two_parameters_costs_nothing():
    model = lora_model()
    weight = model.blocks[0].up.base.weight
    model.again = nn.Linear(WIDTH, 67, bias=False)
    model.again.weight = nn.Parameter(weight.detach(), requires_grad=False)
    assert model.again.weight is not weight
    assert not doctor(model).findings
