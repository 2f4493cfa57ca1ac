"""Compile csrc/cuda twice: to PTX, and to a library that tells which kernels a call launches.

So the kernel, its grid and its arguments are chosen by the code that will do so on a GPU. Kernels
have the same mangled name in both.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nf4tensor.format.spec import NF4Spec
from tests.kernels.ptx.execute import Launch
from tests.kernels.ptx.parse import Module

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
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

    def __init__(self, folder: Path, csrc: Path = CSRC):
        path = folder / "launches.so"
        files = sorted((csrc / "cuda").glob("*.cu"))
        # -O1: the kernels are compiled too, if only for their addresses.
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-DNF4TENSOR_EMULATE"]
        defines = [f"-DNF4TENSOR_{file.stem.upper()}" for file in files]
        includes = [csrc, ROOT / "tests/kernels", ROOT / "tests/kernels/emulation"]
        order = [COMPILER, *flags, *defines, *(f"-I{path}" for path in includes), "-x", "c++"]
        program = Path(__file__).with_suffix(".cpp")
        _call([*order, *map(str, files), str(program), "-o", str(path)])
        self._library = ctypes.CDLL(str(path))

    def dequantize(self, capability: int, call: tuple, record: int, out: int) -> list[Launch]:
        """Return the launches of a call: spec, index of the dtype, number of rows."""
        spec, dtype, num_rows = call
        pointers = (ctypes.c_uint64(record), ctypes.c_uint64(out))
        return self._record("RecordDequantize", capability, spec, dtype, num_rows, *pointers)

    def _record(self, name: str, capability: int, spec: NF4Spec, *arguments) -> list[Launch]:
        function = self._library[name]
        function.restype = ctypes.c_char_p
        geometry = ctypes.byref(_Spec(*spec.op_args))
        lines = function(capability, geometry, *arguments).decode().splitlines()
        return [_read_launch(line) for line in lines]


def _read_launch(line: str) -> Launch:
    kernel, blocks, threads, *arguments = line.split()
    return Launch(kernel, int(blocks), int(threads), tuple(map(bytes.fromhex, arguments)))
