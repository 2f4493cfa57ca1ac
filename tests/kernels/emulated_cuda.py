"""Run tests of the ops with those of a CUDA device, on CPU tensors.

    python -m tests.kernels.emulated_cuda LIBRARY PYTEST_ARGUMENTS...

The library is built of the real checks, launchers and kernels, which the emulator in
emulation/cuda_emulator.h runs; it takes the place of the CPU's kernels in this process. For
test_cuda_ops.py.
"""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernels.native_grid import FLAGS, HERE, ROOT, BuildError

COMPILER = os.environ.get("CXX", "c++")
SOURCES = ("register.cpp", "backend.cpp", "dequantize.cu", "quantize.cu", "linear.cu")


def build(folder: Path) -> Path:
    """Compile the library; torch's own is beside it as an empty one, as in CMakeLists.txt."""
    flags = [*FLAGS, "-O1", "-Wno-unknown-pragmas", "-DNF4TENSOR_EMULATE"]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{HERE / 'emulation'}"]

    def compile_one(name: str) -> str:
        to = str(folder / f"{name}.o")
        source = str(ROOT / "csrc/cuda" / name)
        _call([COMPILER, *flags, *includes, "-c", "-x", "c++", source, "-o", to])
        return to

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    torch_cpu, library = str(folder / "libtorch_cpu.so"), str(folder / "emulated_cuda.so")
    _call(
        [COMPILER, "-shared", "-Wl,-soname,libtorch_cpu.so", "-xc++", "/dev/null", "-o", torch_cpu]
    )
    _call([COMPILER, "-shared", *objects, "-Wl,--no-as-needed", torch_cpu, "-o", library])
    return Path(library)


def _call(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")


def main(library: str, *arguments: str) -> int:
    """Register the library's ops and run pytest."""
    os.environ["NF4TENSOR_BACKEND"] = "reference"
    import pytest
    import torch

    from nf4tensor.kernels import native, select

    torch.ops.load_library(library)
    assert ctypes.CDLL(library).nf4tensor_register_cuda() == 0
    choices = [select.Choice(name, "cpu", "cpu", "emulated CUDA") for name in select._REFERENCE]
    select._choices[:] = choices  # tests of compiled kernels run where the table has some
    native.unavailable_because = lambda: "emulated"  # and without instruction sets
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
