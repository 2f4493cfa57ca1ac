"""Damaged and hostile entries of bitsandbytes: each is one of our errors."""

import contextlib
import json
import random

import pytest
import torch

from nf4tensor.errors import (
    CheckpointError,
    DTypeError,
    NF4TensorError,
    ShapeError,
    UnsupportedError,
)
from nf4tensor.integrations.bitsandbytes import (
    BitsAndBytesLayout,
    from_quant_state,
    from_state_dict,
    to_state_dict,
)
from tests.integrations.golden_entries import CASES, assert_same_entries, entries, text_entry

NAME = "layer.weight"
ABSMAX, LEVEL_MAP = f"{NAME}.absmax", f"{NAME}.quant_map"
GROUP_ABSMAX, SCALE_MAP = f"{NAME}.nested_absmax", f"{NAME}.nested_quant_map"
JSON = f"{NAME}.quant_state.bitsandbytes__nf4"
NESTED = json.loads(CASES["narrow-nested"]["quant_state"])  # [8, 1024] in blocks of 512
GOOD = entries("narrow-nested")

WRONG_ENTRIES = {
    "no weight": ({NAME: None}, CheckpointError, r"missing are \[''\], unknown \[\]"),
    "no absmax": ({ABSMAX: None}, CheckpointError, r"missing are \['.absmax'\]"),
    "no levels": ({LEVEL_MAP: None}, CheckpointError, r"missing are \['.quant_map'\]"),
    "no groups": ({GROUP_ABSMAX: None}, CheckpointError, r"missing are \['.nested_absmax'\]"),
    "no map": ({SCALE_MAP: None}, CheckpointError, r"says nested scales: entries missing are"),
    "no JSON": ({JSON: None}, CheckpointError, "0 of its entries are named .quant_state.bits"),
    "two JSONs": (
        {JSON.replace("nf4", "fp4"): GOOD[JSON]},
        CheckpointError,
        "2 of its entries are named",
    ),
    "another type": (
        {JSON: None, JSON.replace("nf4", "fp4"): GOOD[JSON]},
        CheckpointError,
        "bitsandbytes__fp4 contradicts its JSON",
    ),
    "unknown": ({f"{NAME}.SCB": torch.zeros(1)}, CheckpointError, r"unknown \['.SCB'\]"),
    "int8 weight": ({NAME: GOOD[NAME].view(torch.int8)}, DTypeError, "packed weight is int8, exp"),
    "float64 weight": ({NAME: torch.zeros(512, 1).double()}, DTypeError, "is float64, expected"),
    "3-D weight": ({NAME: GOOD[NAME].view(-1, 1, 1)}, ShapeError, r"has the shape \(4096, 1, 1\)"),
    "matrix": ({NAME: GOOD[NAME].view(8, 512)}, ShapeError, r"\(8, 512\), expected \(n, 1\) or"),
    "short weight": ({NAME: GOOD[NAME][:-1]}, ShapeError, "has 4095 bytes, expected 4096 for"),
    "long weight": ({NAME: torch.zeros(4098, 1).byte()}, ShapeError, "has 4098 bytes, expected"),
    "wider storage": (
        {NAME: torch.zeros(4096, 1).half()},
        ShapeError,
        r"has 8192 bytes, expected 4096 for the shape \(8, 1024\)",
    ),
    "weight on meta": ({NAME: GOOD[NAME].to("meta")}, DTypeError, "packed weight is on meta"),
    "no tensor": ({ABSMAX: [1, 2]}, DTypeError, "absmax is list, expected a dense tensor"),
    "float absmax": ({ABSMAX: torch.zeros(16)}, DTypeError, "absmax is torch.float32, expected"),
    "short absmax": (
        {ABSMAX: GOOD[ABSMAX][:-1]},
        ShapeError,
        r"absmax has the shape \(15,\), expected \(16,\) for the shape \(8, 1024\) in blocks of 5",
    ),
    "2-D absmax": ({ABSMAX: GOOD[ABSMAX].view(2, 8)}, ShapeError, r"the shape \(2, 8\), expected"),
    "long groups": ({GROUP_ABSMAX: torch.zeros(2)}, ShapeError, r"\(2,\), expected \(1,\)"),
    "half groups": ({GROUP_ABSMAX: torch.zeros(1).half()}, DTypeError, "nested_absmax is torch.f"),
    "15 levels": ({LEVEL_MAP: torch.zeros(15)}, ShapeError, r"quant_map has the shape \(15,\)"),
    "half levels": ({LEVEL_MAP: GOOD[LEVEL_MAP].half()}, DTypeError, "quant_map is torch.float16"),
    "short map": ({SCALE_MAP: torch.zeros(255)}, ShapeError, r"nested_quant_map has .*\(255,\)"),
    "2-D JSON": ({JSON: GOOD[JSON].view(1, -1)}, CheckpointError, "its JSON is torch.uint8 of sh"),
    "int8 JSON": ({JSON: GOOD[JSON].view(torch.int8)}, CheckpointError, "its JSON is torch.int8"),
    "no UTF-8": ({JSON: torch.full((9,), 255).byte()}, CheckpointError, "its JSON is no UTF-8"),
    "huge JSON": ({JSON: torch.zeros(1 << 22).byte()}, CheckpointError, r"\(4194304,\), expected"),
    "no JSON tensor": ({JSON: "{}"}, DTypeError, "its JSON is str, expected a dense tensor"),
}


@pytest.mark.parametrize("requantize", [False, True])
@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_wrong_entries(case, requantize):
    changes, error, message = WRONG_ENTRIES[case]
    given = {name: entry for name, entry in (entries("narrow-nested") | changes).items()}
    given = {name: entry for name, entry in given.items() if entry is not None}
    with pytest.raises(error, match=message) as raised:
        from_state_dict(given, NAME, requantize=requantize)
    assert str(raised.value).startswith(f"{NAME}: ")


def test_plain_absmax_must_be_float32_vectors():
    """As an eval forward of bitsandbytes on a CPU leaves them in a state dict: bfloat16, 2-D."""
    given = entries("fp4")
    with pytest.raises(DTypeError, match=r"absmax is torch\.bfloat16, expected"):
        from_state_dict({**given, ABSMAX: given[ABSMAX].bfloat16().view(4, 4)}, NAME)


WRONG_VALUES = {
    "a block size of 16": ("blocksize", 16, "blocksize is 16, expected 32 or 64"),
    "a negative block size": ("blocksize", -64, "blocksize is -64"),
    "a block size of 0": ("blocksize", 0, "blocksize is 0"),
    "a boolean block size": ("blocksize", True, "blocksize is True"),
    "a fractional block size": ("blocksize", 512.0, "blocksize is 512.0"),
    "another block size": ("blocksize", 256, r"absmax has the shape \(16,\), expected \(32,\)"),
    "another type": ("quant_type", "int4", "quant_type is 'int4', expected nf4 or fp4"),
    "a list for a type": ("quant_type", ["nf4"], r"quant_type is \['nf4'\]"),
    "FP4": ("quant_type", "fp4", "bitsandbytes__nf4 contradicts its JSON"),
    "another dtype": ("dtype", "float64", "dtype is 'float64', expected float32 or bfloat16"),
    "an attribute": ("dtype", "__class__", "dtype is '__class__'"),
    "no shape": ("shape", None, "shape in its JSON is None, expected 1 to 8 positive integers"),
    "an empty shape": ("shape", [], r"shape in its JSON is \[\], expected 1 to 8"),
    "nine dimensions": ("shape", [1] * 7 + [8, 1024], "expected 1 to 8 positive integers"),
    "no rows": ("shape", [0, 1024], r"shape in its JSON is \[0, 1024\]"),
    "a negative shape": ("shape", [-8, -1024], r"shape in its JSON is \[-8, -1024\]"),
    "a fractional shape": ("shape", [8.0, 1024], "expected 1 to 8 positive integers"),
    "a boolean shape": ("shape", [True, 8192], "expected 1 to 8 positive integers"),
    "a text for a shape": ("shape", "8192", "expected 1 to 8 positive integers"),
    "a huge shape": ("shape", [1 << 62, 1 << 62], f"expected {1 << 123} for the sh"),
    "an absurd shape": ("shape", [10**400] * 8, "expected 1 to 8 positive integers"),
    "twice the rows": ("shape", [16, 1024], "has 4096 bytes, expected 8192"),
    "other groups": ("nested_blocksize", 128, "nested_blocksize is 128, expected 256"),
    "a list of groups": ("nested_blocksize", [], r"nested_blocksize is \[\]"),
    "another nested dtype": ("nested_dtype", "float16", "nested_dtype is 'float16', expected"),
    "a NaN offset": ("nested_offset", float("nan"), "nested_offset in its JSON is nan, expected"),
    "an infinite offset": ("nested_offset", float("inf"), "nested_offset in its JSON is inf"),
    "an offset past float32": ("nested_offset", 1e39, "is 1e[+]39, expected a finite float32"),
    "an offset past float64": ("nested_offset", 10**400, "expected a finite float32 number"),
    "a text for an offset": ("nested_offset", "0.1", "nested_offset in its JSON is '0.1'"),
    "a boolean offset": ("nested_offset", True, "nested_offset in its JSON is True"),
    "no offset at all": ("nested_offset", None, "nested_offset in its JSON is None"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values_in_the_json(case):
    key, value, message = WRONG_VALUES[case]
    given = {**GOOD, JSON: text_entry(json.dumps({**NESTED, key: value}))}
    with pytest.raises((CheckpointError, ShapeError), match=rf"^{NAME}: .*{message}"):
        from_state_dict(given, NAME)


WRONG_TEXTS = {
    "": "cannot be read",
    "[]": r"is '\[\]', expected a dictionary",
    "7": "expected a dictionary",
    "{": "cannot be read",
    "{}": r"has the keys , expected 'blocksize', 'dtype', 'quant_type', 'shape'",
    "[" * 4000: "cannot be read",
    '{"a":' * 800: "cannot be read",
    "1" * 5000: "its JSON is torch.uint8 of shape",
    "1" * 4096: "expected a dictionary",
    '{"shape": [1], "shape": [2]}': "a key stands there twice",
    '\ufeff{"shape": [1]}': "cannot be read",
    json.dumps({**NESTED, "more": 1}): "has the keys .*'more'.*, expected",
    json.dumps({key: NESTED[key] for key in ("quant_type", "blocksize", "dtype", "shape")}): (
        r"says plain scales: entries missing are \[\], unknown \['.nested_absmax', '.nested_quant"
    ),
    json.dumps({key: value for key, value in NESTED.items() if key != "nested_dtype"}): (
        "has the keys .*, expected .*'nested_dtype'"
    ),
}


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=lambda text: text[:30])
def test_wrong_texts(text):
    with pytest.raises(CheckpointError, match=rf"^{NAME}: .*{WRONG_TEXTS[text]}"):
        from_state_dict({**GOOD, JSON: text_entry(text)}, NAME)


@pytest.mark.parametrize("case", ["narrow-nested", "storage-float16"])
def test_any_flipped_byte_is_an_error_or_kept(case):
    random.seed(0)
    good = entries(case)
    for _ in range(400):
        name = random.choice([NAME, ABSMAX, GROUP_ABSMAX, JSON, JSON, JSON])
        given = {**good, name: good[name].clone()}
        raw = given[name].view(-1).view(torch.uint8)
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        with contextlib.suppress(NF4TensorError if name == JSON else ()):
            weight, layout = from_state_dict(given, NAME)
            assert_same_entries(to_state_dict(weight, NAME, layout), given)


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {},
        {"quant_state": "{}"},
        {"quant_state": "{}", "storage_dtype": "uint8", "packed_shape": "column"},
        {"quant_state": 1, "storage_dtype": "uint8", "packed_shape": "column"},
        {"quant_state": json.dumps(NESTED), "storage_dtype": "int8", "packed_shape": "column"},
        {"quant_state": json.dumps(NESTED), "storage_dtype": None, "packed_shape": "column"},
        {"quant_state": json.dumps(NESTED), "storage_dtype": "uint8", "packed_shape": "cube"},
        {"quant_state": "1" * 5000, "storage_dtype": "uint8", "packed_shape": "column"},
    ],
)
def test_layouts_are_checked(given):
    with pytest.raises(CheckpointError, match=r"layout|expected"):
        BitsAndBytesLayout.from_dict(given)


def test_a_repacked_quant_state_is_refused():
    class State:
        packing_format_for_cpu = True

    with pytest.raises(UnsupportedError, match="bitsandbytes repacked this weight for a forward"):
        from_quant_state(GOOD[NAME], State())
