"""What bitsandbytes writes beside a weight's bytes: its JSON, and what else a record cannot hold.

Text in, checked numbers out, and back. No tensors of weights. Called by `bitsandbytes.py`, which
has the public names.
"""

import json
import math
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from nf4tensor.errors import CheckpointError
from nf4tensor.format.spec import QUANT_TYPES
from nf4tensor.integrations.flat_blocks import GROUP_BLOCKS
from nf4tensor.kernels.schema import WEIGHT_DTYPES

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_JSON_BYTES = 4096  # bitsandbytes writes about 200
_MAX_DIMS = 8
_NESTED_KEYS = ("nested_blocksize", "nested_dtype", "nested_offset")
_KEYS = ("quant_type", "blocksize", "dtype", "shape")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}
STORAGE_DTYPES = {"uint8": torch.uint8, **DTYPES}


@dataclass(frozen=True)
class Description:
    """What the JSON of one weight says.

    Attributes:
        shape: Of the weight, `[*lead, in_features]`.
        block_size: Weights that share a scale.
        quant_type: "nf4" or "fp4".
        dtype: What bitsandbytes decodes to.
        offset: Of nested scales, a float32 number; None for plain scales.
    """

    shape: tuple[int, ...]
    block_size: int
    quant_type: str
    dtype: torch.dtype
    offset: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Description":
        """Read the JSON, of which nothing is trusted.

        Raises:
            CheckpointError: It is no JSON, or a key is missing, unknown or has a wrong value.
        """
        found = _load(text)
        is_nested = any(key in found for key in _NESTED_KEYS)
        expected = {*_KEYS, *(_NESTED_KEYS if is_nested else ())}
        if set(found) != expected:
            raise CheckpointError(
                f"its JSON has the keys {_listed(found)}, expected {_listed(expected)}"
            )
        _check_choice(found, "quant_type", QUANT_TYPES)
        _check_choice(found, "blocksize", BLOCK_SIZES)
        _check_choice(found, "dtype", tuple(DTYPES))
        if is_nested:
            _check_choice(found, "nested_blocksize", (GROUP_BLOCKS,))
            _check_choice(found, "nested_dtype", ("float32",))
        shape = found["shape"]
        is_shape = isinstance(shape, list) and 1 <= len(shape) <= _MAX_DIMS
        if not is_shape or not all(type(size) is int and 0 < size < 1 << 63 for size in shape):
            raise CheckpointError(
                f"shape in its JSON is {shape!r:.100}, expected 1 to {_MAX_DIMS} positive integers"
            )
        offset = _float32(found["nested_offset"]) if is_nested else None
        dtype = DTYPES[found["dtype"]]
        return cls(tuple(shape), found["blocksize"], found["quant_type"], dtype, offset)

    def to_json(self) -> str:
        """Write the JSON as bitsandbytes writes it."""
        found: dict[str, Any] = {
            "quant_type": self.quant_type,
            "blocksize": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": self.shape,
        }
        if self.offset is not None:
            found |= zip(_NESTED_KEYS, (GROUP_BLOCKS, "float32", self.offset), strict=True)
        return json.dumps(found)


@dataclass(frozen=True)
class BitsAndBytesLayout:
    """How bitsandbytes had a weight, as far as a record does not say.

    With it `to_state_dict` writes the same bytes again. It belongs to one weight and stays true as
    long as that weight's codes and scales do; the logical dtype of the tensor may change.

    Args:
        quant_state: The JSON of the weight, letter by letter: its shape, its block size, the dtype
            it is decoded to, and of nested scales the offset.
        storage_dtype: "uint8", "bfloat16", "float16" or "float32": what the packed bytes are
            stored as.
        packed_shape: "column" for `(n, 1)`, "row" for `(1, n)`.

    Raises:
        CheckpointError: A value is none of these, or the JSON is damaged.
    """

    quant_state: str
    storage_dtype: str = "uint8"
    packed_shape: str = "column"

    def __post_init__(self) -> None:
        wrong = [f.name for f in fields(self) if not isinstance(getattr(self, f.name), str)]
        if wrong:
            raise CheckpointError(f"{_listed(wrong)} of a layout must be text")
        _check_choice(asdict(self), "storage_dtype", tuple(STORAGE_DTYPES))
        _check_choice(asdict(self), "packed_shape", ("column", "row"))
        Description.parse(self.quant_state)

    def to_dict(self) -> dict[str, str]:
        """Return it as a dictionary that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Any) -> "BitsAndBytesLayout":
        """Undo `to_dict`.

        Raises:
            CheckpointError: It is no such dictionary.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or set(given) != set(names):
            raise CheckpointError(
                f"a layout is {given!r:.100}, expected a dictionary of {_listed(names)}"
            )
        return cls(**given)


def _load(text: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key stands there twice")
        return found

    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"its JSON has {len(text)} letters, expected {MAX_JSON_BYTES} at most"
        )
    try:
        found = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its JSON {text!r:.100} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"its JSON is {text!r:.100}, expected a dictionary")
    return found


def _check_choice(found: dict[str, Any], key: str, choices: tuple[Any, ...]) -> None:
    value = found[key]
    if type(value) is not type(choices[0]) or value not in choices:
        raise CheckpointError(
            f"{key} is {value!r:.100}, expected {' or '.join(str(choice) for choice in choices)}"
        )


def _float32(value: Any) -> float:
    """Round a number to float32, as bitsandbytes reads an offset."""
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except (struct.error, OverflowError):
        rounded = math.nan
    if isinstance(value, bool) or not math.isfinite(rounded):
        raise CheckpointError(
            f"nested_offset in its JSON is {value!r:.100}, expected a finite float32 number"
        )
    return rounded


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names))[:300]
