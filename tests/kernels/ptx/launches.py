"""Compile csrc/cuda twice: to PTX, and to a library that tells which kernels a call launches.

So the kernel, its grid and its arguments are chosen by the code that will do so on a GPU. Kernels
have the same mangled name in both.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nf4tensor.format.spec import NF4Spec
from tests.kernels.ptx.execute import Launch
from tests.kernels.ptx.parse import Module

ROOT = Path(__file__).parents[3]
NVCC = shutil.which("nvcc")
COMPILER = os.environ.get("CXX", "c++")

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc (the CUDA toolkit's compiler)")
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="no C++ compiler (Debian: apt-get install g++)"
)


def _call(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"


def compile_ptx(source: Path, folder: Path, compute_capability: int) -> Module:
    """Compile a .cu file with nvcc and read the PTX."""
    to = folder / f"{source.stem}_{compute_capability}.ptx"
    flags = ["-std=c++17", "-O3", f"-arch=sm_{compute_capability}", f"-I{source.parents[1]}"]
    _call([str(NVCC), *flags, "-ptx", str(source), "-o", str(to)])
    return Module(to.read_text(encoding="utf-8"))


class _Spec(ctypes.Structure):
    """RecordSpec of csrc/common/record.h."""

    _fields_ = (
        ("in_features", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale_kind", ctypes.c_int32),
        ("segment_length", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("quant_type", ctypes.c_int32),
    )


class Recorder:
    """The launch functions, in a library that records what they launch."""

    def __init__(self, folder: Path, root: Path = ROOT):
        path = folder / "launches.so"
        files = sorted((root / "csrc/cuda").glob("*.cu"))
        # -O1: the kernels are compiled too, if only for their addresses.
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-DNF4TENSOR_EMULATE"]
        defines = [f"-DNF4TENSOR_{file.stem.upper()}" for file in files]
        includes = [root / "csrc", root / "tests/kernels/emulation"]
        order = [COMPILER, *flags, *defines, *(f"-I{path}" for path in includes), "-x", "c++"]
        program = Path(__file__).with_suffix(".cpp")
        _call([*order, *map(str, files), str(program), "-o", str(path)])
        self._library = ctypes.CDLL(str(path))

    @contextmanager
    def tuned_dequantize(self, mapping: int, max_blocks: int) -> Iterator[None]:
        """Choose a mapping of kernels.h and a largest grid for a while; 0 is the default."""
        tune = self._library["TuneDequantize"]
        tune(mapping, ctypes.c_int64(max_blocks))
        yield
        tune(0, ctypes.c_int64(0))

    def record(self, function: str, capability: int, spec: NF4Spec, *arguments) -> list[Launch]:
        """Return what a function of launches.cpp launches on a device of some capability.

        Args:
            function: RecordDequantize, RecordQuantize or RecordLinear.
            capability: 90 for 9.0.
            spec: Of the record.
            arguments: Its others; whatever is 64 bits wide as a ctypes object.
        """
        call = self._library[function]
        call.restype = ctypes.c_char_p
        lines = call(capability, ctypes.byref(_Spec(*spec.op_args)), *arguments)
        return [_read_launch(line) for line in lines.decode().splitlines()]


def _read_launch(line: str) -> Launch:
    kernel, blocks, threads, *arguments = line.split()
    return Launch(kernel, int(blocks), int(threads), tuple(map(bytes.fromhex, arguments)))
