"""Compile and run native_grid.cpp: every kernel of an instruction set against the scalar ones.

For test_native_grid.py, and a program of its own for `make sanitize`: compiles with the flags that
it is given and runs all that this processor has. No torch here.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# What CMakeLists.txt compiles all kernels with.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno")


class BuildError(AssertionError):
    """A compiler failed; the text is what it said."""


def instruction_sets() -> dict[str, list[str]]:
    """Return the flags of each instruction set beside scalar, as CMakeLists.txt has them."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    found = re.findall(r'^ *add_instruction_set\((\w+) "([^"]*)"\)', text, flags=re.MULTILINE)
    assert found, "CMakeLists.txt adds no instruction set"
    return {name: flags.split() for name, flags in found}


def of_this_machine() -> list[str]:
    """Return the instruction sets that this processor has, scalar first."""
    if platform.machine() == "aarch64":
        return ["scalar", "neon"]
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, flags=re.MULTILINE)
    features = set(match.group(1).split()) if match else set()
    needed = {
        name: {flag.removeprefix("-m") for flag in flags}
        for name, flags in instruction_sets().items()
    }
    return ["scalar", *(name for name, flags in needed.items() if flags <= features)]


@dataclass(frozen=True)
class Toolchain:
    """A compiler, what it is given, and what runs its programs."""

    compiler: str = os.environ.get("CXX", "c++")
    flags: tuple[str, ...] = ()
    # Instead of the flags of each instruction set.
    isa_flags: tuple[str, ...] | None = None
    runner: tuple[str, ...] = ()

    def compile_isa(self, isa: str, folder: Path, *flags: str) -> Path:
        """Compile the kernels of one instruction set to an object file."""
        own = self.isa_flags if self.isa_flags is not None else instruction_sets().get(isa, ())
        return self.compile(ROOT / f"csrc/cpu/{isa}.cpp", [isa], folder, *own, *flags)

    def build(self, isas: Sequence[str], folder: Path) -> Path:
        """Build the program with the kernels of some instruction sets; scalar is always there."""
        others = [isa for isa in isas if isa != "scalar"]
        with ThreadPoolExecutor(2) as pool:
            objects = [
                pool.submit(self.compile, HERE / "native_grid.cpp", others, folder, "-O1"),
                *(pool.submit(self.compile_isa, isa, folder) for isa in ("scalar", *others)),
                pool.submit(self.compile, ROOT / "csrc/cpu/kernels.cpp", others, folder),
            ]
        return self.link([future.result() for future in objects], folder / "native_grid")

    def link(self, objects: Sequence[Path], program: Path) -> Path:
        """Make a program of object files."""
        call([self.compiler, *self.flags, *map(str, objects), "-o", str(program)])
        return program

    def compile_all(self, sources: Sequence[Path], folder: Path, *flags: str) -> list[Path]:
        """Compile sources that know of no instruction set, two at a time, to object files."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda source: self.compile(source, (), folder, *flags), sources))

    def run(self, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it with an instruction set and, perhaps, a stride."""
        command = [*self.runner, str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def compile(self, source: Path, isas: Sequence[str], folder: Path, *flags: str) -> Path:
        """Compile a source that knows of some instruction sets to an object file."""
        to = folder / f"{source.stem}.o"
        defines = [f"-DNF4TENSOR_{isa.upper()}" for isa in isas]
        includes = [f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
        order = [*FLAGS, *flags, *self.flags, *defines, *includes]
        call([self.compiler, *order, "-c", str(source), "-o", str(to)])
        return to


# Kernels whose intrinsics are functions, for processors that lack the instructions.
EMULATED = Toolchain(
    flags=("-D__builtin_cpu_supports(feature)=1",),
    isa_flags=(f"-I{HERE / 'emulation'}", "-Wno-psabi"),
)
AARCH64 = Toolchain("aarch64-linux-gnu-g++", flags=("-static",), runner=("qemu-aarch64",))


def call(command: Sequence[str]) -> None:
    """Run a compiler.

    Raises:
        BuildError: It failed.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")


def main(flags: Sequence[str]) -> int:
    """Build with the flags and run every instruction set of this processor."""
    toolchain = Toolchain(flags=tuple(flags))
    isas = of_this_machine()
    with tempfile.TemporaryDirectory() as folder:
        program = toolchain.build(isas, Path(folder))
        for isa in isas:
            result = toolchain.run(program, isa)
            print(result.stdout, result.stderr, sep="", end="", flush=True)
            if result.returncode != 0:
                return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
