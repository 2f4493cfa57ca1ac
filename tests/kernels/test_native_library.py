"""The compiled library: how it loads, and that no argument crashes it.

The ops are called below `ops.py`, past every check of Python's: the kernels check for themselves.
"""

import ctypes
import os
import re
import subprocess
import sys

import pytest
import torch

from nf4tensor.errors import NF4TensorError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import native, select

_backends = {choice.op: choice.backend for choice in select.table() if choice.device == "cpu"}
compiled = pytest.mark.skipif(
    _backends["quantize"] != "cpu",
    reason=f"compiled library not in use: {native.unavailable_because() or 'NF4TENSOR_BACKEND'}",
)


def call(name: str, tensor: torch.Tensor, *arguments, **changes: int):
    spec = {
        "in_features": 32,
        "block_size": 16,
        "scale_kind": 1,
        "segment_length": 2,
        "num_segments": 1,
        "quant_type": 0,
    }
    assert changes.keys() <= spec.keys()
    return getattr(torch.ops.nf4tensor, name)(tensor, *(spec | changes).values(), *arguments)


PITCH = NF4Spec(32, 16, "square8", 2, 1).pitch


@compiled
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 0}, "in_features is 0, expected 1 to"),
        ({"in_features": 2**62}, f"in_features is {2**62}, expected 1 to"),
        ({"block_size": 8}, "block_size is 8, expected 16 to 4096"),
        ({"block_size": 8192}, "block_size is 8192, expected 16 to 4096"),
        ({"block_size": 24}, "block_size is 24, expected a power of two"),
        ({"scale_kind": 3}, "scale_kind is 3, expected 0 to 2"),
        ({"scale_kind": -1}, "scale_kind is -1, expected 0 to 2"),
        ({"quant_type": 2}, "quant_type is 2, expected 0 to 1"),
        ({"segment_length": 0}, "segment_length is 0, expected 1 to"),
        ({"num_segments": -1}, "num_segments is -1, expected 1 to"),
        ({"segment_length": 1}, "2 blocks do not fit in 1 segments of 1 blocks"),
        ({"scale_kind": 0}, "segment_length is 2, expected 0 to 0"),
        ({"segment_length": 2**62, "num_segments": 2**62}, f"segment_length is {2**62}"),
    ],
)
def test_impossible_specs_are_refused(changes, message):
    record = torch.zeros(4, PITCH, dtype=torch.uint8)
    for name, arguments in (
        ("quantize", (torch.zeros(4, 32),)),
        ("quantize_into", (torch.zeros(4, 32), record)),
        ("dequantize", (record, torch.float32)),
        ("dequantize_into", (record, torch.zeros(4, 32))),
    ):
        with pytest.raises(ValueError, match=message):
            call(name, *arguments, **changes)


@compiled
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("quantize", [(4, 31)], "weight has the last size 31, expected 32"),
        ("quantize", [()], "weight has no dimensions, expected a last one of size 32"),
        ("quantize_into", [(4, 32), (4, PITCH - 1)], f"record has the last size {PITCH - 1}"),
        ("quantize_into", [(4, 32), (2, 2, PITCH)], r"record has the leading sizes \[2, 2\], weig"),
        ("dequantize_into", [(4, PITCH), (5, 32)], r"record has the leading sizes \[4\], out has"),
        ("dequantize_into", [(PITCH,), (1, 32)], r"the leading sizes \[\], out has \[1\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, arguments, message):
    tensors = [
        torch.zeros(size, dtype=torch.uint8 if PITCH - 1 in size or PITCH in size else None)
        for size in arguments
    ]
    with pytest.raises(ValueError, match=message):
        call(name, *tensors)


@compiled
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("quantize", [torch.zeros(4, 32, dtype=torch.float64)], "weight has elements of dtype"),
        ("quantize_into", [torch.zeros(4, 32), torch.zeros(4, PITCH)], "expected uint8"),
        ("dequantize", [torch.zeros(4, PITCH), torch.float32], "expected uint8"),
        (
            "dequantize",
            [torch.zeros(4, PITCH, dtype=torch.uint8), torch.float64],
            "expected float32, bfloat16 or float16",
        ),
        (
            "dequantize_into",
            [torch.zeros(4, PITCH, dtype=torch.uint8), torch.zeros(4, 32, dtype=torch.int32)],
            "expected float32, bfloat16 or float16",
        ),
    ],
)
def test_other_dtypes_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(name, *arguments)


@compiled
def test_dynamic8_is_never_made():
    with pytest.raises(ValueError, match=r"never made: write to_nf4\(q.dequantize\(\) \+ delta\)"):
        call("quantize", torch.zeros(4, 32), scale_kind=2)


@compiled
def test_freed_storage_is_refused():
    """FSDP frees the storage of a tensor that it will refill: sizes alone prove nothing."""
    record = torch.zeros(4, PITCH, dtype=torch.uint8)
    record.untyped_storage().resize_(0)
    for name, arguments in (
        ("dequantize", (record, torch.float32)),
        ("quantize_into", (torch.zeros(4, 32), record)),
    ):
        with pytest.raises(ValueError, match=f"record has {4 * PITCH} bytes, its storage only 0"):
            call(name, *arguments)


# The library itself


@pytest.fixture
def reloaded():
    native._load.cache_clear()
    yield
    native._load.cache_clear()


@compiled
def test_registering_twice_changes_nothing():
    native.register("cpu")
    assert native.unavailable_because() is None


@pytest.mark.usefixtures("reloaded")
def test_missing_library_says_so(monkeypatch):
    monkeypatch.setattr(native, "_candidates", list)
    assert native.unavailable_because().startswith("not built: no working C++ compiler")


@pytest.mark.usefixtures("reloaded")
def test_broken_library_says_why(monkeypatch, tmp_path):
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "_candidates", lambda: [broken])
    reason = native.unavailable_because()
    assert reason.startswith(f"failed to load {broken}: ")
    assert "invalid ELF header" in reason or "file too short" in reason


@compiled
@pytest.mark.usefixtures("reloaded")
def test_library_of_another_version_says_what_it_lacks(monkeypatch):
    class Old(ctypes.CDLL):
        def __getattr__(self, name):
            raise AttributeError(f"undefined symbol: {name}")

    monkeypatch.setattr(native.ctypes, "CDLL", Old)
    reason = native.unavailable_because()
    assert reason.endswith("_C.so: undefined symbol: nf4tensor_register_cpu")


def test_refused_kernels_raise(monkeypatch):
    class Refusing:
        def nf4tensor_register_cpu(self) -> int:
            return 1

    monkeypatch.setattr(native, "_load", lambda: native._Library(Refusing(), None))
    with pytest.raises(RuntimeError, match="refused the compiled kernels"):
        native.register("cpu")


@compiled
def test_unknown_instruction_set_is_refused():
    best = native.isa()
    with pytest.raises(NF4TensorError, match=r"instruction set 'avx1024'.*best one here is"):
        native.use_isa("avx1024")
    assert native.isa() == best


@compiled
def test_environment_forces_an_instruction_set():
    code = "from nf4tensor.kernels import native, select, ops; print(native.isa())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"NF4TENSOR_ISA": "scalar"},
    )
    assert result.stdout.strip() == "scalar", result.stderr


@compiled
def test_a_library_with_cuda_kernels_tells_for_which_processors():
    library = native._load().handle
    if not hasattr(library, "nf4tensor_register_cuda"):
        pytest.skip("compiled without nvcc")
    architectures = library.nf4tensor_cuda_architectures().decode()
    assert all(re.fullmatch(r"\d+[af]?(-real|-virtual)?", a) for a in architectures.split(","))


@compiled
def test_memory_that_overlaps_is_refused():
    weight = torch.zeros(4, 32)
    inside = weight.view(torch.uint8).view(-1)[: 4 * PITCH].view(4, PITCH)
    with pytest.raises(ValueError, match="record lies in the memory of weight"):
        call("quantize_into", weight, inside)
    with pytest.raises(ValueError, match="out lies in the memory of record"):
        call("dequantize_into", inside, weight)


@compiled
def test_rows_that_share_memory_are_not_written():
    weight, record = torch.zeros(4, 32), torch.zeros(4, PITCH, dtype=torch.uint8)
    words = "has rows or columns that share memory: give each its own, with .clone()"
    with pytest.raises(ValueError, match=f"record {re.escape(words)}"):
        call("quantize_into", weight, record[:1].expand(4, -1))
    with pytest.raises(ValueError, match=f"out {re.escape(words)}"):
        call("dequantize_into", record, weight[:, :1].expand(-1, 32))
    call("quantize_into", weight[:1], record[:1].expand(1, -1))
    call("dequantize_into", record[:0], weight[:1].expand(0, -1))
