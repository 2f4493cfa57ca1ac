"""Weights of bitsandbytes that no record holds as they are: refused, or decoded by their tables."""

import json

import pytest
import torch

from nf4tensor import NF4Tensor
from nf4tensor.errors import UnsupportedError, WeightError
from nf4tensor.integrations.bitsandbytes import from_state_dict, to_state_dict
from nf4tensor.kernels import reference
from tests.integrations.golden_entries import CASES, entries, text_entry

NAME = "layer.weight"
ABSMAX, LEVEL_MAP = f"{NAME}.absmax", f"{NAME}.quant_map"
GROUP_ABSMAX, SCALE_MAP = f"{NAME}.nested_absmax", f"{NAME}.nested_quant_map"
JSON = f"{NAME}.quant_state.bitsandbytes__nf4"
NESTED = json.loads(CASES["narrow-nested"]["quant_state"])  # [8, 1024] in blocks of 512


def absmax_by_map(given: dict[str, torch.Tensor]) -> torch.Tensor:
    offset = torch.tensor(NESTED["nested_offset"])
    return given[SCALE_MAP][given[ABSMAX].int()] * given[GROUP_ABSMAX] + offset


def test_other_levels_are_refused_or_decoded_by():
    given = entries("narrow-nested")
    given[LEVEL_MAP][3] = -0.5
    given[SCALE_MAP][200:] *= 0.5
    with pytest.raises(UnsupportedError, match=r"quant_map differs in 1 of 16 .* first at 3: -0.5"):
        from_state_dict(given, NAME)
    weight, layout = from_state_dict(given, NAME, requantize=True)
    assert (weight.spec.scale_kind, weight.spec.block_size) == ("square8", 512)
    packed = given[NAME].view(8, -1)
    codes = torch.stack([packed >> 4, packed & 15], -1).view(16, 512).int()
    expected = (given[LEVEL_MAP][codes] * absmax_by_map(given)[:, None]).bfloat16().view(8, 1024)
    assert torch.equal(weight.record, reference.quantize(expected, weight.spec))
    written = to_state_dict(weight, NAME, layout)
    assert torch.equal(from_state_dict(written, NAME)[0].dequantize(), weight.dequantize())


def test_a_zero_of_the_other_sign_is_another_level():
    """It would not be written back."""
    given = entries("fp4")
    given[LEVEL_MAP][8] = -0.0
    with pytest.raises(UnsupportedError, match=r"first at 8: -0\.0, not 0\.0: requantize=True"):
        from_state_dict(given, NAME)
    weight, _ = from_state_dict(given, NAME, requantize=True)
    assert weight.spec.scale_kind == "float32"


def test_scales_of_another_map_are_refused_or_kept_decoded():
    given = entries("narrow-nested")
    given[SCALE_MAP] = given[SCALE_MAP].nextafter(torch.tensor(2.0))
    with pytest.raises(UnsupportedError, match=r"nested_quant_map differs in 256 of .* as float32"):
        from_state_dict(given, NAME)
    weight, layout = from_state_dict(given, NAME, requantize=True)
    codes = weight.record[:, : weight.spec.codes_bytes]
    assert torch.equal(codes, given[NAME].view(8, -1))
    scales = reference.read_scales(weight.record, weight.spec).flatten()
    assert torch.equal(scales, absmax_by_map(given))
    written = to_state_dict(weight, NAME, layout)
    assert torch.equal(written[NAME], given[NAME])
    assert torch.equal(written[ABSMAX], scales)


def test_levels_of_nan_are_refused_even_then():
    given = entries("narrow-nested")
    given[LEVEL_MAP][:] = torch.nan
    with pytest.raises(WeightError, match=f"^{NAME}: every element of the weight"):
        from_state_dict(given, NAME, requantize=True)


def narrow_rows() -> dict[str, torch.Tensor]:
    """Blocks of 64 over rows of 100: pieces of 4 weights."""
    generator = torch.Generator().manual_seed(0)
    text = '{"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [7, 100]}'
    return {
        NAME: torch.randint(0, 256, (350, 1), dtype=torch.uint8, generator=generator),
        ABSMAX: torch.rand(11, generator=generator),
        LEVEL_MAP: entries("odd")[LEVEL_MAP],
        JSON: text_entry(text),
    }


def test_rows_in_small_pieces_are_refused_or_quantized_again():
    given = narrow_rows()
    with pytest.raises(UnsupportedError, match=f"^{NAME}: in_features is 100: blocks of 64 cross "):
        from_state_dict(given, NAME)
    weight, layout = from_state_dict(given, NAME, requantize=True)
    assert isinstance(weight, NF4Tensor)
    packed = given[NAME].view(-1)
    levels = given[LEVEL_MAP][torch.stack([packed >> 4, packed & 15], -1).view(-1).int()]
    expected = (levels * given[ABSMAX].repeat_interleave(64)[:700]).half().view(7, 100)
    assert torch.equal(weight.record, reference.quantize(expected, weight.spec))
    with pytest.raises(UnsupportedError, match="do not agree with flat blocks of 64"):
        to_state_dict(weight, NAME, layout)


def test_requantize_leaves_alone_what_is_held_exactly():
    for case in CASES:
        exact = from_state_dict(entries(case), NAME)
        again = from_state_dict(entries(case), NAME, requantize=True)
        assert torch.equal(again[0].record, exact[0].record)
        assert again[1] == exact[1]
