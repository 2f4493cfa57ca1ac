"""Run tests of the ops with those of a CUDA device, on CPU tensors.

    python -m tests.kernels.emulated_cuda LIBRARY PYTEST_ARGUMENTS...

The library is built of the real checks, launchers and kernels, which the emulator in
emulation/cuda_emulator.h runs; it takes the place of the CPU's kernels in this process. For
test_cuda_ops.py.
"""

import ctypes
import os
import sys
from pathlib import Path

from tests.kernels.cuda_grid import FLAGS
from tests.kernels.native_grid import ROOT, Toolchain, call

LIBRARY = Toolchain(flags=("-O1", "-shared"))
SOURCES = ("register.cpp", "backend.cpp", "dequantize.cu", "quantize.cu", "linear.cu")


def build(folder: Path) -> Path:
    """Compile the library; torch's own is beside it as an empty one, as in CMakeLists.txt."""
    torch_cpu = folder / "libtorch_cpu.so"
    named = (f"-Wl,-soname,{torch_cpu.name}", "-xc++", "/dev/null", "-o", str(torch_cpu))
    call([LIBRARY.compiler, "-shared", *named])
    sources = [ROOT / "csrc/cuda" / name for name in SOURCES]
    objects = LIBRARY.compile_all(sources, folder, *FLAGS, '-DNF4TENSOR_CUDA_ARCHITECTURES=""')
    needed = Toolchain(flags=(*LIBRARY.flags, "-Wl,--no-as-needed"))
    return needed.link([*objects, torch_cpu], folder / "emulated_cuda.so")


def main(library: str, *arguments: str) -> int:
    """Register the library's ops and run pytest."""
    os.environ["NF4TENSOR_BACKEND"] = "reference"
    import pytest
    import torch

    from nf4tensor.kernels import native, select

    torch.ops.load_library(library)
    assert ctypes.CDLL(library).nf4tensor_register_cuda() == 0
    choices = [select.Choice(name, "cpu", "cpu", "emulated CUDA") for name in select._REFERENCE]
    # Tests of compiled kernels run where the table has some.
    select._choices.update({(choice.op, choice.device): choice for choice in choices})
    native.unavailable_because = lambda: "emulated"  # and without instruction sets
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
