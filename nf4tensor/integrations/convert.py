"""Checkpoints of bitsandbytes into ours and back, a weight at a time and byte for byte.

Every weight is converted twice, first to know its sizes, which head a file, and then to write it,
so that no model has to fit in memory and nothing is written where one cannot be converted. Called
by the command line.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nf4tensor.checkpoint.entries import Entry, Weight
from nf4tensor.checkpoint.files import Checkpoint, read_json
from nf4tensor.checkpoint.transform import Change, read
from nf4tensor.checkpoint.write import CONFIG_NAME, Job, Plan, WriteOptions, write_all
from nf4tensor.errors import CheckpointError
from nf4tensor.integrations import bitsandbytes

TARGETS = ("nf4tensor", "bitsandbytes")
Converted = dict[str, tuple[Tensor, Weight | None]]  # what becomes of one weight, by name
_NAME = "bitsandbytes"


def convert_files(
    source: str | Path,
    folder: str | Path,
    to: str,
    *,
    requantize: bool = False,
    options: WriteOptions | None = None,
    dry_run: bool = False,
) -> list[Change]:
    """Convert the 4-bit weights of a checkpoint into another package's format.

    Args:
        source: A safetensors file or a folder.
        folder: Where the new checkpoint goes.
        to: "nf4tensor" or "bitsandbytes". What came from bitsandbytes goes back byte for byte.
        requantize: Quantize again what cannot be held exactly, rather than refuse it.
        options: Of the files and the bar.
        dry_run: Write nothing.

    Returns:
        What became of each weight and of each other tensor.

    Raises:
        CheckpointError: The source is damaged or has no weight of the other format, or the folder
            cannot be written.
        UnsupportedError: A weight cannot be held exactly; the message names it.
    """
    if to not in TARGETS:
        raise CheckpointError(f"cannot convert to {to!r}, expected one of {', '.join(TARGETS)}")
    checkpoint = Checkpoint(source, as_stored=True)
    groups = list(_groups(checkpoint, to, requantize))
    if all(what == "copied" for _, what, _ in groups):
        other = TARGETS[1 - TARGETS.index(to)]
        raise CheckpointError(f"{source} has no weights of {other} to convert to {to}")
    changes, jobs = [], []
    for entries, what, convert in groups:
        change, its_jobs = _planned(entries, what, convert)
        changes.append(change)
        jobs += its_jobs
    if not dry_run:
        file = checkpoint.path / CONFIG_NAME
        config = read_json(file) if file.is_file() else {}
        config.pop("quantization_config", None)
        if to == _NAME:
            config["quantization_config"] = _bitsandbytes_config(checkpoint)
        write_all(Path(folder), jobs, checkpoint.aliases, config, options or WriteOptions())
    return changes


def _groups(
    checkpoint: Checkpoint, to: str, requantize: bool
) -> Iterator[tuple[list[Entry], str, Callable[[], Converted]]]:
    """Yield the entries that belong together, what becomes of them, and how."""
    grouped = bitsandbytes.prefixes(checkpoint.entries) if to == "nf4tensor" else {}
    parts = {name: prefix for prefix, names in grouped.items() for name in names}
    for name, entry in checkpoint.entries.items():
        if name in grouped:
            entries = [checkpoint.entries[part] for part in grouped[name]]
            yield entries, "converted", partial(_from_theirs, checkpoint, name, entries, requantize)
        elif name in parts:
            continue
        elif to == _NAME and entry.weight is not None:
            yield [entry], "converted", partial(_to_theirs, checkpoint, entry, entry.weight)
        else:
            yield [entry], "copied", partial(_copied, checkpoint, entry)


def _copied(checkpoint: Checkpoint, entry: Entry) -> Converted:
    return {entry.name: (checkpoint.rows(entry, (slice(None),)), entry.weight)}


def _from_theirs(
    checkpoint: Checkpoint, name: str, entries: list[Entry], requantize: bool
) -> Converted:
    state = {entry.name: checkpoint.rows(entry, (slice(None),)) for entry in entries}
    tensor, layout = bitsandbytes.from_state_dict(state, name, requantize=requantize)
    beside = {_NAME: layout.to_dict()}
    return {name: (tensor.record, Weight(tensor.spec, tensor.dtype, beside))}


def _to_theirs(checkpoint: Checkpoint, entry: Entry, weight: Weight) -> Converted:
    given = (weight.layout or {}).get(_NAME)
    layout = None if given is None else bitsandbytes.BitsAndBytesLayout.from_dict(given)
    state = bitsandbytes.to_state_dict(read(checkpoint, entry), entry.name, layout)
    return {name: (tensor, None) for name, tensor in state.items()}


def _planned(
    entries: list[Entry], what: str, convert: Callable[[], Converted]
) -> tuple[Change, list[Job]]:
    once = lru_cache(maxsize=1)(convert) if what == "converted" else convert
    found = convert()
    plans = [Plan(n, tuple(t.shape), t.dtype, weight) for n, (t, weight) in found.items()]
    jobs: list[Job] = [(plan, partial(_taken, once, plan.name)) for plan in plans]
    if what == "converted":  # its tensors are made once, and dropped with the last
        last, take = jobs[-1]
        jobs[-1] = (last, partial(_taken_last, take, once))
    (first, *_) = entries
    shape = first.weights_shape
    before = sum(entry.nbytes for entry in entries)
    return Change(first.name, shape, what, before, sum(plan.nbytes for plan in plans)), jobs


def _taken(convert: Callable[[], Converted], name: str) -> Tensor:
    return convert()[name][0]


def _taken_last(take: Callable[[], Tensor], once: Any) -> Tensor:
    tensor = take()
    once.cache_clear()
    return tensor


def _bitsandbytes_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what Transformers wants to know of a model with weights of bitsandbytes."""
    weights = [entry.weight for entry in checkpoint.entries.values() if entry.weight is not None]
    first = weights[0]
    layout = (first.layout or {}).get(_NAME, {})
    return {
        "quant_method": _NAME,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": first.spec.quant_type,
        "bnb_4bit_use_double_quant": first.spec.scale_kind == "dynamic8",
        "bnb_4bit_compute_dtype": str(first.dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": layout.get("storage_dtype", "uint8"),
    }
