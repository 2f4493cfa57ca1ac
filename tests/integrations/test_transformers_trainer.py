"""`Trainer` over 4-bit models: it trains adapters, saves them, and resumes exactly."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")
pytest.importorskip("peft", reason="the extra `hf` is missing")
pytest.importorskip("accelerate", reason="the extra `hf` is missing")

from nf4tensor.integrations.transformers import NF4Config
from tests.integrations import transformers_cases as cases
from tests.integrations.tiny_models import load, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


def adapted(folder):
    return cases.with_adapters(load(folder, quantization_config=NF4Config()))


def test_trains_saves_and_resumes(folder, tmp_path):
    whole = cases.trainer(adapted(folder), tmp_path / "whole", max_steps=6)
    whole.train()
    losses = [each["loss"] for each in whole.state.log_history if "loss" in each]
    assert losses[-1] < losses[0]
    first = cases.trainer(adapted(folder), tmp_path / "parts", max_steps=6, save_steps=3)
    first.train()
    again = cases.trainer(adapted(folder), tmp_path / "parts", max_steps=6, save_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    for name, weight in cases.adapters(whole.model).items():
        assert torch.equal(weight, cases.adapters(again.model)[name]), name


def test_trains_with_gradient_checkpointing(folder, tmp_path):
    options = {"max_steps": 2, "gradient_checkpointing": True}
    losses = []
    for extra in ({}, options):
        each = cases.trainer(adapted(folder), tmp_path, **{"max_steps": 2, **extra})
        losses.append(each.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_base_without_adapters_is_refused(folder, tmp_path):
    model = load(folder, quantization_config=NF4Config())
    with pytest.raises(ValueError, match="purely quantized models"):
        cases.trainer(model, tmp_path, max_steps=1)
