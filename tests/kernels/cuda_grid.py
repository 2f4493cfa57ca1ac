"""Compile and run the programs cuda_grid_<op>.cpp: CUDA kernels on the host, under sanitizers.

Each is csrc/cuda/<op>.cu on the emulator of emulation/cuda_emulator.h, beside the CPU's scalar
kernels, which it compares it with. Its arguments are a stride, of the widths that it tries, and a
seed of the order of threads; it prints `<op>: <number> comparisons`, and ends with 1 at the first
difference. No torch here.
"""

from pathlib import Path

from tests.kernels.native_grid import HERE, ROOT, Toolchain

EMULATOR = Toolchain(
    flags=("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
EMULATION = f"-I{HERE / 'emulation'}"
FLAGS = ("-DNF4TENSOR_EMULATE", "-Wno-unknown-pragmas", EMULATION, "-x", "c++")


def ops() -> list[str]:
    """Return the ops that have a program."""
    return sorted(path.stem.removeprefix("cuda_grid_") for path in HERE.glob("cuda_grid_*.cpp"))


def build(op: str, folder: Path) -> Path:
    """Build the program of an op."""
    sources = (
        ROOT / f"csrc/cuda/{op}.cu",
        HERE / f"cuda_grid_{op}.cpp",
        ROOT / "csrc/cpu/scalar.cpp",
    )
    objects = EMULATOR.compile_all(sources, folder, *FLAGS)
    return EMULATOR.link(objects, folder / f"cuda_grid_{op}")
