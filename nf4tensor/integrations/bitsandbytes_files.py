"""Weights of bitsandbytes in checkpoints: found by name, checked, read a few rows at a time.

`nf4tensor/__init__.py` gives `assemble` to the room `checkpoint`, whose functions then take these
weights for records. Nobody else calls this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nf4tensor.checkpoint.entries import DTYPES, Entry, Weight
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.errors import NF4TensorError, UnsupportedError
from nf4tensor.format.spec import NF4Spec, ceil_div
from nf4tensor.integrations import bitsandbytes_entries as entries
from nf4tensor.integrations import flat_blocks
from nf4tensor.integrations.bitsandbytes_layout import MAX_JSON_BYTES
from nf4tensor.integrations.flat_blocks import GROUP_BLOCKS

NAME = "bitsandbytes"


def assemble(checkpoint: Checkpoint, requantize: bool) -> Iterator[Entry]:
    """Yield one entry for each weight of bitsandbytes in a checkpoint.

    Reads JSON and tables only. The entry is 4-bit, with the layout; or dense, of the dtype that the
    JSON says, where `requantize` is set and no record holds the weight exactly.

    Raises:
        NF4TensorError: A case of `bitsandbytes.from_state_dict`; the message names the weight, its
            file, and the way out.
    """
    found = entries.find(checkpoint.entries)
    for name, names in _with_unknown(checkpoint.entries, found).items():
        parts = {end.removeprefix(name): checkpoint.entries[end] for end in names}
        file = checkpoint.entries[found[name][0]].file
        try:
            yield _assembled(checkpoint, Entry(file, name, (), "U8"), parts, requantize)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{name} in {file}: {error}, and so does `nf4tensor convert {checkpoint.path} "
                "FOLDER --to nf4tensor --requantize`"
            ) from error
        except NF4TensorError as error:
            raise type(error)(f"{name} in {file}: {error}") from error


def _with_unknown(names: Sequence[str], found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return all names that begin with that of a weight, the longest where several do."""
    grouped: dict[str, list[str]] = {name: [] for name in found}
    for name in names:
        prefix = name
        while prefix and prefix not in found:
            prefix = prefix.rpartition(".")[0]
        if prefix:
            grouped[prefix].append(name)
    return grouped


def _assembled(
    checkpoint: Checkpoint, entry: Entry, parts: dict[str, Entry], requantize: bool
) -> Entry:
    state = {entry.name + end: _sizes_or_values(checkpoint, part) for end, part in parts.items()}
    stored = entries.read(state, entry.name, sizes_only=True)
    flat, dtype = stored.flat, stored.description.dtype
    try:
        entries.check_levels(stored)
        entries.check_scale_map(stored)
        spec = flat_blocks.spec_in_rows(
            flat.shape, flat.block_size, flat.quant_type, flat.nested is not None
        )
    except UnsupportedError:
        if not requantize:
            raise
        found = StoredWeight(parts, stored, None)
        return replace(entry, shape=flat.shape, dtype=DTYPES[dtype], parts=found)
    weight = Weight(spec, dtype, {NAME: stored.layout.to_dict()})
    shape = (*flat.shape[:-1], spec.pitch)
    return replace(entry, shape=shape, weight=weight, parts=StoredWeight(parts, stored, spec))


def _sizes_or_values(checkpoint: Checkpoint, entry: Entry) -> Tensor:
    """Return what is small or stands for all of a weight; on meta what belongs to some rows."""
    if entry.name.endswith((entries.LEVEL_MAP, entries.SCALE_MAP)) or entries.JSON in entry.name:
        if entry.nbytes <= MAX_JSON_BYTES:
            return checkpoint.rows(entry, (slice(None),) * len(entry.shape))
        return torch.zeros((), dtype=entry.torch_dtype).expand(entry.shape)  # refused by its size
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")


@dataclass(frozen=True)
class StoredWeight:
    """Where the bytes of one weight are.

    Args:
        parts: Its entries, by what follows the weight's name.
        stored: What they say; codes and scales are on meta.
        spec: Of its records, None if its rows are to be decoded.
    """

    parts: dict[str, Entry]
    stored: entries.Stored
    spec: NF4Spec | None

    @property
    def entries(self) -> Sequence[Entry]:
        """What the files have of it."""
        return list(self.parts.values())

    def rows(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return consecutive rows: records `[rows, pitch]`, or decoded `[rows, in_features]`."""
        flat, spec = self.stored.flat, self.spec
        width = flat.shape[-1]
        if spec is not None:
            blocks = flat_blocks.blocks_of_rows(spec, flat.block_size, first, last)
            part = self._read(checkpoint, first * width, last * width, blocks)
            return flat_blocks.pack_rows(part, spec, first)
        # Where both a byte and a group of scales start, so that what is read decodes by itself.
        start = first * width // (flat.block_size * GROUP_BLOCKS) * flat.block_size * GROUP_BLOCKS
        blocks = slice(start // flat.block_size, ceil_div(last * width, flat.block_size))
        part = self._read(checkpoint, start, last * width, blocks)
        if part.nested is not None:
            absmax = part.nested.absmax[blocks.start // GROUP_BLOCKS :]
            part = replace(part, nested=part.nested._replace(absmax=absmax))
        plain = entries.with_plain_scales(self.stored._replace(flat=part))
        weights = flat_blocks.decode(plain, self.stored.levels, self.stored.description.dtype)
        return weights[first * width - start :].view(-1, width)

    def _read(
        self, checkpoint: Checkpoint, start: int, stop: int, blocks: slice
    ) -> flat_blocks.FlatWeight:
        """Read the codes of some weights, the scales of some blocks, and the whole second level."""
        flat = self.stored.flat
        packed = self._read_codes(checkpoint, slice(start // 2, ceil_div(stop, 2)))
        scales = checkpoint.rows(self.parts[entries.ABSMAX], (blocks,))
        nested = flat.nested
        if nested is not None:
            part = self.parts[entries.GROUP_ABSMAX]
            nested = nested._replace(absmax=checkpoint.rows(part, (slice(None),)))
        return replace(flat, shape=(stop - start,), packed=packed, scales=scales, nested=nested)

    def _read_codes(self, checkpoint: Checkpoint, part: slice) -> Tensor:
        """Read bytes of the packed codes, which may be stored as numbers of several bytes."""
        entry = self.parts[entries.PACKED]
        size = entry.torch_dtype.itemsize
        numbers = slice(part.start // size, ceil_div(part.stop, size))
        key = (numbers, slice(None)) if entry.shape[1] == 1 else (slice(None), numbers)
        first = numbers.start * size
        found = checkpoint.rows(entry, key).flatten().view(torch.uint8)
        return found[part.start - first : part.stop - first]
