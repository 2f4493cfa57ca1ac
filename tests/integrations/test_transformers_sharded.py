"""`DistributedConfig(fsdp_size=N)`: each rank reads, quantizes, uses and saves its own rows."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")

from nf4tensor import NF4Tensor
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.integrations.transformers import NF4Config
from tests.integrations import transformers_cases as cases
from tests.integrations.tiny_models import TOKENS, load, logits, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
two_and_three = pytest.mark.parametrize("ranks", [2, 3], indirect=True, ids="{}ranks".format)


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
