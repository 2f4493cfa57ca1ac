"""One checkpoint into another without a model: quantized, or with adapters merged in.

A tensor at a time is in memory. Called by the command line.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nf4tensor.checkpoint.adapters import Adapter
from nf4tensor.checkpoint.entries import Entry, Weight
from nf4tensor.checkpoint.files import Checkpoint, read_json
from nf4tensor.checkpoint.write import (
    CONFIG_NAME,
    Job,
    Plan,
    WriteOptions,
    write_all,
)
from nf4tensor.errors import CheckpointError, WeightError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.tensor import NF4Tensor, to_nf4

SKIP = ("lm_head", "embed", "wte", "wpe", "norm", "router")
_FLOATS = ("F32", "BF16", "F16")


@dataclass
class Change:
    """What becomes of one tensor.

    Args:
        name: Of the tensor.
        shape: Of its weights.
        what: "copied", "quantized", or "merged", and "merged in 4 bits".
        before_bytes: In the source.
        after_bytes: In the new files.
        error: Relative Frobenius error that 4 bits make, None where there is none or not yet.
    """

    name: str
    shape: tuple[int, ...]
    what: str
    before_bytes: int
    after_bytes: int
    error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as numbers and strings."""
        return asdict(self)


def quantize_files(
    source: str | Path,
    folder: str | Path,
    *,
    block_size: int = 64,
    scale_block_size: int | None = 256,
    quant_type: str = "nf4",
    skip: Sequence[str] = SKIP,
    options: WriteOptions | None = None,
    dry_run: bool = False,
) -> list[Change]:
    """Quantize the weights of a dense checkpoint.

    Args:
        source: A safetensors file or a folder.
        folder: Where the new checkpoint goes.
        block_size: As of `to_nf4`.
        scale_block_size: As of `to_nf4`.
        quant_type: As of `to_nf4`.
        skip: Parts of names. Tensors that have one, or fewer than two dimensions, and those of
            three that are no experts', are copied, as are those that would not get smaller than
            in bfloat16.
        options: Of the files and the bar.
        dry_run: Write nothing, and measure no errors.

    Returns:
        What became of each tensor, with the error that quantizing made.

    Raises:
        CheckpointError: The source is damaged, or the folder cannot be written.
        WeightError: A weight has NaN or infinite elements.
    """
    checkpoint = Checkpoint(source)
    changes, jobs = [], []
    for entry in checkpoint.entries.values():
        spec = None
        if entry.weight is None and _is_chosen(entry, skip):
            spec = NF4Spec.for_weight(entry.shape[-1], block_size, scale_block_size, quant_type)
        change, job = _change(checkpoint, entry, spec)
        changes.append(change)
        jobs.append(job)
    _write(checkpoint, Path(folder), jobs, options, dry_run)
    return changes


def merge_files(
    base: str | Path,
    adapter: str | Path,
    folder: str | Path,
    *,
    in_4_bits: bool = False,
    options: WriteOptions | None = None,
    dry_run: bool = False,
) -> list[Change]:
    """Merge LoRA adapters of PEFT into a checkpoint, dense or 4-bit.

    Args:
        base: A safetensors file or a folder.
        adapter: PEFT's folder, with `adapter_config.json`.
        folder: Where the new checkpoint goes.
        in_4_bits: Quantize merged 4-bit weights again, with the spec they had, in place of writing
            them in bfloat16; unmerged ones stay as they are. Otherwise no weight stays 4-bit.
        options: Of the files and the bar.
        dry_run: Write nothing, and measure no errors.

    Returns:
        What became of each tensor, with the error of the merged weights that are quantized.

    Raises:
        CheckpointError: A file is damaged, the adapter is of another kind than LoRA or for another
            model, or the folder cannot be written.
    """
    checkpoint, merged = Checkpoint(base), Adapter(adapter)
    merged.check_fits(checkpoint)
    changes, jobs = [], []
    for entry in checkpoint.entries.values():
        change, job = _merge(checkpoint, entry, merged, in_4_bits)
        changes.append(change)
        jobs.append(job)
    _write(checkpoint, Path(folder), jobs, options, dry_run)
    return changes


def read(checkpoint: Checkpoint, entry: Entry) -> Tensor:
    """Read a whole tensor, 4-bit or dense."""
    stored = checkpoint.rows(entry, (slice(None),))
    if entry.weight is None:
        return stored
    return NF4Tensor(stored, entry.weight.spec, entry.weight.dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference over that of what is expected."""
    expected = expected.float()
    norm = expected.norm()
    return float((found.float() - expected).norm() / norm) if norm else 0.0


def _is_chosen(entry: Entry, skip: Sequence[str]) -> bool:
    if entry.dtype not in _FLOATS or any(part in entry.name for part in skip):
        return False
    if not all(entry.shape) or "bias" in entry.name:
        return False
    return len(entry.shape) == 2 or (len(entry.shape) == 3 and "expert" in entry.name)


def _change(checkpoint: Checkpoint, entry: Entry, spec: NF4Spec | None) -> tuple[Change, Job]:
    """Copy a tensor, or quantize it with a spec where that makes it smaller."""
    before = entry.nbytes
    if spec is None or spec.pitch >= 2 * spec.in_features:
        plan = Plan(entry.name, entry.shape, entry.torch_dtype, entry.weight)
        change = Change(entry.name, entry.weights_shape, "copied", before, plan.nbytes)
        return change, (plan, partial(checkpoint.rows, entry, (slice(None),)))
    weight = Weight(spec, entry.torch_dtype)
    plan = Plan(entry.name, (*entry.shape[:-1], spec.pitch), torch.uint8, weight)
    change = Change(entry.name, entry.shape, "quantized", before, plan.nbytes)
    return change, (plan, partial(_quantized, partial(read, checkpoint, entry), spec, change))


def _merge(
    checkpoint: Checkpoint, entry: Entry, adapter: Adapter, in_4_bits: bool
) -> tuple[Change, Job]:
    changed = adapter.changes(entry.name)
    if not changed and (in_4_bits or entry.weight is None):
        return _change(checkpoint, entry, None)
    before, shape = entry.nbytes, entry.weights_shape

    def make() -> Tensor:
        found = read(checkpoint, entry)
        dense = found.dequantize(torch.float32) if isinstance(found, NF4Tensor) else found.float()
        return adapter.merged(entry.name, dense) if changed else dense

    if in_4_bits and entry.weight is not None:
        plan = Plan(
            entry.name, entry.shape, torch.uint8, Weight(entry.weight.spec, entry.weight.dtype)
        )
        change = Change(entry.name, shape, "merged in 4 bits", before, plan.nbytes)
        return change, (plan, partial(_quantized, make, entry.weight.spec, change))
    dtype = torch.bfloat16 if entry.weight is not None else entry.torch_dtype
    plan = Plan(entry.name, shape, dtype)
    what = "merged" if changed else "decoded"
    return Change(entry.name, shape, what, before, plan.nbytes), (plan, lambda: make().to(dtype))


def _quantized(make: Callable[[], Tensor], spec: NF4Spec, change: Change) -> Tensor:
    """Return the record of a tensor, and note the error."""
    dense = make()
    scale_block_size = None if spec.scale_kind == "float32" else spec.segment_length
    try:
        quantized = to_nf4(dense, spec.block_size, scale_block_size, quant_type=spec.quant_type)
    except WeightError as error:
        raise WeightError(f"{change.name}: {error}") from error
    if quantized.spec != spec:
        raise CheckpointError(
            f"{change.name} has {spec}, which only imported weights have: merge it densely"
        )
    change.error = relative_error(quantized.dequantize(torch.float32), dense)
    return quantized.record


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    jobs: Sequence[Job],
    options: WriteOptions | None,
    dry_run: bool,
) -> None:
    if dry_run:
        return
    config_file = checkpoint.path / CONFIG_NAME
    config = read_json(config_file) if config_file.is_file() else {}
    config.pop("quantization_config", None)
    write_all(folder, jobs, checkpoint.aliases, config, options or WriteOptions())
