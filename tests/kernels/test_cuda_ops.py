"""The ops as a CUDA device has them, from torch's dispatcher to the kernels, which are emulated.

The tests of the CPU's ops are run again in a process whose CPU has those of emulated_cuda.py:
arguments, layouts, addresses, autograd and opcheck are the same for both.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.kernels import emulated_cuda

pytestmark = pytest.mark.skipif(
    shutil.which(emulated_cuda.LIBRARY.compiler) is None,
    reason="no C++ compiler (Debian: apt-get install g++)",
)

# What is the CPU's own: its library, its threads and its workspace. The emulator has one thread.
CPU_ONLY = (
    "instruction_set",
    "says_so",
    "says_why",
    "another_version",
    "registering",
    "refused_kernels",
    "threads",
    "at_once",
)
CPU_ONLY += ("workspace", "forked", "compiled_graphs")
# torch's float32 product, which takes over here, depends on addresses.
CPU_ONLY += ("test_layouts and product_calls and dtype0",)
FAST = (
    "tests/kernels/test_native.py",
    "tests/kernels/test_native_library.py",
    "tests/kernels/test_product_calls.py",
)
SLOW = (
    "tests/kernels/test_native.py",
    "tests/kernels/test_products.py",
    "tests/kernels/test_ops.py",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated_cuda.build(tmp_path_factory.mktemp("emulated_cuda"))


def run(library, files, but: tuple[str, ...], marks: str) -> None:
    keywords = " and ".join(f"not ({name})" for name in but)
    command = [sys.executable, "-m", "tests.kernels.emulated_cuda", str(library)]
    pytest_arguments = ["-q", "-x", "-p", "no:cacheprovider", "-k", keywords, "-m", marks]
    result = subprocess.run(
        [*command, *pytest_arguments, *files],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=emulated_cuda.ROOT,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout


def test_arguments_layouts_and_bits(library):
    slow_here = ("every_width", "keeps_their_phases", "inside_of_backward", "beside_it")
    run(library, FAST, (*CPU_ONLY, *slow_here), "not slow")


@pytest.mark.slow
def test_everything(library):
    run(library, (*FAST, *SLOW), CPU_ONLY, "not slow")
