"""A real model that bitsandbytes quantized through Transformers: loaded here, and written back."""

import warnings

import pytest
import torch
from torch import nn

from examples.smollm2 import cache_folder
from nf4tensor import NF4Tensor, dequantize_, memory_footprint
from nf4tensor.integrations.bitsandbytes import from_state_dict, prefixes, to_state_dict

pytestmark = [pytest.mark.slow, pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
MODEL = cache_folder() / "smollm2-135m-instruct"
TOKENS = torch.tensor([[504, 2443, 282, 4649, 314, 7042, 30, 198, 504, 338, 1685, 2443, 282]])


@pytest.fixture(scope="module")
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in ("bitsandbytes", "accelerate", "safetensors.torch"):
            pytest.importorskip(package, reason="needs the extras `bnb` and `hf`")
        return pytest.importorskip("transformers", reason="the extra `hf` is missing")


@pytest.fixture(scope="module")
def theirs(transformers):
    """SmolLM2 in NF4 with nested scales, quantized by bitsandbytes."""
    if not MODEL.exists():
        pytest.skip("SmolLM2 is not in the cache: examples/smollm2.py fetches it")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.bfloat16, device_map="cpu", quantization_config=config
    )


@pytest.fixture(scope="module")
def checkpoint(theirs, tmp_path_factory):
    """The file that Transformers saves of it."""
    folder = tmp_path_factory.mktemp("bitsandbytes")
    theirs.save_pretrained(folder)
    return folder / "model.safetensors"


def load(transformers, checkpoint, dtype: torch.dtype) -> nn.Module:
    """Load the dense model and put the weights of the checkpoint in."""
    from safetensors import safe_open

    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    with safe_open(checkpoint, "pt") as file:
        for prefix, names in prefixes(file.keys()).items():
            weight, _ = from_state_dict({name: file.get_tensor(name) for name in names}, prefix)
            module = model.get_submodule(prefix.removesuffix(".weight"))
            module.weight = nn.Parameter(weight, requires_grad=False)
    assert sum(isinstance(each, NF4Tensor) for each in model.parameters()) == 210
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS, use_cache=False).logits


def test_logits_are_those_of_decoding_there(transformers, theirs, checkpoint):
    ours = load(transformers, checkpoint, torch.bfloat16)
    assert memory_footprint(ours) < 0.45 * sum(2 * each.numel() for each in ours.parameters())
    # In train mode it decodes each weight and multiplies; in eval mode it may repack weights.
    assert torch.equal(logits(dequantize_(ours)), logits(theirs.train()))


def test_4_bit_products_are_those_of_decoded_weights(transformers, theirs, checkpoint):
    """In float32, where nothing but the order of sums differs."""
    from bitsandbytes.functional import dequantize_4bit

    ours = load(transformers, checkpoint, torch.float32)
    dense = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for name, module in theirs.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            dtype, state.dtype = state.dtype, torch.float32
            weight = dequantize_4bit(module.weight.data, state)
            state.dtype = dtype
            dense.get_submodule(name).weight = nn.Parameter(weight)
    torch.testing.assert_close(logits(ours), logits(dense), rtol=0, atol=1e-3)


def test_the_file_is_written_again_byte_for_byte(transformers, checkpoint, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    stored = load_file(checkpoint)
    for prefix, names in prefixes(stored).items():
        weight, layout = from_state_dict({name: stored.pop(name) for name in names}, prefix)
        stored |= to_state_dict(weight, prefix, layout)
    with safe_open(checkpoint, "pt") as file:
        save_file(stored, tmp_path / "again", file.metadata())
    assert (tmp_path / "again").read_bytes() == checkpoint.read_bytes()
