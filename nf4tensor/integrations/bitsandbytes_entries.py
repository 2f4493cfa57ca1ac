"""The entries that one weight of bitsandbytes has in a state dict: found and checked, or written.

Nothing is trusted: what is missing, unknown, of a wrong dtype or shape, or contradicts the rest is
an error before a byte is moved. Called by `bitsandbytes.py`, which has the public names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nf4tensor.errors import CheckpointError, DTypeError, ShapeError, UnsupportedError
from nf4tensor.format.codebook import DYNAMIC_MAP, LEVELS
from nf4tensor.format.spec import ceil_div
from nf4tensor.integrations.bitsandbytes_layout import (
    MAX_JSON_BYTES,
    STORAGE_DTYPES,
    BitsAndBytesLayout,
    Description,
)
from nf4tensor.integrations.flat_blocks import GROUP_BLOCKS, FlatWeight, Nested
from nf4tensor.tensor import NF4Tensor

# What follows the weight's name in the names of its entries; the quant type follows the last.
PACKED, ABSMAX, LEVEL_MAP = "", ".absmax", ".quant_map"
GROUP_ABSMAX, SCALE_MAP = ".nested_absmax", ".nested_quant_map"
JSON = ".quant_state.bitsandbytes__"


class Stored(NamedTuple):
    """What the checked entries of one weight say.

    Attributes:
        flat: Its codes and scales, on one device.
        levels: float32 `[16]`, where it was.
        scale_map: float32 `[256]`, where it was; None for plain scales.
        description: Its JSON.
        layout: How it is stored.
    """

    flat: FlatWeight
    levels: Tensor
    scale_map: Tensor | None
    description: Description
    layout: BitsAndBytesLayout


def find(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the entries of each weight, by its own name."""
    known = list(names)
    found: dict[str, list[str]] = {}
    for name in known:
        prefix, mark, _ = name.rpartition(JSON)
        if mark:
            found.setdefault(prefix, []).append(name)
    present = set(known)
    for prefix, entries in found.items():
        tensors = (prefix + end for end in (PACKED, ABSMAX, LEVEL_MAP, GROUP_ABSMAX, SCALE_MAP))
        entries += [name for name in tensors if name in present]
    return found


def read(state_dict: Mapping[str, Tensor], prefix: str, *, sizes_only: bool = False) -> Stored:
    """Check the entries of a weight against each other.

    Args:
        state_dict: Entries of other weights stay unread.
        prefix: Name of the weight.
        sizes_only: Codes and scales may be on meta, and stay there.

    Raises:
        CheckpointError: Some are missing, unknown, or contradict each other.
        DTypeError, ShapeError: One has a wrong dtype or shape.
    """
    names = [name for name in state_dict if name == prefix or name.startswith(f"{prefix}.")]
    ends = {name.removeprefix(prefix) for name in names}
    texts = sorted(end for end in ends if end.startswith(JSON))
    if len(texts) != 1:
        raise CheckpointError(
            f"{len(texts)} of its entries are named {JSON}nf4 or fp4, expected one, as "
            f"bitsandbytes writes for a 4-bit weight: there are {sorted(names)!r:.300}"
        )
    text = _read_text(state_dict[prefix + texts[0]])
    description = Description.parse(text)
    if texts[0] != JSON + description.quant_type:
        raise CheckpointError(f"{texts[0]} contradicts its JSON, which says {text:.200}")
    is_nested = description.offset is not None
    expected = {PACKED, ABSMAX, LEVEL_MAP, texts[0]}
    if is_nested:
        expected |= {GROUP_ABSMAX, SCALE_MAP}
    if ends != expected:
        raise CheckpointError(
            f"its JSON says {'nested' if is_nested else 'plain'} scales: entries missing are "
            f"{sorted(expected - ends)}, unknown {sorted(ends - expected)!r:.300}"
        )
    found = {end: state_dict[prefix + end] for end in expected}
    for end, entry in found.items():
        is_size = sizes_only and end in (PACKED, ABSMAX, GROUP_ABSMAX)
        if not is_size and getattr(entry, "is_meta", False):
            raise DTypeError(f"{end or 'the packed weight'} is on meta, expected its values")
    return _check(found, description, text)


def _read_text(entry: Tensor) -> str:
    _check_dense(entry, "its JSON")
    if entry.is_meta:
        raise DTypeError("its JSON is on meta, expected its values")
    if entry.dtype != torch.uint8 or entry.dim() != 1 or entry.numel() > MAX_JSON_BYTES:
        raise CheckpointError(
            f"its JSON is {entry.dtype} of shape {tuple(entry.shape)}, expected uint8 of one "
            f"dimension, {MAX_JSON_BYTES} at most"
        )
    try:
        return bytes(entry.tolist()).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"its JSON is no UTF-8 text: {error}") from error


def _check(entries: dict[str, Tensor], description: Description, text: str) -> Stored:
    packed, storage = _check_packed(entries[PACKED], description.shape)
    num_blocks = ceil_div(prod(description.shape), description.block_size)
    num_groups = ceil_div(num_blocks, GROUP_BLOCKS)

    def entry(end: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = entries[end]
        _check_dense(tensor, end)
        if tensor.dtype != dtype:
            raise DTypeError(f"{end} is {tensor.dtype}, expected {dtype}")
        if tuple(tensor.shape) != (size,):
            raise ShapeError(
                f"{end} has the shape {tuple(tensor.shape)}, expected {(size,)} for the shape "
                f"{description.shape} in blocks of {description.block_size}"
            )
        return tensor.detach()

    nested, scale_map, scale_dtype = None, None, torch.float32
    if description.offset is not None:
        absmax = entry(GROUP_ABSMAX, num_groups).to(packed.device)
        nested = Nested(absmax, description.offset)
        scale_map, scale_dtype = entry(SCALE_MAP, 256), torch.uint8
    flat = FlatWeight(
        description.shape,
        description.block_size,
        description.quant_type,
        packed,
        entry(ABSMAX, num_blocks, scale_dtype).to(packed.device),
        nested,
    )
    packed_shape = "column" if entries[PACKED].shape[1] == 1 else "row"
    layout = BitsAndBytesLayout(text, storage, packed_shape)
    return Stored(flat, entry(LEVEL_MAP, 16), scale_map, description, layout)


def _check_packed(packed: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """Return the bytes of the codes `[n]`, and the name of the dtype that they are stored as."""
    _check_dense(packed, "the packed weight")
    storage = str(packed.dtype).removeprefix("torch.")
    if storage not in STORAGE_DTYPES:
        raise DTypeError(
            f"the packed weight is {storage}, expected one of {', '.join(STORAGE_DTYPES)}"
        )
    if packed.dim() != 2 or 1 not in packed.shape:
        raise ShapeError(
            f"the packed weight has the shape {tuple(packed.shape)}, expected (n, 1) or (1, n)"
        )
    expected = ceil_div(prod(shape), 2)
    if packed.nbytes != expected:
        raise ShapeError(
            f"the packed weight has {packed.nbytes} bytes, expected {expected} for the shape "
            f"{shape}, two weights a byte"
        )
    # Not view(-1): a single number keeps its stride, which then has no bytes view.
    flat = packed.detach().contiguous().as_strided((packed.numel(),), (1,))
    return flat.view(torch.uint8), storage


def _check_dense(entry: Any, what: str) -> None:
    if not isinstance(entry, Tensor) or isinstance(entry, NF4Tensor):
        raise DTypeError(f"{what} is {type(entry).__name__}, expected a dense tensor")


def check_levels(stored: Stored) -> None:
    """Refuse levels that differ from those that codes of a record mean.

    Raises:
        UnsupportedError: They do.
    """
    _check_table(
        LEVEL_MAP,
        stored.levels,
        LEVELS[stored.flat.quant_type],
        "decodes by these and quantizes again",
    )


def check_scale_map(stored: Stored) -> None:
    """Refuse a map that differs from the one that nested scales of a record mean.

    bitsandbytes computes its map when it is imported: torch without vector instructions
    (`ATEN_CPU_CAPABILITY=default`) gives 42 of the 256 numbers another last bit or two.

    Raises:
        UnsupportedError: It does.
    """
    if stored.scale_map is not None:
        way_out = "decodes the scales by this one and keeps them as float32"
        _check_table(SCALE_MAP, stored.scale_map, DYNAMIC_MAP, way_out)


def with_plain_scales(stored: Stored) -> FlatWeight:
    """Return the weight with its scales decoded by the map that came with it."""
    flat, scale_map = stored.flat, stored.scale_map
    scale_map = scale_map if scale_map is None else scale_map.to(flat.packed.device)
    return replace(flat, scales=flat.decoded_scales(scale_map), nested=None)


def _check_table(end: str, given: Tensor, values: tuple[float, ...], way_out: str) -> None:
    differs = given.view(torch.int32) != _table(values, given.device).view(torch.int32)
    places = differs.nonzero().flatten().tolist()
    if places:
        first = places[0]
        raise UnsupportedError(
            f"{end} differs in {len(places)} of {len(values)} entries from that of bitsandbytes "
            f"0.50, first at {first}: {given[first].item()!r}, not {values[first]!r}: "
            f"requantize=True {way_out}"
        )


def write(flat: FlatWeight, prefix: str, layout: BitsAndBytesLayout) -> dict[str, Tensor]:
    """Return the entries of a weight in the order in which bitsandbytes writes them.

    Raises:
        CheckpointError: The storage dtype of the layout does not divide the bytes.
    """
    storage, device = STORAGE_DTYPES[layout.storage_dtype], flat.packed.device
    if flat.packed.nbytes % storage.itemsize:
        raise CheckpointError(
            f"its layout says {layout.storage_dtype}, which cannot hold {flat.packed.nbytes} bytes"
        )
    size = (-1, 1) if layout.packed_shape == "column" else (1, -1)
    entries = {
        PACKED: flat.packed.view(storage).view(size),
        ABSMAX: flat.scales,
        LEVEL_MAP: _table(LEVELS[flat.quant_type], device),
    }
    if flat.nested is not None:
        entries |= {GROUP_ABSMAX: flat.nested.absmax, SCALE_MAP: _table(DYNAMIC_MAP, device)}
    text = torch.tensor(list(layout.quant_state.encode()), dtype=torch.uint8)
    entries[JSON + flat.quant_type] = text
    return {prefix + end: entry for end, entry in entries.items()}


def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
