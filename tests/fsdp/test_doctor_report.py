"""`doctor` on healthy models and on what trains: no false alarms, and a report one can read."""

import copy

import pytest
import torch
from torch import nn

from nf4tensor import doctor, memory_footprint, quantize_, to_nf4
from nf4tensor.errors import NF4TensorError, UnhealthyError
from tests.fsdp.doctoring import adamw, apply_fix, backward, checks, lora_model
from tests.fsdp.training import WIDTH, LoRALinear, make_model

# What trains


def test_an_optimizer_with_frozen_parameters():
    model = lora_model()
    norm = model.blocks[0].norm
    optimizer = adamw(model)
    optimizer.add_param_group({"params": [norm.weight]})
    norm.weight.requires_grad_()
    backward(model)
    optimizer.step()
    norm.weight.requires_grad_(False)
    norm.weight.grad = None
    (finding,) = doctor(model, optimizer=optimizer).findings
    assert (finding.severity, finding.check) == ("warning", "optimizer-frozen")
    assert finding.names == ("blocks.0.norm.weight",)
    assert finding.nbytes == 2 * 4 * WIDTH + 4  # two moments and a step
    optimizer = apply_fix(finding, model)["optimizer"]
    assert not doctor(model, optimizer=optimizer).findings


def test_an_optimizer_made_too_early():
    model = lora_model()
    optimizer = adamw(model)
    backward(model)
    optimizer.step()
    model.blocks[0].up.lora_a = nn.Linear(WIDTH, 4, bias=False)
    missing, stale = doctor(model, optimizer=optimizer).findings
    assert (missing.severity, missing.check) == ("error", "optimizer-missing")
    assert missing.names == ("blocks.0.up.lora_a.weight",)
    assert (stale.severity, stale.check) == ("warning", "optimizer-stale")
    assert stale.names == ("parameter 0 of the optimizer",)
    assert stale.nbytes == 3 * 4 * 4 * WIDTH + 4
    assert missing.fix == stale.fix
    optimizer = apply_fix(missing, model)["optimizer"]
    assert not doctor(model, optimizer=optimizer).findings


def test_what_counts_as_an_adapter():
    class Base(nn.Linear):
        """Holds factors itself, as some libraries do."""

        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.down = nn.Parameter(torch.randn(4, WIDTH))

    class Wrapper(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.norm = nn.LayerNorm(WIDTH)
            self.factors = nn.ParameterList([torch.randn(4, WIDTH), torch.randn(WIDTH, 4)])

    base = quantize_(nn.Sequential(Base()), progress=False)[0]
    model = nn.Sequential(Wrapper(base), Wrapper(copy.deepcopy(base)), nn.Linear(WIDTH, WIDTH))
    model[1].base.weight = nn.Parameter(to_nf4(torch.randn(WIDTH, WIDTH)), requires_grad=False)
    model[2].adapter_bias = nn.Parameter(torch.zeros(WIDTH))
    model[2].router = nn.Linear(WIDTH, 3, bias=False)
    model[2].experts = nn.Module()
    experts = to_nf4(torch.randn(3, WIDTH, WIDTH))
    model[2].experts.weight = nn.Parameter(experts, requires_grad=False)
    others = {"0.base.bias", "0.norm.weight", "0.norm.bias", "1.base.bias", "1.norm.weight"}
    others |= {"1.norm.bias", "2.weight", "2.bias", "2.router.weight"}
    assert set(checks(doctor(model))["trainable-dense"]) == others


# Healthy models, and the report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_model_has_no_findings(dtype):
    """Adapters in float32 beside a base in bfloat16 are healthy too, as PEFT makes them."""
    model = lora_model().to(dtype)
    for _ in range(2):
        optimizer = adamw(model)
        backward(model)
        optimizer.step()
        report = doctor(model, optimizer=optimizer, check_ranks=True)
        assert not report.findings, report
        model.apply(lambda m: isinstance(m, LoRALinear) and m.lora_a.to(dtype))
    report.assert_healthy()
    total = sum(n for role, n in report.bytes_by_role.items() if "grad" not in role)
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    assert total == memory_footprint(model) + state
    with torch.device("meta"):
        on_meta = lora_model()
    assert not doctor(on_meta, optimizer=adamw(on_meta)).findings


def test_the_report_says_what_there_is_and_joins_what_is_alike():
    model = lora_model()
    head = "7 of 34 parameters are 4-bit"
    assert str(doctor(model)).splitlines()[0] == f"{head}: healthy"
    for block in model.blocks:
        for base in (block.up.base, block.down.base):
            base.weight.requires_grad_()
        block.norm.requires_grad_()
    model.lm_head = nn.Linear(WIDTH, 4096, bias=False).requires_grad_(False)
    report = doctor(model)
    assert [f.severity for f in report.findings] == ["error", "warning", "note"]
    lines = str(report).splitlines()
    assert lines[0] == f"{head.replace('34', '35')}: 1 error, 1 warning, 1 note"
    assert lines[1].split() == ["4-bit", "weights", "42.7", "KiB"]
    joined = "error [trainable-base] 6 such as blocks.0.up.base.weight, "
    assert any(line.startswith(joined) for line in lines)
    assert any(line.startswith("note [dense-weight] lm_head.weight (") for line in lines)
    assert sum("  fix: " in line for line in lines) == 3
    with pytest.raises(UnhealthyError, match=r"trainable-base.*\n.*fix: ") as failure:
        report.assert_healthy(allow=["trainable-dense"])
    assert str(failure.value) == str(report)
    assert isinstance(failure.value, AssertionError)
    assert isinstance(failure.value, NF4TensorError)
    report.assert_healthy(allow=["trainable-dense", "trainable-base"])


def test_bitsandbytes_weights_are_named():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra `bnb` is missing")
    model = lora_model()
    model.head.base = bitsandbytes.nn.Linear4bit(WIDTH, 1, quant_type="nf4").to("cpu")
    model.head.base.requires_grad_(False)
    (finding,) = doctor(model).findings
    assert (finding.check, finding.names) == ("other-format", ("head.base.weight",))
    assert finding.nbytes == model.head.base.weight.nbytes
    model.head = LoRALinear(WIDTH, 1)
    model.head.base.requires_grad_(False)
    apply_fix(finding, model)
    assert not doctor(model).findings


def test_peft_models_are_healthy():
    peft = pytest.importorskip("peft", reason="the extra `hf` is missing")
    model = make_model().to(torch.bfloat16)
    for block in model.blocks:
        block.up, block.down = block.up.base, block.down.base
    model.head = model.head.base
    targets = {"target_modules": ["up", "down", "head"]}
    for config in (
        peft.LoraConfig(r=4, modules_to_save=["norm"], **targets),
        peft.IA3Config(feedforward_modules=["down"], **targets),
    ):
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        report = doctor(adapted, optimizer=adamw(adapted))
        assert not report.findings, report
        assert report.bytes_by_role["adapters"] > 0
        assert "other trainable" not in report.bytes_by_role
