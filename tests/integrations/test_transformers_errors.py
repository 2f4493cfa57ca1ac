"""What cannot work with `NF4Config`: an error before or while loading, with the way out."""

import json
import logging
import re

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is missing")

from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig

from nf4tensor import NF4Spec
from nf4tensor.checkpoint.files import Weight
from nf4tensor.errors import CheckpointError, DTypeError, SpecError, UnsupportedError
from nf4tensor.integrations.transformers import NF4Config
from nf4tensor.integrations.transformers_choice import check_distribution
from nf4tensor.integrations.transformers_versions import names_in_model
from tests.integrations.tiny_models import load, make, save

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save(tmp_path_factory.mktemp("dense"))


@pytest.fixture
def packed(dense, tmp_path):
    load(dense, quantization_config=NF4Config()).save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def report(caplog):
    """What Transformers says of a load, which its own error points to."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"block_size": 48}, SpecError, "block_size is 48, expected a power of two"),
        ({"scale_block_size": 0}, SpecError, "scale_block_size is 0"),
        ({"quant_type": "int4"}, SpecError, "int4"),
        ({"compute_dtype": "float64"}, DTypeError, "the dtype is float64, expected float32"),
        ({"compute_dtype": torch.int8}, DTypeError, "expected float32, bfloat16 or float16"),
        ({"bnb_4bit_quant_type": "nf4"}, TypeError, "bnb_4bit_quant_type"),
    ],
    ids=str,
)
def test_options(options, error, words):
    with pytest.raises(error, match=words):
        NF4Config(**options)


def test_configurations_of_other_versions():
    with pytest.raises(SpecError, match="NF4Config has no fancy"):
        NF4Config.from_dict({"quant_method": "nf4tensor", "fancy": 1})
    with pytest.raises(CheckpointError, match="version 2, this nf4tensor reads 1: install"):
        NF4Config.from_dict({"quant_method": "nf4tensor", "version": 2})


def test_dtype_of_the_model(dense):
    with pytest.raises(DTypeError, match=r"pass dtype=torch.bfloat16 to from_pretrained"):
        load(dense, quantization_config=NF4Config(), dtype=torch.float64)


@pytest.mark.parametrize("places", [{"": "disk"}, {"model": "cpu", "lm_head": 0}], ids=str)
def test_offloading(dense, places):
    with pytest.raises(UnsupportedError, match=r"shard the model with fully_shard and CPUOffload"):
        load(dense, quantization_config=NF4Config(), device_map=places)


@pytest.mark.parametrize("size", ["tp_size", "ep_size", "pp_size"])
def test_other_ways_of_distributing(size):
    model = make()
    model.config.distributed_config = DistributedConfig(fsdp_size=2)
    check_distribution(model, is_from_bitsandbytes=False)
    with pytest.raises(UnsupportedError, match="`nf4tensor convert PATH NEW --to nf4tensor`"):
        check_distribution(model, is_from_bitsandbytes=True)
    setattr(model.config.distributed_config, size, 2)
    with pytest.raises(UnsupportedError, match=f"{size}=2.* with NF4Config: .*pass fsdp_size"):
        check_distribution(model, is_from_bitsandbytes=False)


def test_state_dict_in_place_of_files(packed):
    model, state = load(packed), load_file(packed / "model.safetensors")
    model.config.quantization_config = model.config.quantization_config.to_dict()
    with pytest.raises(CheckpointError, match=r"loaded from its files.*not from state_dict"):
        type(model).from_pretrained(None, config=model.config, state_dict=state)


def test_weights_that_are_not_finite(dense, tmp_path, report):
    model = load(dense)
    model.get_parameter(Q_PROJ).data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path, quantization_config=NF4Config())
    told = report.text
    assert "has 1 NaN or infinite elements, the first at (3, 5)" in told
    assert Q_PROJ in told


def rewrite(folder, change) -> None:
    """Change the tensors or the description of a saved model."""
    from safetensors import safe_open

    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors, described = load_file(file), json.loads(metadata["nf4tensor"])
    change(tensors, described)
    save_file(tensors, file, {**metadata, "nf4tensor": json.dumps(described)})


def damage_tail(tensors, described):
    tensors[Q_PROJ][2, -1] = 1


def drop_rows(tensors, described):
    tensors[Q_PROJ] = tensors[Q_PROJ][:-1].clone()


def forget(tensors, described):
    del described["weights"][Q_PROJ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (damage_tail, "have bytes that are not zero"),
        (drop_rows, r"is \[95, 96\] in the checkpoint, expected \[96, 96\]"),
        (forget, "is torch.uint8, and the metadata of the files does not say that it is a 4-bit"),
    ],
)
def test_damaged_files(packed, change, words, report):
    rewrite(packed, change)
    with pytest.raises(RuntimeError):
        load(packed)
    assert re.search(words, report.text)


def test_other_model(packed, report):
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"intermediate_size": 150}))
    with pytest.raises(RuntimeError):
        load(packed)
    assert "in the checkpoint, expected [150, 96]: it is for another model" in report.text


def test_experts_that_are_not_alike():
    names = [f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight" for i in range(2)]
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = make("mixtral")
    conversions = get_model_conversion_mapping(model)
    weights = [
        Weight(NF4Spec.for_weight(96, size, None, "nf4"), torch.bfloat16) for size in (32, 64)
    ]
    alike = names_in_model(dict.fromkeys(names, weights[0]), conversions, model)
    assert alike == {"model.layers.0.mlp.experts.gate_up_proj": weights[0]}
    with pytest.raises(CheckpointError, match=r"gate_up_proj would be put together from weights"):
        names_in_model(dict(zip(names, weights, strict=True)), conversions, model)
