"""What nvcc makes of the CUDA kernels for a processor: registers, memory, instructions.

Compiles csrc/cuda/<op>.cu with nvcc, reads what its assembler reports, and lists the instructions
with nvdisasm, of the CUDA toolkit or of Triton's wheel. For test_machine_code.py, and a program of
its own that prints a line for each kernel: `python -m tests.kernels.machine_code OP [ARCH ...]`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.native_grid import ROOT

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
FLAGS = ("-std=c++17", "-O3", f"-I{ROOT / 'csrc'}")
_BYTES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def ops() -> list[str]:
    """Return the ops that have CUDA kernels."""
    return sorted(path.stem for path in (ROOT / "csrc/cuda").glob("*.cu"))


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def find_nvdisasm() -> str | None:
    """Return the path of nvdisasm, or None."""
    triton = importlib.util.find_spec("triton")
    folders = [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=os.pathsep.join(folders))


@dataclass(frozen=True)
class Instruction:
    """One instruction, as nvdisasm writes it, without its predicate."""

    text: str

    @property
    def opcode(self) -> str:
        """Its first word's first part: LDG of LDG.E.128."""
        return self.text.split(maxsplit=1)[0].split(".")[0]

    @property
    def num_bytes(self) -> int:
        """What a load or a store moves for each thread."""
        parts = self.text.split(maxsplit=1)[0].split(".")
        return next((_BYTES[part] for part in parts if part in _BYTES), 4)


@dataclass(frozen=True)
class Kernel:
    """A kernel as compiled for one processor."""

    function: str  # without namespaces and template arguments
    arguments: tuple[int, ...]  # of the template; enumerations and booleans as numbers
    registers: int
    stack_bytes: int
    spilled_bytes: int
    instructions: tuple[Instruction, ...]
    loops: tuple[tuple[int, int], ...]  # of the instructions, those that branch back; or all

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.function}<{', '.join(map(str, self.arguments))}>"

    @property
    def body(self) -> tuple[Instruction, ...]:
        """The main loop, with every side branch inside of it: never fewer than are executed."""
        return self.instructions[slice(*max(self.loops, key=_length))]

    def loop_around(self, start: str) -> tuple[Instruction, ...]:
        """Return the narrowest loop around the first instruction whose text starts so."""
        at = next(at for at, i in enumerate(self.instructions) if i.text.startswith(start))
        around = [loop for loop in self.loops if loop[0] <= at < loop[1]]
        return self.instructions[slice(*min(around, key=_length))]

    def widths(self, opcode: str) -> list[int]:
        """Return the bytes that each load or store of a kind in the main loop moves."""
        return widths(self.body, opcode)

    def touches_local_memory(self) -> bool:
        """Return whether registers did not do."""
        return any(i.opcode in ("LDL", "STL") for i in self.instructions)


def widths(instructions: Sequence[Instruction], opcode: str) -> list[int]:
    """Return the bytes that each load or store of a kind moves."""
    return [i.num_bytes for i in instructions if i.opcode == opcode]


def compile_kernels(op: str, architecture: int, folder: Path) -> list[Kernel]:
    """Compile an op for a processor and return its kernels."""
    cubin = folder / f"{op}_sm_{architecture}.cubin"
    source = ROOT / f"csrc/cuda/{op}.cu"
    arguments = [f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", str(source), "-o"]
    report = _call([find_nvcc() or "nvcc", *FLAGS, *arguments, str(cubin)]).stderr
    listing = _call([find_nvdisasm() or "nvdisasm", "-c", str(cubin)]).stdout
    resources = {
        match["name"]: {key: int(match[key]) for key in ("stack", "stores", "loads", "registers")}
        for match in re.finditer(
            r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
            r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
            r"Used (?P<registers>\d+) registers",
            report,
            flags=re.DOTALL,
        )
    }
    sections = re.split(r"\n\s*//-+ \.text\.", listing)[1:]
    mangled = [section.split(maxsplit=1)[0] for section in sections]
    assert set(mangled) == set(resources), f"{source.name}: nvcc and nvdisasm differ"
    demangled = _call(["c++filt", *mangled]).stdout.splitlines()
    return [
        _kernel(signature, resources[name], section)
        for signature, name, section in zip(demangled, mangled, sections, strict=True)
    ]


def _kernel(signature: str, resources: dict[str, int], section: str) -> Kernel:
    match = re.match(r"(?:void )?(?:\w+::)*(\w+)(?:<(.*?)>)?\(", signature)
    assert match is not None, signature
    texts = re.sub(r"\([\w:]+\)", "", match[2] or "").split(", ")
    numbers = {"true": 1, "false": 0, "": None}
    arguments = [numbers[t] if t in numbers else int(t.rstrip("ul")) for t in texts]
    instructions, loops = _instructions(section)
    return Kernel(
        function=match[1],
        arguments=tuple(a for a in arguments if a is not None),
        registers=resources["registers"],
        stack_bytes=resources["stack"],
        spilled_bytes=resources["stores"] + resources["loads"],
        instructions=tuple(instructions),
        loops=tuple(loops),
    )


def _length(loop: tuple[int, int]) -> int:
    return loop[1] - loop[0]


def _instructions(section: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    for line in section.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(found)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            found.append(Instruction(code[1]))
    loops = []
    for at, instruction in enumerate(found):
        target = re.search(r"BRA.*`\((\.L_\S+)\)", instruction.text)
        # The last instructions of a kernel are a jump to itself.
        if target is not None and labels[target[1]] < at:
            loops.append((labels[target[1]], at + 1))
    return found, loops or [(0, len(found))]


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
    return result


def main(op: str, *architectures: str) -> None:
    """Print what the kernels of an op are for some processors, or for all."""
    with tempfile.TemporaryDirectory() as folder:
        for architecture in map(int, architectures or map(str, ARCHITECTURES)):
            for kernel in compile_kernels(op, architecture, Path(folder)):
                counts = Counter(i.opcode for i in kernel.body).most_common(8)
                print(
                    f"sm_{architecture} {kernel.name}: {kernel.registers} registers,",
                    f"{kernel.spilled_bytes} bytes spilled, {len(kernel.body)} in the loop:",
                    ", ".join(f"{opcode} {count}" for opcode, count in counts),
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
