"""`load`: a checkpoint into a model, every rank reading its own rows and nothing else.

Dense weights are quantized on the way, a few megabytes at a time, where the model has 4-bit ones;
records are copied as they are. Called by users and integrations.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from nf4tensor.checkpoint.bytes import check_record_bytes
from nf4tensor.checkpoint.entries import Entry
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.checkpoint.locate import located
from nf4tensor.checkpoint.match import LoadResult, check_fits, match, unmatched
from nf4tensor.checkpoint.model import (
    Slot,
    keep_layout,
    local_part,
    on_all,
    places,
    ranks_of,
    slots,
    whole_spec,
)
from nf4tensor.errors import CheckpointError, NF4TensorError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from nf4tensor.tensor import NF4Tensor
from nf4tensor.tensor.quantize import check_finite

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK_BYTES = 8 << 20  # of rows that are read, and quantized, at a time


def load(
    model: nn.Module,
    path: str | Path,
    mesh: "DeviceMesh | None" = None,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    progress: bool = True,
    requantize: bool = False,
) -> LoadResult:
    """Load a checkpoint into a model, in place.

    Where the model has 4-bit weights, dense ones of the checkpoint are quantized to the bytes that
    `to_nf4` gives, and 4-bit ones, those of bitsandbytes too, must have the same spec: `prepare`
    sees to that. Where it has dense ones, floats are cast, and 4-bit ones decoded. What is on meta
    becomes memory first. Above that, a rank needs three times `BLOCK_BYTES`.

    Args:
        model: On meta or not, sharded by `fully_shard` or tensor parallel or not. Parameters that
            PEFT wrapped are found under the names that they had before.
        path: A safetensors file; a folder with one or several: of `save`, of a dense model, or of
            one that bitsandbytes quantized; or the id of such a repository on the Hugging Face hub.
        mesh: The ranks that load together; by default all. Each must call this.
        strict: Names without a counterpart are an error; otherwise they are returned.
        device: Where what is on meta goes; by default where its mesh is, or the CPU.
        progress: Show a bar on the first rank.
        requantize: Decode and quantize again 4-bit weights of another spec, and those of
            bitsandbytes that no record holds exactly, rather than refuse them.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the model. With ranks, whatever
            fails on one of them is this error on all.
        NF4TensorError: Without ranks, a case of a weight, such as NaN in one that is quantized.
    """
    mesh = ranks_of(model, mesh)
    shown = progress and (mesh is None or mesh.get_rank() == int(mesh.mesh.flatten()[0]))

    def examine() -> tuple[tuple[Checkpoint, LoadResult], list[str]]:
        checkpoint = Checkpoint(located(path), requantize=requantize)
        pairs, result = match(slots(model), checkpoint)
        if strict and (result.missing or result.unexpected):
            raise CheckpointError(unmatched(result, checkpoint))
        for slot, entry in pairs:
            check_fits(slot, entry, requantize)
        facts = [f"{slot.name}: {entry.name} {entry.dtype}{entry.shape}" for slot, entry in pairs]
        return (checkpoint, result), facts

    def fill() -> tuple[LoadResult, list[str]]:
        materialize(model, set(result.missing), device)
        pairs, _ = match(slots(model), checkpoint)
        where = places(model)
        total = sum(_num_rows(slot) * _bytes_of_row(slot, entry) for slot, entry in pairs)
        with tqdm(total=total, unit="B", unit_scale=True, desc="load", disable=not shown) as bar:
            for slot, entry in pairs:
                _fill(slot, entry, checkpoint, bar.update)
                keep_layout(where, slot.tensor, _layout_of(slot, entry))
        return result, []

    checkpoint, result = on_all(mesh, examine)
    return on_all(mesh, fill)


def materialize(model: nn.Module, left: set[str], device: torch.device | str | None = None) -> None:
    """Give memory to what is on meta, but for what is left.

    Raises:
        CheckpointError: A buffer that no checkpoint has is on meta.
    """
    state = model.state_dict(keep_vars=True)
    lost = [n for n, b in model.named_buffers() if b.is_meta and n not in state]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost[:5])} are on meta, and no checkpoint holds buffers that are not "
            "persistent: build the model so that only its parameters are on meta"
        )
    kept = {id(state[name]) for name in left}
    loaded = {id(t) for t in state.values() if t.is_meta} - kept
    if not loaded:
        return

    def with_memory(tensor: Tensor) -> Tensor:
        if id(tensor) not in loaded:
            return tensor
        mesh = getattr(tensor, "device_mesh", None)
        where = device or ("cpu" if mesh is None else mesh.device_type)
        return torch.empty_like(tensor, device=where)

    shared = [found for found in places(model).values() if len(found) > 1]
    model._apply(with_memory)
    for (module, key), *others in shared:  # torch gives each place a tensor of its own
        for other, name in others:
            setattr(other, name, getattr(module, key))


def _num_rows(slot: Slot) -> int:
    return math.prod(local_part(slot.tensor)[0].shape[:-1])


def _bytes_of_row(slot: Slot, entry: Entry) -> float:
    """Return the bytes in the file, which column shards read whole rows of."""
    return entry.nbytes / max(1, math.prod(slot.tensor.shape[:-1]))


def _layout_of(slot: Slot, entry: Entry) -> dict[str, Any] | None:
    local = local_part(slot.tensor)[0]
    if entry.weight is None or not isinstance(local, NF4Tensor):
        return None
    return entry.weight.layout if entry.weight.spec == whole_spec(slot.tensor) else None


def _fill(
    slot: Slot, entry: Entry, checkpoint: Checkpoint, done: Callable[[float], object]
) -> None:
    """Read this rank's part of one tensor and put it in place."""
    local, start = local_part(slot.tensor)
    local = local.detach()
    spec = whole_spec(slot.tensor) if isinstance(local, NF4Tensor) else None
    row_bytes = 4 * math.prod(slot.tensor.shape[-1:])
    for here in _blocks(tuple(local.shape), max(1, BLOCK_BYTES // max(row_bytes, 1))):
        there = tuple(slice(p.start + i, p.stop + i) for p, i in zip(here, start, strict=False))
        try:
            rows = _read(checkpoint, entry, there, spec)
            _put(local, here, start[-1] if len(here) < local.dim() else 0, rows)
        except NF4TensorError as error:
            place = ", ".join(f"{part.start}:{part.stop}" for part in there)
            raise CheckpointError(f"{entry.what}, at [{place}]: {error}") from error
        done(math.prod(rows.shape[:-1]) * _bytes_of_row(slot, entry))


def _blocks(shape: tuple[int, ...], max_rows: int) -> Iterator[tuple[slice, ...]]:
    """Cut all but the last dimension into blocks of at most so many rows."""
    if 0 in shape:
        return
    if len(shape) < 2:
        yield tuple(slice(0, length) for length in shape)
        return
    *lead, rows, _ = shape
    for outer in product(*map(range, lead)):
        for first in range(0, rows, max_rows):
            last = slice(first, min(first + max_rows, rows))
            yield (*(slice(i, i + 1) for i in outer), last)


def _read(
    checkpoint: Checkpoint, entry: Entry, key: tuple[slice, ...], spec: NF4Spec | None
) -> Tensor:
    """Read whole rows, quantized with a spec if one is given and they are not so yet."""
    is_one_row = entry.weight is not None and len(entry.shape) == 1
    rows = checkpoint.rows(entry, (slice(None),) if is_one_row else key)
    if entry.weight is not None:
        check_record_bytes(rows, entry.weight.spec)
        packed = NF4Tensor(rows, entry.weight.spec, entry.weight.dtype)
        if spec in (None, entry.weight.spec):
            return packed
        rows = packed.dequantize()
    if spec is None:
        return rows
    check_finite(rows)
    return NF4Tensor(ops.quantize(rows, spec), spec, rows.dtype)


def _put(local: Tensor, here: tuple[slice, ...], first_column: int, rows: Tensor) -> None:
    """Put whole rows into a part of this rank's tensor, which may have some columns of them."""
    if isinstance(rows, NF4Tensor) and not isinstance(local, NF4Tensor):
        rows = rows.dequantize(local.dtype)
    if rows.dim() and rows.shape[-1] != local.shape[-1]:
        rows = rows[..., first_column : first_column + local.shape[-1]]
    if isinstance(local, NF4Tensor) and isinstance(rows, NF4Tensor):
        target = local.record if local.dim() == 1 else local.record[here]
        target.copy_(rows.record)
    else:
        local[here].copy_(rows)
