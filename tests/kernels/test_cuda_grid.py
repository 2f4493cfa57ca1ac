"""The CUDA kernels on the host: bit-equal to the CPU's, in any order of threads.

No GPU and no nvcc: `cuda_grid.py` compiles their source with an emulator of the threads. What nvcc
makes of it is for test_machine_code.py.
"""

import shutil
from pathlib import Path

import pytest

from tests.kernels.cuda_grid import EMULATOR, build, ops

pytestmark = pytest.mark.skipif(
    shutil.which(EMULATOR.compiler) is None, reason="no C++ compiler (Debian: apt-get install g++)"
)


@pytest.fixture(scope="module", params=ops())
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of each op in turn."""
    return build(request.param, tmp_path_factory.mktemp(request.param))


def run(program: Path, stride: int, seed: int) -> None:
    result = EMULATOR.run(program, str(stride), str(seed))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(program.name.removeprefix("cuda_grid_") + ": ")


def test_kernels_give_the_bits_of_the_cpu(program):
    run(program, stride=53, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kernels_give_the_same_bits_in_other_orders(program, seed):
    run(program, stride=15 + seed, seed=seed)


def test_a_stride_that_is_none_says_so(program):
    result = EMULATOR.run(program, "0")
    assert result.returncode == 2
    assert f"usage: {program.name} [STRIDE [SEED]]" in result.stderr
