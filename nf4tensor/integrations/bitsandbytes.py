"""4-bit weights of bitsandbytes, exactly: its state dicts, files and objects, in and back out.

Codes, and every decoded scale, keep their bits on the way in; on the way back so does every byte.
The package bitsandbytes is not needed. Beside this file: `bitsandbytes_entries.py` checks and
writes entries, `bitsandbytes_layout.py` their JSON, `flat_blocks.py` moves flat blocks into rows.
Called by users and the command line.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nf4tensor.errors import CheckpointError, NF4TensorError, UnsupportedError
from nf4tensor.integrations import bitsandbytes_entries as entries
from nf4tensor.integrations import flat_blocks
from nf4tensor.integrations.bitsandbytes_layout import (
    BLOCK_SIZES,
    BitsAndBytesLayout,
    Description,
)
from nf4tensor.integrations.flat_blocks import FlatWeight
from nf4tensor.tensor import NF4Tensor, to_nf4

__all__ = [
    "BitsAndBytesLayout",
    "from_params4bit",
    "from_quant_state",
    "from_state_dict",
    "prefixes",
    "to_state_dict",
]


def prefixes(names: Iterable[str]) -> dict[str, list[str]]:
    """Find the weights of bitsandbytes among the names of a state dict or of files.

    Reads no tensor. With a safetensors file `f` that `safe_open` opened:

        for prefix, names in prefixes(f.keys()).items():
            weight, layout = from_state_dict({n: f.get_tensor(n) for n in names}, prefix)

    Args:
        names: The keys of a state dict, `f.keys()`, or those of the `weight_map` of an index.

    Returns:
        For each weight its name, with which the names of its other entries begin, and all of them.
    """
    return entries.find(names)


def from_state_dict(
    state_dict: Mapping[str, Tensor], prefix: str, *, requantize: bool = False
) -> tuple[NF4Tensor, BitsAndBytesLayout]:
    """Make the tensor of one weight of a state dict, with the same codes and scales.

    Nested scales become `dynamic8`, plain ones `float32`. Where blocks cross rows, the blocks of
    the record are the largest that do not, with the scales repeated.

    Args:
        state_dict: As `Linear4bit` writes it, NF4 or FP4; entries of other weights stay unread.
        prefix: Name of the weight, such as "model.layers.0.mlp.up_proj.weight".
        requantize: Where a weight cannot be held as it is, decode it by bitsandbytes' rule, with
            the tables given. Where only its map of nested scales is another one, the decoded scales
            are kept, as `float32`; else its weights are quantized again, with `square8` scales if
            it had nested ones and else with `float32`.

    Returns:
        A detached tensor of the shape that the entries state, on their device, its dtype the one
        that bitsandbytes decodes to; and the layout with which `to_state_dict` writes the same
        bytes again (after requantize: those of a plain weight).

    Raises:
        CheckpointError: Entries are missing, unknown, or contradict each other.
        DTypeError, ShapeError: An entry has a wrong dtype or shape.
        UnsupportedError: `requantize` is not set, and blocks cross rows in pieces of less than 16
            weights, or a table is not that of bitsandbytes 0.50.
        WeightError: What is quantized again has NaN or infinite elements.
    """
    with _naming(prefix):
        stored = entries.read(state_dict, prefix)
        try:
            entries.check_levels(stored)
            entries.check_scale_map(stored)
            tensor = flat_blocks.to_rows(stored.flat, stored.description.dtype)
            return tensor, stored.layout
        except UnsupportedError:
            if not requantize:
                raise
        return _requantize(stored)


def _requantize(stored: entries.Stored) -> tuple[NF4Tensor, BitsAndBytesLayout]:
    dtype, layout = stored.description.dtype, stored.layout
    plain = entries.with_plain_scales(stored)
    try:
        entries.check_levels(stored)
        tensor = flat_blocks.to_rows(plain, dtype)
    except UnsupportedError:
        weight = flat_blocks.decode(plain, stored.levels.to(plain.packed.device), dtype)
        scale_block_size = None if stored.flat.nested is None else flat_blocks.GROUP_BLOCKS
        tensor = to_nf4(weight, plain.block_size, scale_block_size, quant_type=plain.quant_type)
    text = _describe(plain, tensor).to_json()
    return tensor, BitsAndBytesLayout(text, layout.storage_dtype, layout.packed_shape)


def from_params4bit(
    weight: Any, *, requantize: bool = False
) -> tuple[NF4Tensor, BitsAndBytesLayout]:
    """Make the tensor of a `Params4bit`, as `from_state_dict` does of the entries it is saved as.

    Raises:
        UnsupportedError: It is not quantized yet.
        NF4TensorError: A case of `from_quant_state`.
    """
    state = getattr(weight, "quant_state", None)
    if state is None:
        raise UnsupportedError(
            f"{type(weight).__name__} has no quant_state: bitsandbytes quantizes a weight when it "
            "is moved to a device; one that is still dense goes to to_nf4"
        )
    return from_quant_state(weight.detach(), state, requantize=requantize)


def from_quant_state(
    packed: Tensor, state: Any, *, requantize: bool = False
) -> tuple[NF4Tensor, BitsAndBytesLayout]:
    """Make the tensor of packed codes and their `QuantState`, as `from_state_dict` does.

    Args:
        packed: `(n, 1)` or `(1, n)`, of any storage dtype.
        state: The second result of bitsandbytes' `quantize_4bit`.
        requantize: See `from_state_dict`.

    Raises:
        UnsupportedError: A forward pass in eval mode on a CPU repacked the weight.
        NF4TensorError: A case of `from_state_dict`.
    """
    if getattr(state, "packing_format_for_cpu", False):
        raise UnsupportedError(
            "bitsandbytes repacked this weight for a forward pass in eval mode on a CPU, which "
            "rounded its scales: take the weight from its checkpoint, or before that pass"
        )
    found = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return from_state_dict({"weight": packed, **found}, "weight", requantize=requantize)


def to_state_dict(
    tensor: NF4Tensor, prefix: str, layout: BitsAndBytesLayout | None = None
) -> dict[str, Tensor]:
    """Write a tensor as entries of a state dict that bitsandbytes loads, with the same values.

    Args:
        tensor: Whole, of any scale kind. `float32` and `square8` scales are written as plain ones,
            `dynamic8` as nested ones.
        prefix: Name of the weight.
        layout: What `from_state_dict` returned, to write what it read byte for byte. By default
            packed uint8 `(n, 1)`, in blocks as large as the tensor's or, where those would cross
            rows, the largest that do not.

    Returns:
        The entries in bitsandbytes' order, on the tensor's device but for the JSON. They share no
        memory with it.

    Raises:
        CheckpointError: The layout is another weight's.
        UnsupportedError: This is no whole weight; bitsandbytes has no blocks of the size needed,
            as of 16 weights; or rows do not agree with flat blocks over the whole weight.
    """
    with _naming(prefix):
        _check_whole(tensor)
        if layout is None:
            flat = flat_blocks.from_rows(tensor, _block_size_of(tensor))
            layout = BitsAndBytesLayout(_describe(flat, tensor).to_json())
        else:
            description = Description.parse(layout.quant_state)
            _check_same_weight(description, tensor)
            flat = flat_blocks.from_rows(tensor, description.block_size, description.offset)
        return entries.write(flat, prefix, layout)


def _check_whole(tensor: Any) -> None:
    if not isinstance(tensor, NF4Tensor):
        raise UnsupportedError(
            f"expected an NF4Tensor, got {type(tensor).__name__}: of a sharded weight pass "
            "full_tensor()"
        )
    if tensor.view_kind != "rows" or tensor.numel() == 0 or tensor.is_meta:
        raise UnsupportedError(
            f"expected a whole weight with its values, got {tensor}: pass the tensor that it is a "
            "view of"
        )


def _block_size_of(tensor: NF4Tensor) -> int:
    """Return the size of the flat blocks of a tensor of which no layout is known."""
    spec = tensor.spec
    block_size = flat_blocks.block_size_in_rows(tensor.shape, spec.block_size)
    if spec.scale_kind == "dynamic8":
        block_size = spec.block_size * spec.segment_length // flat_blocks.GROUP_BLOCKS
    if block_size not in BLOCK_SIZES:
        raise UnsupportedError(
            f"rows of {tensor.shape[-1]} in blocks of {spec.block_size} need flat blocks of "
            f"{block_size}, and bitsandbytes has those of {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}: "
            "quantize dequantize() with it, or in other blocks"
        )
    return block_size


def _describe(flat: FlatWeight, tensor: NF4Tensor) -> Description:
    offset = None if flat.nested is None else flat.nested.offset
    return Description(flat.shape, flat.block_size, flat.quant_type, tensor.dtype, offset)


def _check_same_weight(description: Description, tensor: NF4Tensor) -> None:
    spec = tensor.spec
    said = (description.shape, description.quant_type, description.offset is not None)
    if said != (tuple(tensor.shape), spec.quant_type, spec.scale_kind == "dynamic8"):
        raise CheckpointError(
            f"its layout is that of {description}, this is {tensor}: pass the layout that came "
            "with it, or none"
        )


@contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """Name the weight in each of our errors."""
    try:
        yield
    except NF4TensorError as error:
        raise type(error)(f"{prefix}: {error}") from error
