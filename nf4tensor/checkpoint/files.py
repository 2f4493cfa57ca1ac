"""What a checkpoint holds, read from its headers; bytes are read a slice at a time.

A checkpoint is a safetensors file, or a folder with one or with several and their index. 4-bit
weights are uint8 entries `[*lead, pitch]` whose specs stand in the file's metadata (docs/files.md).
Called by `load.py`, the command line and integrations.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nf4tensor.checkpoint.entries import Entry, Parts, Weight
from nf4tensor.errors import CheckpointError, NF4TensorError, SpecError

VERSION = 1
METADATA_KEY = "nf4tensor"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
Found = TypeVar("Found")
# Find other packages' weights among the entries; integrations add theirs. The second argument is
# whether to decode what no record holds exactly, rather than to refuse it.
ASSEMBLERS: list[Callable[["Checkpoint", bool], Iterator[Entry]]] = []


class Checkpoint:
    """The entries of a checkpoint by name, and the other names of what is stored once.

    Weights of other packages are entries as 4-bit ones of this one are, by the name that they have
    in the model.

    Args:
        path: A safetensors file or a folder.
        as_stored: Leave the entries of other packages' weights as they are.
        requantize: Let such a weight that no record holds exactly be a dense entry.

    Raises:
        CheckpointError: There is none, or what is there is damaged, of another version, or
            contradicts itself; the message has file, tensor and numbers.
        NF4TensorError: A case of another package's weight, such as one that no record holds.
    """

    def __init__(
        self, path: str | Path, *, as_stored: bool = False, requantize: bool = False
    ) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        self.aliases: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        files, placed = _files_of(self.path)
        weights: dict[str, Weight] = {}
        for file in files:
            self._open[file] = _opened(file)
            described, aliases = _metadata(file, self._open[file].metadata() or {})
            _add(weights, described, file)
            _add(self.aliases, aliases, file)
        for entry in self._read_headers(weights):
            if entry.name in self.entries:
                first = self.entries[entry.name].file
                raise CheckpointError(f"{entry.what} is in {first} too: delete one of them")
            self.entries[entry.name] = entry
        if missing := set(weights) - set(self.entries):
            raise CheckpointError(
                f"{self.path} describes weights that it does not hold: {sorted(missing)[:5]}: give "
                "the folder with all files of the checkpoint"
            )
        for name, file in placed.items():
            if name not in self.entries or self.entries[name].file != file:
                raise CheckpointError(
                    f"the index of {self.path} places {name} in {file}: not there"
                )
        for name, stored in self.aliases.items():
            if name in self.entries or stored not in self.entries:
                raise CheckpointError(
                    f"{self.path} names {name} another name of {stored}: "
                    f"{'it is stored itself' if name in self.entries else 'which is not stored'}"
                )

        if not as_stored:
            for assemble in ASSEMBLERS:
                self._replace_parts({entry.name: entry for entry in assemble(self, requantize)})

    def _replace_parts(self, made: dict[str, Entry]) -> None:
        parts = {p.name for entry in made.values() if entry.parts for p in entry.parts.entries}
        self.entries = {
            name: made.get(name, entry)
            for name, entry in self.entries.items()
            if name in made or name not in parts
        }

    def find(self, name: str) -> Entry | None:
        """Return the entry of a name or of what it is another name of."""
        return self.entries.get(self.aliases.get(name, name))

    def rows(self, entry: Entry, key: tuple[slice | int, ...]) -> Tensor:
        """Read a part of an entry, `[...]` in its own dtype, on the CPU.

        Args:
            entry: One of this checkpoint.
            key: Of leading dimensions, or of all; with parts, of rows that follow each other.

        Raises:
            CheckpointError: It cannot be read.
        """
        if entry.parts is not None:
            return _rows_of_parts(self, entry, entry.parts, key)
        try:
            part = self._open[entry.file].get_slice(entry.name)
            return part[key] if entry.shape else self._open[entry.file].get_tensor(entry.name)
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"cannot read {entry.what}: {error}") from error

    def _read_headers(self, weights: dict[str, Weight]) -> Iterator[Entry]:
        for file, opened in self._open.items():
            for name in opened.offset_keys():
                part, weight = opened.get_slice(name), weights.get(name)
                entry = Entry(file, name, tuple(part.get_shape()), part.get_dtype(), weight)
                if weight is not None:
                    _check_weight(entry, weight)
                yield entry


def read_weights(files: Iterable[Path]) -> dict[str, Weight]:
    """Return what the metadata of files says of their 4-bit weights, by name.

    Raises:
        CheckpointError: A file is damaged, of another version, or contradicts another.
    """
    weights: dict[str, Weight] = {}
    for file in files:
        _add(weights, _metadata(file, _opened(file).metadata() or {})[0], file)
    return weights


def read_names(files: Iterable[Path]) -> list[str]:
    """Return the names of all entries of files.

    Raises:
        CheckpointError: A file is damaged.
    """
    return [name for file in files for name in _opened(file).offset_keys()]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.is_file() else "no"
        raise CheckpointError(
            f"cannot read {file} ({size} bytes): {error}: copy or save it again"
        ) from error


def _add(known: dict[str, Found], found: dict[str, Found], file: Path) -> None:
    """Add what one file says; several may say the same, of each other's tensors too."""
    for name, value in found.items():
        if known.setdefault(name, value) != value:
            raise CheckpointError(f"{file} contradicts another file of its checkpoint about {name}")


def _files_of(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files of a checkpoint, and where an index places each tensor."""
    if path.is_file():
        return [path], {}
    if (path / INDEX_NAME).is_file():
        index = read_json(path / INDEX_NAME)
        places = index.get("weight_map")
        is_map = isinstance(places, dict) and all(isinstance(p, str) for p in places.values())
        if not is_map or any(Path(place).name != place for place in places.values()):
            raise CheckpointError(
                f"{path / INDEX_NAME} has no weight_map from names to files of its folder"
            )
        placed = {name: path / place for name, place in places.items()}
        return sorted(set(placed.values())), placed
    if (path / WEIGHTS_NAME).is_file():
        return [path / WEIGHTS_NAME], {}
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(found) == 1:
        return found, {}
    aside = path.with_name(path.name + ".old")
    hint = f"; an interrupted save left {aside}" if aside.exists() else ""
    raise CheckpointError(
        f"{path} is no checkpoint: expected a safetensors file, or a folder with {WEIGHTS_NAME} "
        f"or {INDEX_NAME}{hint}"
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds a dictionary.

    Raises:
        CheckpointError: It does not, or cannot be read.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no dictionary")
    return found


def _metadata(file: Path, given: dict[str, str]) -> tuple[dict[str, Weight], dict[str, str]]:
    """Return the 4-bit weights and the other names that a file's metadata has."""
    if METADATA_KEY not in given:
        return {}, {}
    try:
        found = json.loads(given[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the metadata of {file} is no JSON: {error}") from error
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"{file} is of version {version!r:.100}, this nf4tensor reads {VERSION}: install a "
            "release that knows it"
        )
    weights, aliases = found.pop("weights", None), found.pop("aliases", None)
    if not isinstance(weights, dict) or not isinstance(aliases, dict) or set(found) != {"version"}:
        raise CheckpointError(
            f"the metadata of {file} has the keys {sorted(found)} and not only version, weights "
            "and aliases"
        )
    if not all(isinstance(stored, str) for stored in aliases.values()):
        raise CheckpointError(f"the aliases of {file} are no names")
    read = {}
    for name, weight in weights.items():
        try:
            read[name] = Weight.from_dict(weight)
        except SpecError as error:
            raise CheckpointError(f"{name} in {file}: {error}") from error
    return read, aliases


def _check_weight(entry: Entry, weight: Weight) -> None:
    if entry.dtype != "U8" or not entry.shape or entry.shape[-1] != weight.spec.pitch:
        raise CheckpointError(
            f"{entry.what} is {entry.dtype} of shape {list(entry.shape)}, expected U8 "
            f"[*, {weight.spec.pitch}] for {weight.spec}"
        )


def _rows_of_parts(
    checkpoint: Checkpoint, entry: Entry, parts: Parts, key: tuple[slice | int, ...]
) -> Tensor:
    lead = entry.shape[:-1]
    ranges = [range(size)[part] for size, part in zip(lead, key, strict=False)]
    ranges += [range(size) for size in lead[len(ranges) :]]
    first, stride, count, is_whole = 0, 1, 1, True
    for size, found in zip(reversed(lead), reversed(ranges), strict=True):
        assert is_whole or len(found) == 1, (entry, key)
        is_whole = is_whole and len(found) == size
        first, stride, count = first + found.start * stride, stride * size, count * len(found)
    try:
        rows = parts.rows(checkpoint, first, first + count)
    except NF4TensorError as error:
        raise type(error)(f"{entry.what}: {error}") from error
    return rows.view(*map(len, ranges), entry.shape[-1])
