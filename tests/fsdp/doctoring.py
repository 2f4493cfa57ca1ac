"""A healthy model for `doctor`, and how its fixes are applied, for the tests of this folder."""

import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import nf4tensor
from tests.fsdp.training import Model, batches, make_model


def lora_model(**options) -> Model:
    """Return a 4-bit model of which only adapters train."""
    model = make_model(**options)
    for block in model.blocks:
        block.norm.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def backward(model: Model) -> None:
    """Run one forward and backward pass."""
    inputs, targets = next(batches())
    F.mse_loss(model(inputs.to(model.head.base.bias.dtype)), targets).backward()


def apply_fix(finding, model: nn.Module) -> dict:
    """Run the code in a fix for every name of its finding; return the variables it leaves."""
    (code,) = re.findall("`([^`]+)`", finding.fix)
    variables = {"torch": torch, "nf4tensor": nf4tensor, "fully_shard": fully_shard}
    variables |= {"model": model, "names": finding.names}
    for variables["name"] in finding.names:
        exec(code, variables)
    return variables


def checks(report) -> dict[str, tuple[str, ...]]:
    """Return the names that each check found."""
    return {finding.check: finding.names for finding in report.findings}
