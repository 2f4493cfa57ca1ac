"""Compile csrc/cuda twice: to PTX, and to a library that tells which kernels a call launches.

So the kernel, its grid and its arguments are chosen by the code that will do so on a GPU. Kernels
have the same mangled name in both.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nf4tensor.format.spec import NF4Spec
from tests.kernels import cuda_grid, machine_code
from tests.kernels.native_grid import ROOT, Toolchain
from tests.kernels.ptx.execute import Launch
from tests.kernels.ptx.parse import Module

# Kernels are compiled too, if only for their addresses.
LIBRARY = Toolchain(flags=("-O0", "-shared"))

needs_nvcc = pytest.mark.skipif(
    machine_code.find_nvcc() is None, reason="no nvcc (CUDA toolkit 13)"
)
needs_compiler = pytest.mark.skipif(
    shutil.which(LIBRARY.compiler) is None, reason="no C++ compiler (Debian: apt-get install g++)"
)


def compile_ptx(source: Path, folder: Path, compute_capability: int) -> Module:
    """Compile a .cu file with nvcc and read the PTX."""
    to = folder / f"{source.stem}_{compute_capability}.ptx"
    command = [machine_code.find_nvcc() or "nvcc", *machine_code.FLAGS]
    command += [f"-arch=sm_{compute_capability}", "-ptx", str(source), "-o", str(to)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
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

    def __init__(self, folder: Path):
        kernels = [ROOT / f"csrc/cuda/{op}.cu" for op in machine_code.ops()]
        sources = (*kernels, Path(__file__).with_suffix(".cpp"))
        objects = LIBRARY.compile_all(sources, folder, *cuda_grid.FLAGS)
        path = LIBRARY.link(objects, folder / "launches.so")
        self._library = ctypes.CDLL(str(path))

    @contextmanager
    def configured(
        self, num_processors: int = 132, mapping: int = 0, max_blocks: int = 0
    ) -> Iterator[None]:
        """Choose, for a while, the size of the device and a tuning of dequantize (kernels.h)."""
        configure = self._library["Configure"]
        configure(num_processors, mapping, ctypes.c_int64(max_blocks))
        yield
        configure(132, 0, ctypes.c_int64(0))

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
