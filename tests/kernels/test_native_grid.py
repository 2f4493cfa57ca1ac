"""The compiled kernels of every instruction set, also of those that this processor lacks.

The program native_grid.cpp compares each with the scalar kernels, bit for bit; test_native.py
compares these with the reference. Equal checksums say that processors agree.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.native_grid import (
    AARCH64,
    EMULATED,
    Toolchain,
    instruction_sets,
    of_this_machine,
)

NATIVE = Toolchain()
X86 = [isa for isa in instruction_sets() if isa != "neon"]
# What the kernels may ask of other libraries.
C_FUNCTIONS = {"memcpy", "memset", "memmove", "nextafterf", "__stack_chk_fail"}

pytestmark = pytest.mark.skipif(
    shutil.which(NATIVE.compiler) is None, reason="no C++ compiler (Debian: apt-get install g++)"
)


def grid(toolchain: Toolchain, program: Path, isa: str) -> str:
    """Run the whole grid and return the number of comparisons and the checksum."""
    result = toolchain.run(program, isa)
    assert result.returncode == 0, result.stderr
    match = re.fullmatch(rf"{isa}: (\d+ comparisons, checksum [0-9a-f]{{16}})\n", result.stdout)
    assert match is not None, result.stdout
    return match.group(1)


def leaks(object_file: Path, nm: str = "nm") -> list[str]:
    """Return the symbols of an object file by which its code could reach other processors.

    The linker keeps one copy of a weak function, whichever object it comes from; the constants of
    codebook.h are data, where any copy will do.
    """
    listing = subprocess.run(
        [nm, "-C", object_file], capture_output=True, text=True, check=True
    ).stdout
    found = []
    for line in listing.splitlines():
        kind, name = line[17:18], line[19:]
        allowed = (
            kind in "trbdnVu"
            or (kind == "U" and (name in C_FUNCTIONS or re.match(r"__gxx|_GLOBAL_OFFSET", name)))
            or (kind in "DR" and re.fullmatch(r"nf4tensor::cpu::k\w+Kernels", name))
        )
        if not allowed or "_GLOBAL__sub_I" in name:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return NATIVE.build(of_this_machine(), tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("isa", of_this_machine())
def test_instruction_sets_of_this_machine(program, isa):
    assert grid(NATIVE, program, isa) == grid(NATIVE, program, "scalar")


def test_an_instruction_set_that_is_not_there_says_so(program):
    result = NATIVE.run(program, "avx1024")
    assert result.returncode == 2
    assert "avx1024: this build or this processor does not have it" in result.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (Debian: apt-get install binutils)")
@pytest.mark.parametrize("isa", of_this_machine())
def test_code_stays_with_its_processors(program, isa):
    assert not leaks(program.with_name(f"{isa}.o"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (Debian: apt-get install binutils)")
@pytest.mark.skipif(of_this_machine()[1:] == ["neon"], reason="this compiler is not for x86-64")
@pytest.mark.parametrize("isa", [isa for isa in X86 if isa not in of_this_machine()])
def test_code_for_other_processors_compiles_and_stays_with_them(tmp_path, isa):
    path = NATIVE.compile_isa(
        isa,
        tmp_path,
        "-Wall",
        "-Wextra",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
        "-Werror",
    )
    assert not leaks(path)


@pytest.mark.slow
def test_avx512_emulated(program, tmp_path):
    """The source of the kernels, on SIMDe's portable intrinsics."""
    header = ("-include", "simde/x86/avx512.h", "-xc++", "/dev/null")
    check = [EMULATED.compiler, "-fsyntax-only", *header]
    if subprocess.run(check, capture_output=True, check=False).returncode != 0:
        pytest.skip("no SIMDe (Debian: apt-get install libsimde-dev)")
    isas = [isa for isa in X86 if isa.startswith("avx512")]
    emulated = EMULATED.build(isas, tmp_path)
    expected = grid(NATIVE, program, "scalar")
    assert [grid(EMULATED, emulated, isa) for isa in isas] == [expected] * len(isas)


@pytest.mark.slow
def test_neon_emulated(program, tmp_path):
    """The instructions of the kernels, by an emulator of the processor."""
    for tool, package in (
        (AARCH64.compiler, "g++-aarch64-linux-gnu"),
        (AARCH64.runner[0], "qemu-user"),
    ):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} (Debian: apt-get install {package})")
    emulated = AARCH64.build(["neon"], tmp_path)
    assert not leaks(tmp_path / "neon.o", AARCH64.compiler.replace("g++", "nm"))
    assert grid(AARCH64, emulated, "neon") == grid(NATIVE, program, "scalar")
