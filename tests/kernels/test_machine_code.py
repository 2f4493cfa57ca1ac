"""What nvcc makes of the CUDA kernels: no spills, few registers and instructions, wide accesses.

Limits are what keeps a kernel at the speed of memory; each is a little above what is there. That
the code is right is for test_cuda_grid.py.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kernels.machine_code import (
    ARCHITECTURES,
    Kernel,
    compile_kernels,
    find_nvcc,
    find_nvdisasm,
    ops,
    widths,
)

# How many a kernel of 256 threads may have at full or at half occupancy, roughly.
MAX_REGISTERS = {"dequantize": 48, "quantize": 64, "linear": 176}
# The arguments of kernels, as csrc/common and csrc/cuda/kernels.h count them.
DIRECT, PAIR, STAGED = 1, 2, 3
GROUP = 32  # weights that a thread of dequantize decodes at once
# By function, mapping, whether rows are whole: instructions a weight up to sm_90, and since sm_100.
# Where rows may end anywhere, stores of 16 bytes need no more than this either.
DEQUANTIZE_LIMITS = {
    ("Dequantize16", DIRECT, 1): (6.1, 5.8),
    ("Dequantize16", PAIR, 1): (6.8, 6.2),
    ("Dequantize16", STAGED, 1): (7.0, 6.6),
    ("Dequantize16", PAIR, 0): (8.3, 7.1),
    ("Dequantize32", DIRECT, 1): (6.0, 5.6),
    ("Dequantize32", PAIR, 1): (6.6, 6.4),
}
# By tiles of eight inputs and pieces of eight columns of a lane: registers, and instructions a
# weight up to sm_90, and since sm_100. Two blocks have 128 registers a thread, one has twice that.
LINEAR_LIMITS = {
    (1, 8): (128, 4.6, 4.4),
    (2, 8): (128, 4.8, 4.6),
    (4, 4): (128, 6.7, 6.5),
    (8, 4): (176, 7.7, 7.4),
    (1, 2): (128, 8.1, 8.1),
}
# Of rows of whole groups, by dtype and codebook, in the order of csrc: weights that a thread
# encodes at once, and instructions for each of them, with all side branches.
QUANTIZE_LIMITS = {
    (0, 0): (8, 24.2, 23.0),
    (0, 1): (8, 26.0, 26.0),
    (1, 0): (16, 17.5, 17.1),
    (1, 1): (16, 19.5, 19.8),
    (2, 0): (16, 15.9, 15.5),
    (2, 1): (16, 17.9, 18.2),
}

pytestmark = [
    pytest.mark.skipif(find_nvcc() is None, reason="no nvcc (CUDA toolkit 13)"),
    pytest.mark.skipif(
        find_nvdisasm() is None, reason="no nvdisasm (CUDA toolkit, or pip install triton)"
    ),
    pytest.mark.skipif(
        shutil.which("c++filt") is None, reason="no c++filt (Debian: apt-get install binutils)"
    ),
]


# One before and one since 256-bit stores; the others take a minute more.
QUICK = {90, 100}
each_architecture = pytest.mark.parametrize(
    "architecture",
    [
        arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow)
        for arch in ARCHITECTURES
    ],
)


@pytest.fixture(scope="module")
def kernels_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int], list[Kernel]]:
    """The kernels of an op for a processor: an op is compiled for several of them at once."""
    folder = tmp_path_factory.mktemp("machine_code")
    compiled: dict[tuple[str, int], list[Kernel]] = {}

    def of(op: str, architecture: int) -> list[Kernel]:
        if (op, architecture) not in compiled:
            together = QUICK if architecture in QUICK else set(ARCHITECTURES) - QUICK
            with ThreadPoolExecutor(2) as pool:
                found = pool.map(lambda arch: compile_kernels(op, arch, folder), together)
            compiled.update(zip([(op, arch) for arch in together], found, strict=True))
        return compiled[op, architecture]

    return of


@each_architecture
@pytest.mark.parametrize("op", ops())
def test_registers_are_enough(kernels_of, op, architecture):
    for kernel in kernels_of(op, architecture):
        assert kernel.spilled_bytes == 0, kernel.name
        assert kernel.stack_bytes == 0, kernel.name
        assert not kernel.touches_local_memory(), kernel.name
        assert kernel.registers <= MAX_REGISTERS[op], kernel.name


@each_architecture
def test_dequantize_takes_few_instructions(kernels_of, architecture):
    seen = set()
    for kernel in kernels_of("dequantize", architecture):
        kind = (kernel.function, *kernel.arguments[-2:])
        if kind not in DEQUANTIZE_LIMITS:
            continue
        limit = DEQUANTIZE_LIMITS[kind][architecture >= 100]
        assert len(kernel.body) / GROUP <= limit, f"{kernel.name}: {len(kernel.body)} in the loop"
        seen.add(kind)
    assert seen == set(DEQUANTIZE_LIMITS)


@each_architecture
def test_dequantize_loads_and_stores_wide(kernels_of, architecture):
    for kernel in kernels_of("dequantize", architecture):
        mapping, is_whole = kernel.arguments[-2:]
        loads = kernel.widths("LDG")
        assert loads.count(16) == 1, kernel.name  # the codes
        if is_whole:
            width = 32 if mapping == DIRECT and architecture >= 100 else 16
            num_bytes = GROUP * (4 if kernel.function == "Dequantize32" else 2)
            assert kernel.widths("STG") == [width] * (num_bytes // width), kernel.name


@each_architecture
def test_dequantize_never_fuses_a_rounding_away(kernels_of, architecture):
    for kernel in kernels_of("dequantize", architecture):
        opcodes = {instruction.opcode for instruction in kernel.instructions}
        assert not opcodes & {"FFMA", "FFMA2"}, kernel.name


@each_architecture
def test_quantize_takes_few_instructions_and_wide_accesses(kernels_of, architecture):
    seen = set()
    for kernel in kernels_of("quantize", architecture):
        *kind, is_whole = kernel.arguments
        if not is_whole:
            continue
        group, *limits = QUANTIZE_LIMITS[tuple(kind)]
        loop = kernel.loop_around("SHFL.IDX")
        assert len(loop) / group <= limits[architecture >= 100], f"{kernel.name}: {len(loop)}"
        assert widths(loop, "LDG") == ([32] if architecture >= 100 else [16, 16]), kernel.name
        # A float32 scale, and the codes.
        assert widths(loop, "STG") == [4, group // 2], kernel.name
        seen.add(tuple(kind))
    assert seen == set(QUANTIZE_LIMITS)


@each_architecture
def test_linear_takes_few_instructions(kernels_of, architecture):
    seen = set()
    for kernel in kernels_of("linear", architecture):
        num_tiles, num_pieces = kernel.arguments[-2:]
        max_registers, *limits = LINEAR_LIMITS[num_tiles, num_pieces]
        num_weights = 2 * 8 * num_pieces  # of a lane, in two rows
        text = f"{kernel.name}: {kernel.registers} registers, {len(kernel.body)} in the loop"
        assert kernel.registers <= max_registers, text
        assert len(kernel.body) / num_weights <= limits[architecture >= 100], text
        opcodes = {instruction.opcode for instruction in kernel.instructions}
        assert not opcodes & {"FFMA", "FFMA2"}, kernel.name  # scales and bias round twice
        seen.add((num_tiles, num_pieces))
    assert seen == set(LINEAR_LIMITS)


@each_architecture
def test_linear_loads_wide(kernels_of, architecture):
    for kernel in kernels_of("linear", architecture):
        num_tiles, num_pieces = kernel.arguments[-2:]
        if num_pieces != 8:
            continue
        width = 32 if architecture >= 100 else 16
        loads = [num_bytes for num_bytes in kernel.widths("LDG") if num_bytes >= 16]
        # 32 KB of inputs by 256 threads, to shared memory and back, and the codes of two rows.
        assert sorted(loads) == [16] * 8 + [width] * (64 // width), kernel.name
        assert kernel.widths("STS") == [16] * 8, kernel.name
        assert kernel.widths("LDS") == [16] * 8 * num_tiles, kernel.name
