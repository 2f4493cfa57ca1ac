"""Safetensors files written a tensor at a time, so that no file has to fit in memory.

The library writes dictionaries of whole tensors; what is written here it reads back. Called by
`save.py` and by what streams one checkpoint into another.
"""

import contextlib
import ctypes
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm.auto import tqdm

from nf4tensor.checkpoint.entries import DTYPES, Weight
from nf4tensor.checkpoint.files import INDEX_NAME, METADATA_KEY, VERSION, WEIGHTS_NAME
from nf4tensor.errors import CheckpointError, DTypeError

_ALIGNMENT = 8
CONFIG_NAME = "config.json"
QUANT_METHOD = "nf4tensor"
OURS = (INDEX_NAME, CONFIG_NAME)


@dataclass(frozen=True)
class WriteOptions:
    """How to write.

    Args:
        max_file_bytes: A file gets no more tensors beyond this many bytes.
        overwrite: Replace the checkpoint that is there; until it is replaced it stays whole.
        progress: Show a bar.
        title: Of the bar.
    """

    max_file_bytes: int = 5 * 10**9
    overwrite: bool = False
    progress: bool = True
    title: str = "save"


@dataclass(frozen=True)
class Plan:
    """A tensor that will be written: its name, shape and dtype, and what it is if 4-bit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Weight | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Job = tuple[Plan, Callable[[], Tensor]]  # what will be written, and how to get it then


def write_all(
    folder: Path,
    jobs: Sequence[Job],
    aliases: Mapping[str, str],
    config: Mapping[str, Any],
    options: WriteOptions,
) -> None:
    """Write a checkpoint: each job's tensor is made, written and dropped before the next.

    Args:
        folder: It appears when all is written.
        jobs: In the order of the files.
        aliases: Other names of what is stored, by name.
        config: Of `config.json`; what the quantized weights are is added.
        options: Of the files and the bar.

    Raises:
        CheckpointError: The folder exists or cannot be written.
    """
    plans = [plan for plan, _ in jobs]
    weights = {plan.name: plan.weight.to_dict() for plan in plans if plan.weight is not None}
    quantization = {"quant_method": QUANT_METHOD, "version": VERSION, "weights": weights}
    with replacing(folder, options.overwrite) as fresh:
        bar = tqdm(
            total=sum(plan.nbytes for plan in plans),
            desc=options.title,
            disable=not options.progress,
            unit="B",
            unit_scale=True,
        )
        with Writer(fresh, plans, aliases, options.max_file_bytes) as writer, bar:
            for plan, make in jobs:
                writer.write(make())
                bar.update(plan.nbytes)
        content = {**config, "quantization_config": quantization} if weights else config
        write_json(fresh / CONFIG_NAME, content)


class Writer:
    """Writes planned tensors, in their order, into as many files as it takes.

    Args:
        folder: Where the files go.
        plans: All tensors.
        aliases: Other names of some, by name.
        max_file_bytes: A file gets no more tensors beyond this.
    """

    def __init__(
        self,
        folder: Path,
        plans: Sequence[Plan],
        aliases: Mapping[str, str],
        max_file_bytes: int,
    ) -> None:
        for plan in plans:
            if plan.dtype not in DTYPES:
                raise DTypeError(f"{plan.name} is {plan.dtype}, which safetensors files lack")
        self._folder, self._aliases = folder, dict(aliases)
        self._parts = _parts(plans, max_file_bytes)
        self._names = [WEIGHTS_NAME]
        if len(self._parts) > 1:
            self._names = [
                f"model-{i + 1:05}-of-{len(self._parts):05}.safetensors"
                for i in range(len(self._parts))
            ]
        self._waiting = [(i, plan) for i, part in enumerate(self._parts) for plan in part][::-1]
        self._file: BinaryIO | None = None
        self._number = -1
        while self._number + 1 < len(self._parts) and not self._parts[self._number + 1]:
            self._next_file()  # of a model without tensors

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, which is as planned."""
        number, plan = self._waiting.pop()
        assert (tuple(tensor.shape), tensor.dtype) == (plan.shape, plan.dtype), (tensor, plan)
        if number != self._number:
            self._next_file()
        assert self._file is not None
        data = tensor.detach().to("cpu").contiguous()
        self._file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Finish the files, and write their index if there are several."""
        if error is not None:
            if self._file is not None:
                self._file.close()
            return
        assert not self._waiting
        self._finish()
        if len(self._parts) > 1:
            index = {
                "metadata": {"total_size": sum(p.nbytes for part in self._parts for p in part)},
                "weight_map": {
                    plan.name: self._names[i] for i, part in enumerate(self._parts) for plan in part
                },
            }
            write_json(self._folder / INDEX_NAME, index)

    def _next_file(self) -> None:
        self._finish()
        self._number += 1
        self._file = (self._folder / self._names[self._number]).open("xb")
        part = self._parts[self._number]
        header = _header(part, self._aliases if self._number == 0 else {})
        self._file.write(struct.pack("<Q", len(header)) + header)

    def _finish(self) -> None:
        if self._file is not None:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())


def _parts(plans: Sequence[Plan], max_file_bytes: int) -> list[list[Plan]]:
    parts: list[list[Plan]] = [[]]
    filled = 0
    for plan in plans:
        if parts[-1] and filled + plan.nbytes > max_file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(plan)
        filled += plan.nbytes
    return parts


def _header(part: Sequence[Plan], aliases: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    weights = {plan.name: plan.weight for plan in part if plan.weight is not None}
    if weights or aliases:
        header["__metadata__"] |= metadata(weights, aliases)
    start = 0
    for plan in part:
        stop = start + plan.nbytes
        header[plan.name] = {
            "dtype": DTYPES[plan.dtype],
            "shape": list(plan.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def metadata(weights: Mapping[str, Weight], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return what a file's `__metadata__` says of 4-bit weights and of other names."""
    described = {
        "version": VERSION,
        "weights": {name: weight.to_dict() for name, weight in weights.items()},
        "aliases": dict(aliases),
    }
    return {METADATA_KEY: json.dumps(described, sort_keys=True)}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a dictionary as JSON, down to the disk."""
    with file.open("x") as opened:
        opened.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


@contextlib.contextmanager
def replacing(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder beside one, which takes its name once all is written.

    What was there before is kept until then, and on any failure; an interruption between the two
    renames leaves it under the name with ".old". Files that are not the checkpoint's stay.

    Raises:
        CheckpointError: It exists and may not be overwritten, or its place cannot be written to.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder} exists: pass overwrite=True, or another path")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give a folder")
    others = [p for p in folder.glob("*") if p.suffix != ".safetensors" and p.name not in OURS]
    if folder.exists() and others and len(others) == len(list(folder.iterdir())):
        raise CheckpointError(f"{folder} holds other things than a checkpoint: give another path")
    fresh = folder.with_name(f"{folder.name}.writing-{os.getpid()}")
    aside = folder.with_name(folder.name + ".old")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        for path in others:  # a tokenizer, a model card
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, fresh / path.name)
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        fresh.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
