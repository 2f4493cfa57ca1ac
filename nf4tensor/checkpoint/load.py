"""`load`: a checkpoint into a model, every rank reading its own rows and nothing else.

Dense weights are quantized on the way, a few megabytes at a time, where the model has 4-bit ones;
records are copied as they are. Called by users and integrations.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from nf4tensor.checkpoint.bytes import check_record_bytes
from nf4tensor.checkpoint.entries import Entry
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.checkpoint.model import Slot, local_part, ranks_of, slots, whole_spec
from nf4tensor.errors import CheckpointError, NF4TensorError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from nf4tensor.ranks import alike
from nf4tensor.tensor import NF4Tensor
from nf4tensor.tensor.quantize import check_finite

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK_BYTES = 8 << 20  # of rows that are read, and quantized, at a time
Made = TypeVar("Made")
_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
_PEFT_PREFIX, _PEFT_INFIX = "base_model.model.", ".base_layer"


@dataclass(frozen=True)
class LoadResult:
    """Names without a counterpart.

    Args:
        missing: Of the model; they are as they were before.
        unexpected: Of the checkpoint; they were not read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load(
    model: nn.Module,
    path: str | Path,
    mesh: "DeviceMesh | None" = None,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LoadResult:
    """Load a checkpoint into a model, in place.

    Where the model has 4-bit weights, dense ones of the checkpoint are quantized to the bytes that
    `to_nf4` gives, and 4-bit ones must have the same spec. Where it has dense ones, floats are
    cast, and 4-bit ones decoded. What is on meta becomes memory first. Above that, a rank needs
    three times `BLOCK_BYTES`.

    Args:
        model: On meta or not, sharded by `fully_shard` or tensor parallel or not. Parameters that
            PEFT wrapped are found under the names that they had before.
        path: A safetensors file, or a folder with one or several: of `save`, or of a dense model.
        mesh: The ranks that load together; by default all. Each must call this.
        strict: Names without a counterpart are an error; otherwise they are returned.
        device: Where what is on meta goes; by default where its mesh is, or the CPU.
        progress: Show a bar on the first rank.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the model. With ranks, whatever
            fails on one of them is this error on all.
    """
    mesh = ranks_of(model, mesh)
    shown = progress and (mesh is None or mesh.get_rank() == int(mesh.mesh.flatten()[0]))

    def examine() -> tuple[tuple[Checkpoint, LoadResult], list[str]]:
        checkpoint = Checkpoint(path)
        pairs, result = match(slots(model), checkpoint)
        if strict and (result.missing or result.unexpected):
            raise CheckpointError(_unmatched(result, checkpoint))
        for slot, entry in pairs:
            check_fits(slot, entry)
        facts = [f"{slot.name}: {entry.name} {entry.dtype}{entry.shape}" for slot, entry in pairs]
        return (checkpoint, result), facts

    def fill() -> tuple[LoadResult, list[str]]:
        materialize(model, set(result.missing), device)
        pairs, _ = match(slots(model), checkpoint)
        total = sum(local_part(slot.tensor)[0].numel() for slot, _ in pairs)
        bar = tqdm(total=total, unit="weight", unit_scale=True, desc="load", disable=not shown)
        for slot, entry in pairs:
            _fill(slot, entry, checkpoint, bar.update)
        bar.close()
        return result, []

    checkpoint, result = _on_all(mesh, examine)
    return _on_all(mesh, fill)


def _on_all(mesh: "DeviceMesh | None", make: Callable[[], tuple[Made, list[str]]]) -> Made:
    return make()[0] if mesh is None else alike(mesh, make, CheckpointError)


def match(found: list[Slot], checkpoint: Checkpoint) -> tuple[list[tuple[Slot, Entry]], LoadResult]:
    """Pair what a model has with what a checkpoint holds, by any of their names."""
    pairs, missing = [], []
    for slot in found:
        names = (*slot.names, *map(_without_peft, slot.names))
        entry = next((e for e in map(checkpoint.find, names) if e is not None), None)
        if entry is None:
            missing.append(slot.name)
        else:
            pairs.append((slot, entry))
    used = {entry.name for _, entry in pairs}
    unexpected = tuple(name for name in checkpoint.entries if name not in used)
    return pairs, LoadResult(tuple(missing), unexpected)


def _without_peft(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX).replace(_PEFT_INFIX, "")


def _unmatched(result: LoadResult, checkpoint: Checkpoint) -> str:
    def listed(names: tuple[str, ...]) -> str:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return ", ".join(names[:5]) + more

    missing = f"the model has {listed(result.missing)}, which {checkpoint.path} lacks; "
    unexpected = f"{checkpoint.path} has {listed(result.unexpected)}, which the model lacks; "
    return (
        (missing if result.missing else "")
        + (unexpected if result.unexpected else "")
        + "pass strict=False to leave them out"
    )


def check_fits(slot: Slot, entry: Entry) -> None:
    """Refuse an entry of another shape, spec or kind than the tensor that it is for.

    Raises:
        CheckpointError: It is, or a column shard is not cut from whole blocks.
    """
    shape = tuple(slot.tensor.shape)
    stored = entry.shape
    if entry.weight is not None:
        stored = (*entry.shape[:-1], entry.weight.spec.in_features)
    if stored != shape:
        raise CheckpointError(
            f"{entry.what} has shape {list(stored)}, {slot.name} of the model {list(shape)}"
        )
    local = getattr(slot.tensor, "_local_tensor", slot.tensor)
    if isinstance(local, NF4Tensor):
        if entry.weight is not None and entry.weight.spec != whole_spec(slot.tensor):
            raise CheckpointError(
                f"{entry.what} has {entry.weight.spec}, {slot.name} of the model "
                f"{whole_spec(slot.tensor)}: quantize the model with the same options"
            )
        if entry.weight is None and entry.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                f"{entry.what} is {entry.dtype}, expected F32, BF16 or F16 to quantize, or a 4-bit "
                "weight with its metadata"
            )
    elif entry.weight is None and (entry.dtype in _FLOATS) != slot.tensor.is_floating_point():
        raise CheckpointError(f"{entry.what} is {entry.dtype}, {slot.name} {slot.tensor.dtype}")


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
    loaded = {id(t) for name, t in state.items() if t.is_meta and name not in left}
    if not loaded:
        return

    def with_memory(tensor: Tensor) -> Tensor:
        if id(tensor) not in loaded:
            return tensor
        mesh = getattr(tensor, "device_mesh", None)
        where = device or ("cpu" if mesh is None else mesh.device_type)
        return torch.empty_like(tensor, device=where)

    model._apply(with_memory)


def _fill(slot: Slot, entry: Entry, checkpoint: Checkpoint, done: Callable[[int], object]) -> None:
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
        done(local[here].numel())


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
    """Read whole rows, quantized with a spec if one is given and they are not yet."""
    if entry.weight is not None:
        record = checkpoint.rows(entry, key if len(entry.shape) > 1 else (slice(None),))
        check_record_bytes(record, entry.weight.spec)
        return NF4Tensor(record, entry.weight.spec, entry.weight.dtype)
    rows = checkpoint.rows(entry, key)
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
