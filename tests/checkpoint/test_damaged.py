"""Damaged files end in an error of ours: no crash, no hang, no memory for made-up sizes."""

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nf4tensor import checkpoint
from nf4tensor.checkpoint.files import read_weights
from nf4tensor.errors import CheckpointError
from nf4tensor.format.spec import NF4Spec
from tests.fsdp.training import make_model

OPTIONS = {"hidden": (6,)}
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT = "blocks.0.up.base.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file that is whole."""
    folder = tmp_path_factory.mktemp("good") / "m"
    checkpoint.save(make_model(**OPTIONS), folder, progress=False)
    return (folder / FILE).read_bytes()


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the bytes behind it."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: dict[str, Any] | str, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Return what changes a file's header."""

    def damage(data: bytes) -> bytes:
        header, body = split(data)
        change(header)
        return joined(header, body)

    return damage


def with_metadata(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Return what changes the description of the 4-bit weights."""

    def change_header(header: dict[str, Any]) -> None:
        described = json.loads(header["__metadata__"]["nf4tensor"])
        change(described)
        header["__metadata__"]["nf4tensor"] = json.dumps(described)

    return with_header(change_header)


def with_weight(**fields: Any) -> Callable[[bytes], bytes]:
    """Return what changes the spec of one weight."""
    return with_metadata(lambda described: described["weights"][WEIGHT].update(fields))


def with_entry(**fields: Any) -> Callable[[bytes], bytes]:
    """Return what changes one tensor's entry in the header."""
    return with_header(lambda header: header[WEIGHT].update(fields))


def rename(header: dict[str, Any]) -> None:
    header["other"] = header.pop(WEIGHT)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(described: dict[str, Any]) -> None:
        del described[key]

    return change


Damages = Iterator[tuple[str, Callable[[bytes], bytes]]]


def damaged_files() -> Damages:
    """Yield ways to damage a file as a whole, by name."""
    for part in (0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999):
        yield f"cut at {part}", lambda data, part=part: data[: int(len(data) * part)]
    for length in (1, 7, 8, 9):
        yield f"cut to {length} bytes", lambda data, length=length: data[:length]
    yield "cut by a byte", lambda data: data[:-1]
    yield "a byte more", lambda data: data + b"\0"
    for length in (0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1):
        yield (
            f"header of {length} bytes",
            lambda data, length=length: struct.pack("<Q", length) + data[8:],
        )
    for place in (8, 9, 12, 20, 40):
        yield (
            f"byte {place} flipped",
            lambda data, place=place: (
                data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
            ),
        )
    yield "no JSON", lambda data: joined("weights", split(data)[1])
    yield "a list", lambda data: joined("[]", split(data)[1])
    yield "deep JSON", lambda data: joined("[" * 100000, split(data)[1])
    yield (
        "duplicate keys",
        lambda data: joined(
            '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            '"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"12",
        ),
    )


def damaged_entries() -> Damages:
    """Yield ways to damage what the header says of a tensor, by name."""
    yield "wrong size", with_entry(shape=[6, 97])
    yield "huge shape", with_entry(shape=[2**40, 2**40])
    yield "negative shape", with_entry(shape=[-6, -96])
    yield "other rows", with_entry(shape=[12, 48])
    yield (
        "one dimension",
        lambda data: with_entry(
            shape=[split(data)[0][WEIGHT]["shape"][0] * split(data)[0][WEIGHT]["shape"][1]]
        )(data),
    )
    yield "other dtype", with_entry(dtype="I8")
    yield "unknown dtype", with_entry(dtype="NF4")
    yield "offsets swapped", with_entry(data_offsets=[576, 0])
    yield "offsets beyond", with_entry(data_offsets=[2**50, 2**50 + 576])
    yield "overlap", with_entry(data_offsets=[1, 577])
    yield "renamed", with_header(rename)


def damaged_metadata() -> Damages:
    """Yield ways to damage what the metadata says of all weights, by name."""
    yield (
        "metadata is no JSON",
        with_header(lambda header: header["__metadata__"].update(nf4tensor="{")),
    )
    yield (
        "metadata is deep",
        with_header(lambda header: header["__metadata__"].update(nf4tensor="[" * 100000)),
    )
    yield (
        "metadata is a list",
        with_header(lambda header: header["__metadata__"].update(nf4tensor="[]")),
    )
    yield "metadata is a number", with_header(lambda header: header["__metadata__"].update(x=1))
    yield "no metadata", with_header(without("__metadata__"))
    for version in (0, 2, "1", None, 1e300, [1]):
        yield f"version {version}", with_metadata(lambda d, v=version: d.update(version=v))
    yield "no version", with_metadata(without("version"))
    yield "unknown key", with_metadata(lambda d: d.update(scales=1))
    yield "no weights", with_metadata(without("weights"))
    yield "weights are a list", with_metadata(lambda d: d.update(weights=[]))
    yield (
        "weight not stored",
        with_metadata(lambda d: d["weights"].update(ghost=d["weights"][WEIGHT])),
    )
    yield "weight is a number", with_metadata(lambda d: d["weights"].update({WEIGHT: 4}))
    yield "alias of nothing", with_metadata(lambda d: d.update(aliases={"a": "ghost"}))
    yield "alias of itself", with_metadata(lambda d: d.update(aliases={WEIGHT: WEIGHT}))
    yield "alias is a number", with_metadata(lambda d: d.update(aliases={"a": 4}))


def damaged_specs() -> Damages:
    """Yield ways to damage what the metadata says of one weight, by name."""
    yield "unknown field", with_weight(zero_point=0)
    for field, values in {
        "in_features": (0, -1, 95, 97, 2**62, 96.0, "96", True),
        "block_size": (0, 48, 32, 8192, None),
        "scale_kind": ("linear8", 1, "float32", "dynamic8"),
        "segment_length": (0, -1, 1, 2**62),
        "num_segments": (0, 2, 2**62),
        "quant_type": ("int4", 0),
        "format_version": (0, 2),
        "dtype": ("float64", "BF16", 16),
        "layout": (1, []),
    }.items():
        for value in values:
            yield f"{field} {value!r}", with_weight(**{field: value})


def with_record(part: slice, value: int) -> Callable[[bytes], bytes]:
    """Return what changes bytes of the second row of a 4-bit weight."""

    def damage(data: bytes) -> bytes:
        header, body = split(data)
        start = header[WEIGHT]["data_offsets"][0] + header[WEIGHT]["shape"][1]
        changed = bytearray(body)
        changed[start + part.start : start + part.stop] = bytes([value]) * (part.stop - part.start)
        return joined(header, bytes(changed))

    return damage


SPEC = NF4Spec.for_weight(96)
SEGMENTS = SPEC.segments_offset_bytes
RECORD_DAMAGES = {
    "byte between scales and segments": with_record(slice(SEGMENTS - 1, SEGMENTS), 1),
    "phase past the segments": with_record(slice(SEGMENTS, SEGMENTS + 1), 9),
    "huge phase": with_record(slice(SEGMENTS, SEGMENTS + 4), 255),
    "phase of 64 bits": with_record(slice(SEGMENTS + 4, SEGMENTS + 5), 1),
    "byte behind the end": with_record(slice(SPEC.end_bytes, SPEC.pitch), 1),
}


@pytest.mark.parametrize("damage", RECORD_DAMAGES)
def test_damaged_record(good: bytes, tmp_path: Path, damage):
    (tmp_path / FILE).write_bytes(RECORD_DAMAGES[damage](good))
    message = rf"{re.escape(WEIGHT)} in .*, at \[0:6\]: 1 of 6 rows"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(make_model(**OPTIONS), tmp_path, progress=False)


DAMAGES = {
    name: damage
    for damages in (damaged_files, damaged_entries, damaged_metadata, damaged_specs)
    for name, damage in damages()
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file(good: bytes, tmp_path: Path, damage):
    data = DAMAGES[damage](good)
    assert data != good
    (tmp_path / FILE).write_bytes(data)
    model = make_model(**OPTIONS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        checkpoint.load(model, tmp_path, progress=False)
    for name, tensor in model.state_dict().items():
        left, right = (getattr(t, "record", t) for t in (tensor, before[name]))
        assert torch.equal(left, right), name


def test_there_are_enough():
    assert len(DAMAGES) >= 60


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "model.safetensors"}}',
        '{"weight_map": {"head.base.bias": "other.safetensors"}}',
        '{"weight_map": {"head.base.bias": ""}}',
    ],
)
def test_damaged_index(good: bytes, tmp_path: Path, index):
    (tmp_path / FILE).write_bytes(good)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"index|other\.safetensors"):
        checkpoint.load(make_model(**OPTIONS), tmp_path, progress=False)


def test_files_that_contradict_each_other(good: bytes, tmp_path: Path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    files[0].write_bytes(good)
    files[1].write_bytes(good)
    assert read_weights(files) == read_weights(files[:1])
    files[1].write_bytes(with_weight(dtype="float16")(good))
    with pytest.raises(CheckpointError, match=f"b.safetensors contradicts .* about {WEIGHT}"):
        read_weights(files)


def test_what_is_no_checkpoint(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "a\nb"):
        with pytest.raises(CheckpointError, match="is no checkpoint: expected"):
            checkpoint.load(make_model(**OPTIONS), path, progress=False)
