"""Every variant that the installed bitsandbytes writes, read here and written back, file for file.

Importing it takes seconds, so this is slow. It decodes flat weights only: on some CPUs it decodes
rows wrongly whose length is not a multiple of its block size.
"""

import itertools
import warnings

import pytest
import torch

from nf4tensor import to_nf4
from nf4tensor.errors import UnsupportedError
from nf4tensor.integrations.bitsandbytes import (
    from_params4bit,
    from_quant_state,
    from_state_dict,
    prefixes,
    to_state_dict,
)
from nf4tensor.integrations.bitsandbytes_layout import BLOCK_SIZES, STORAGE_DTYPES
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from tests.integrations.golden_entries import as_bytes, assert_same_entries

pytestmark = pytest.mark.slow
STORAGES = list(STORAGE_DTYPES.values())
SHAPES = [(1, 65), (64,), (1, 1000), (1, 2), (3, 96), (2, 3, 64), (48, 576), (10, 100), (192, 96)]
scales = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
types = pytest.mark.parametrize("quant_type", ["nf4", "fp4"])


@pytest.fixture(scope="module")
def bitsandbytes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("bitsandbytes", reason="the extra `bnb` is not installed")


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (0.02 * torch.randn(shape)).to(dtype)


def decode(bitsandbytes, packed: torch.Tensor, state, dtype: torch.dtype) -> torch.Tensor:
    """Ask bitsandbytes for the weight, flat."""
    shape = state.shape
    state.shape, state.dtype = torch.Size([shape.numel()]), dtype
    with torch.compiler.set_stance("force_eager"):  # it compiles its path for odd sizes
        weight = bitsandbytes.functional.dequantize_4bit(packed.view(-1, 1), state)
    state.shape = shape
    # Code 8 of FP4 is +0.0 in its table and -0.0 in its scalar path.
    weight = torch.where(weight == 0, 0.0, weight) if state.quant_type == "fp4" else weight
    return weight.reshape(shape)


@types
@scales
def test_every_variant_comes_back_byte_for_byte(bitsandbytes, quant_type, nested):
    torch.manual_seed(0)
    num_refused = num_compared = 0
    variants = itertools.product(BLOCK_SIZES, SHAPES, STORAGES, (False, True))
    for block_size, shape, storage, is_row in variants:
        weight = gaussian(*shape, dtype=WEIGHT_DTYPES[num_compared % 3])
        if (weight.numel() + 1) // 2 % storage.itemsize:
            continue  # refused by bitsandbytes
        packed, state = bitsandbytes.functional.quantize_4bit(
            weight, None, None, block_size, nested, quant_type, storage
        )
        packed = packed.t() if is_row else packed
        given = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        given = {"weight": packed, **given}
        if shape == (10, 100):  # pieces of 4 weights
            with pytest.raises(UnsupportedError, match="requantize=True"):
                from_state_dict(given, "weight")
            from_state_dict(given, "weight", requantize=True)
            num_refused += 1
            continue
        tensor, layout = from_quant_state(packed, state)
        assert tensor.dtype == weight.dtype
        assert_same_entries(to_state_dict(tensor, "weight", layout), given)
        for dtype in WEIGHT_DTYPES:
            expected = decode(bitsandbytes, packed, state, dtype)
            assert as_bytes(tensor.dequantize(dtype)) == as_bytes(expected)
        num_compared += 1
    assert (num_compared, num_refused) == (8 * 52, 8 * 8)


@types
@scales
def test_files_of_modules_come_back_byte_for_byte(bitsandbytes, tmp_path, quant_type, nested):
    safetensors = pytest.importorskip("safetensors", reason="the extra `hf` is missing")
    torch_files = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential()
    for storage in STORAGES:
        layer = bitsandbytes.nn.Linear4bit(
            96, 128, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
        )
        model.append(layer)
    model.append(torch.nn.LayerNorm(128))
    model.to("cpu")
    torch_files.save_file(model.state_dict(), tmp_path / "given", {"format": "pt"})
    with safetensors.safe_open(tmp_path / "given", "pt") as file:
        found = prefixes(file.keys())
        assert list(found) == ["0.weight", "1.weight", "2.weight", "3.weight"]
        written = {name: file.get_tensor(name) for name in file.keys()}
        for prefix, names in found.items():
            tensor, layout = from_state_dict({n: written.pop(n) for n in names}, prefix)
            module = model.get_submodule(prefix.removesuffix(".weight"))
            again, same = from_params4bit(module.weight)
            assert torch.equal(again.record, tensor.record)
            assert same == layout
            written |= to_state_dict(tensor, prefix, layout)
    torch_files.save_file(written, tmp_path / "written", {"format": "pt"})
    assert (tmp_path / "given").read_bytes() == (tmp_path / "written").read_bytes()


@types
def test_bitsandbytes_loads_what_is_written(bitsandbytes, quant_type):
    for scale_block_size in (256, None):
        tensor = to_nf4(gaussian(64, 576), 64, scale_block_size, quant_type=quant_type)
        entries = to_state_dict(tensor, "weight")
        packed = entries.pop("weight")
        weight = bitsandbytes.nn.Params4bit.from_prequantized(packed, entries, device="cpu")
        for dtype in WEIGHT_DTYPES:
            expected = decode(bitsandbytes, weight.data, weight.quant_state, dtype)
            assert torch.equal(tensor.dequantize(dtype), expected)


def test_objects_without_their_scales_are_refused(bitsandbytes):
    weight = bitsandbytes.nn.Params4bit(gaussian(64, 64))
    with pytest.raises(UnsupportedError, match="Params4bit has no quant_state: bitsandbytes quant"):
        from_params4bit(weight)
