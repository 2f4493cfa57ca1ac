"""`DistributedConfig(fsdp_size=N)`: each rank reads, quantizes, uses and saves its own rows."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")
pytest.importorskip("peft", reason="the extra `hf` is missing")

import peft

from nf4tensor import NF4Tensor
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.integrations.transformers import NF4Config
from tests.integrations import transformers_cases as cases
from tests.integrations.tiny_models import TOKENS, load, logits, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
two_and_three = pytest.mark.parametrize("ranks", [2, 3], indirect=True, ids="{}ranks".format)
two_or_three = pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.slow)], indirect=True, ids="{}ranks".format
)


@two_and_three
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_load_save_generate(ranks, kind, tmp_path):
    save(tmp_path / "dense", kind)
    model = load(tmp_path / "dense", quantization_config=NF4Config())
    model.save_pretrained(tmp_path / "packed")
    found = ranks.run(
        cases.case_load_save_generate, tmp_path / "dense", tmp_path / "packed", tmp_path / "again"
    )
    weights = {n: w for n, w in model.named_parameters() if isinstance(w, NF4Tensor)}
    for name, weight in weights.items():
        shards = [each["records"][name] for each in found]
        assert torch.equal(torch.cat(shards), weight.record), name
    for each in found:
        assert torch.equal(each["logits"], logits(model))
        tokens = model.generate(TOKENS, max_new_tokens=3, do_sample=False)
        assert torch.equal(each["tokens"], tokens)
    again = load(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))
    mine, theirs = (Checkpoint(tmp_path / name).entries for name in ("again", "packed"))
    assert {n: e.weight for n, e in mine.items()} == {n: e.weight for n, e in theirs.items()}


@two_or_three
def test_trainer(ranks, tmp_path):
    """The base is sharded, adapters are whole on every rank and stay alike."""
    save(tmp_path / "dense")
    found = ranks.run(cases.case_train, tmp_path / "dense", tmp_path / "adapters")
    for each in found:
        assert each["losses"] == found[0]["losses"]
        assert each["losses"][-1] < each["losses"][0]
        for name, weight in each["adapters"].items():
            assert torch.equal(weight, found[0]["adapters"][name]), name
    base = load(tmp_path / "dense", quantization_config=NF4Config())
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert torch.equal(logits(again), found[0]["logits"])


@two_and_three
def test_adapters_under_fully_shard(ranks, tmp_path):
    save(tmp_path / "dense")
    found = ranks.run(cases.case_adapters_of_fully_shard, tmp_path / "dense", tmp_path / "adapters")
    base = load(tmp_path / "dense", quantization_config=NF4Config())
    base = peft.prepare_model_for_kbit_training(base)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    for each in found:
        assert torch.equal(each["logits"], found[0]["logits"])
        torch.testing.assert_close(each["logits"], logits(again), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_replicated_by_ddp(ranks, tmp_path):
    """As Trainer does: nobody can pass `init_sync=False` there."""
    save(tmp_path / "dense")
    found = ranks.run(cases.case_replicated, tmp_path / "dense")
    for losses, adapters in found:
        assert losses[-1] < losses[0]
        assert adapters == found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_copies_of_shards(ranks, tmp_path):
    """`dp_replicate_size=2`."""
    save(tmp_path)
    model = load(tmp_path, quantization_config=NF4Config())
    for found in ranks.run(cases.case_copies, tmp_path):
        assert torch.equal(found, logits(model))


@pytest.mark.slow
@two_and_three
def test_peak_memory(ranks, tmp_path):
    """A rank needs its share and a few tensors; the whole is 520 MiB in bfloat16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4100, "num_hidden_layers": 16}
    save(tmp_path / "dense", **sizes)
    largest = 2 * 1024 * 4100
    ranks.run(cases.case_peak_memory, save(tmp_path / "small"))  # what imports take
    found = ranks.run(cases.case_peak_memory, tmp_path / "dense")
    for peak, share in found:
        print(f"peak {peak >> 20} MiB, share {share >> 20} MiB, a tensor {largest >> 20} MiB")
        assert peak < share + 4 * largest + (32 << 20)
