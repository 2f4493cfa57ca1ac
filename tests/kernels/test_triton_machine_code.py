"""What the Triton kernels become: machine code for each architecture, compiled ahead of time.

The launches are those of the package: a recorder takes them in place of the kernel, then Triton
compiles for processors that are not here. Ceilings lie a little above what was counted; whoever
lowers a count lowers the ceiling.
"""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import triton_backend

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        "TRITON_INTERPRET" in os.environ, reason="Triton interprets: nothing compiles"
    ),
]

ARCHITECTURES = (80, 90, 100, 120)
TYPES = {
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}
ROWS = 4096


# What is decoded: the most instructions a weight, of the whole program, and how wide stores are. A
# lane loads 2 bytes of codes and stores 8 of 16-bit weights, whole sectors a warp all the same; to
# move 16 at a time, weights would have to go through shared memory, 0.8 instructions more.
DEQUANTIZE = {
    "bfloat16": (NF4Spec.for_weight(4096), torch.bfloat16, 6.1, "64"),
    "two rows": (NF4Spec.for_weight(14336), torch.bfloat16, 6.2, "64"),
    "narrow": (NF4Spec.for_weight(576), torch.bfloat16, 6.6, "64"),
    "dynamic8": (NF4Spec(4096, 64, "dynamic8", 256, 2), torch.bfloat16, 6.2, "64"),
    "float32 scales": (NF4Spec.for_weight(4096, 64, None), torch.bfloat16, 6.0, "64"),
    "float16": (NF4Spec.for_weight(4096), torch.float16, 8.1, "64"),
    "float32": (NF4Spec.for_weight(4096), torch.float32, 4.6, "128"),
}


class Launch(NamedTuple):
    """What a launch was given: the kernel, its arguments by name, and options of the compiler."""

    kernel: object
    arguments: dict
    options: dict


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel, self.last = kernel, None

    def __getitem__(self, grid):
        def launch(*values, **named):
            arguments = dict(zip(self.kernel.arg_names, values, strict=False))
            arguments |= {name: named.pop(name) for name in self.kernel.arg_names if name in named}
            self.last = Launch(self.kernel, arguments, named)

        return launch


class Code(NamedTuple):
    """A compiled kernel: in Triton's language of layouts, in PTX, and as instructions."""

    layouts: str
    ptx: str
    instructions: list[str]
    labels: dict[str, int]
    resources: dict[str, int]

    def modifiers(self, opcode: str) -> set[str]:
        """Return the last modifiers of an opcode: {"128"} of LDG.E.128."""
        return {text.split()[0].split(".")[-1] for text in self.instructions if opcode in text}

    def loops(self) -> list[list[str]]:
        """Return the instructions of each loop, from its label to the jump back."""
        bodies = []
        for i, text in enumerate(self.instructions):
            jump = re.match(r"BRA.*`\((\.L_x_\d+)\)", text)
            if jump and self.labels[jump.group(1)] <= i:
                bodies.append(self.instructions[self.labels[jump.group(1)] : i + 1])
        return bodies

    def stored_run_bytes(self, itemsize: int) -> int:
        """Return how many bytes in a row a warp stores at once, by the layout of the store."""
        name = re.search(r"tt\.store .*!tt\.ptr<\w+>, (#\w+)>", self.layouts).group(1)
        layout = re.search(rf"^{name} = .*$", self.layouts, flags=re.MULTILINE).group()
        each, lanes = (
            int(re.search(rf"{field} = \[\d+, (\d+)\]", layout).group(1))
            for field in ("sizePerThread", "threadsPerWarp")
        )
        return each * lanes * itemsize


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def record_of(spec: NF4Spec, shift: int = 0) -> torch.Tensor:
    """Return the record of a real weight, whose bytes are never read."""
    return torch.empty(ROWS * spec.pitch + shift, dtype=torch.uint8)[shift:].view(ROWS, spec.pitch)


@pytest.fixture
def dequantize_launch(monkeypatch):
    """Return a function that gives the launch by which a record is decoded."""
    from nf4tensor.kernels import triton_dequantize

    recorder = Recorder(triton_dequantize._dequantize_kernel)
    monkeypatch.setattr(triton_dequantize, "_dequantize_kernel", recorder)

    def run(spec: NF4Spec, dtype: torch.dtype, shift: int = 0) -> Launch:
        triton_backend.dequantize(record_of(spec, shift), spec, dtype)
        return recorder.last

    return run


@pytest.fixture
def linear_launch(monkeypatch):
    """Return a function that gives the launch by which inputs are multiplied, on a GPU."""
    from nf4tensor.kernels import triton_linear

    recorder = Recorder(triton_linear._linear_kernel)
    monkeypatch.setattr(triton_linear, "_linear_kernel", recorder)

    def run(spec: NF4Spec, dtype: torch.dtype, num_inputs: int) -> Launch:
        inputs, bias = torch.empty(num_inputs, spec.in_features, dtype=dtype), torch.empty(ROWS)
        triton_backend.linear(inputs, record_of(spec), spec, bias.to(dtype))
        # What only the interpreter needs.
        arguments = recorder.last.arguments | {"WIDEN": False}
        return recorder.last._replace(arguments=arguments)

    return run


def compile_for(launch: Launch, target):
    """Compile as Triton does at a launch, but for a processor that is not here."""
    import triton
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(launch.arguments.items()):
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor or name.islower():
            signature[name] = TYPES[value.dtype] if is_tensor else "i32"
            if (value.data_ptr() if is_tensor else value) % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=launch.options)


def machine_code(launch: Launch, architecture: int, folder: Path) -> Code:
    """Compile for an NVIDIA architecture and disassemble."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    compiled = compile_for(launch, GPUTarget("cuda", architecture, 32))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    instructions, labels = [], {}
    for line in output_of(knobs.nvidia.nvdisasm.path, "-c", cubin).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(.*?)\s*;", line):
            instructions.append(found.group(1))
    # Behind the end there is a jump to itself and padding.
    end = max(i for i, text in enumerate(instructions) if text.startswith("EXIT")) + 1
    usage = output_of(knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
    resources = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Code(compiled.asm["ttgir"], compiled.asm["ptx"], instructions[:end], labels, resources)


def output_of(*command: object) -> str:
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def weights_of_a_thread(launch: Launch) -> float:
    """Count the weights that a thread decodes, in one step where there are several."""
    given = launch.arguments
    groups = given["ROWS"] * (given["GROUPS"] if "GROUPS" in given else given["SLICES"])
    return groups * given["GROUP"] / (32 * launch.options["num_warps"])


def assert_clean(code: Code, most_registers: int) -> None:
    """Check that no register is kept in memory, and no product and sum is rounded only once."""
    assert (code.resources["STACK"], code.resources["LOCAL"]) == (0, 0)
    assert not [text for text in code.instructions if text.startswith(("LDL", "STL"))]
    assert code.resources["REG"] <= most_registers
    assert not re.search(r"\b(fma|mad)\.\w*\.?f32", code.ptx)
    assert not [text for text in code.instructions if text.startswith("FFMA")]


def check_dequantize(launch: Launch, architecture: int, case: str, folder: Path) -> None:
    _, dtype, most_instructions, stores = DEQUANTIZE[case]
    code = machine_code(launch, architecture, folder)
    # A processor of 8.6 holds 16 blocks at most: these have 64 registers a thread to spend.
    assert_clean(code, most_registers=64 if architecture == 86 else 48)
    assert len(code.instructions) <= most_instructions * weights_of_a_thread(launch)
    assert code.modifiers("STG") == {stores}
    # Whole lines of 128 bytes, and so whole sectors.
    assert code.stored_run_bytes(dtype.itemsize) % 128 == 0
    # Two bytes of codes are 16 times as many as any others.
    assert code.modifiers("LDG") - {"U8"} == {"E", "U16"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dequantize(dequantize_launch, tmp_path, architecture):
    launch = dequantize_launch(*DEQUANTIZE["bfloat16"][:2])
    check_dequantize(launch, architecture, "bfloat16", tmp_path)


def test_dequantize_for_processors_that_only_triton_has(dequantize_launch, tmp_path):
    launch = dequantize_launch(*DEQUANTIZE["bfloat16"][:2])
    code = machine_code(launch, 75, tmp_path)
    assert_clean(code, most_registers=64)
    assert len(code.instructions) <= 5.9 * weights_of_a_thread(launch)


@pytest.mark.parametrize("case", ["float16", "float32"])
def test_dequantize_to_other_dtypes(dequantize_launch, tmp_path, case):
    check_dequantize(dequantize_launch(*DEQUANTIZE[case][:2]), 90, case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", DEQUANTIZE)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, 86, 89])
def test_every_case_for_every_architecture(dequantize_launch, tmp_path, architecture, case):
    check_dequantize(dequantize_launch(*DEQUANTIZE[case][:2]), architecture, case, tmp_path)


def test_dequantize_where_nothing_is_aligned(dequantize_launch, tmp_path):
    launch = dequantize_launch(NF4Spec.for_weight(4096), torch.bfloat16, shift=1)
    code = machine_code(launch, 90, tmp_path)
    assert_clean(code, most_registers=56)
    assert len(code.instructions) <= 6.7 * weights_of_a_thread(launch)
    assert code.modifiers("STG") == {"64"}

    launch = dequantize_launch(NF4Spec.for_weight(4095), torch.bfloat16)
    code = machine_code(launch, 90, tmp_path)
    assert_clean(code, most_registers=64)
    assert len(code.instructions) <= 9.2 * weights_of_a_thread(launch)
    assert code.modifiers("STG") == {"U16"}


def check_linear(launch: Launch, architecture: int, most_instructions: float, folder: Path) -> None:
    code = machine_code(launch, architecture, folder)
    assert_clean(code, most_registers=144)
    (loop,) = code.loops()
    assert [text for text in loop if text.startswith("HMMA")]
    assert len(loop) <= most_instructions * weights_of_a_thread(launch)


@pytest.mark.parametrize("architecture", [80, 100])
def test_linear(linear_launch, tmp_path, architecture):
    launch = linear_launch(NF4Spec.for_weight(4096), torch.bfloat16, 1)
    check_linear(launch, architecture, 9, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_inputs", [16, 32])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, 86, 89])
def test_linear_for_every_architecture(linear_launch, tmp_path, architecture, num_inputs, dtype):
    launch = linear_launch(NF4Spec.for_weight(4096), dtype, num_inputs)
    most_instructions = {16: 9.3, 32: 10.7}[num_inputs] + 2 * (dtype == torch.float16)
    check_linear(launch, architecture, most_instructions, tmp_path)


@pytest.mark.parametrize("processor", ["gfx942", pytest.param("gfx1100", marks=pytest.mark.slow)])
def test_for_amd(dequantize_launch, linear_launch, processor):
    from triton.backends.compiler import GPUTarget

    spec = NF4Spec.for_weight(4096)
    target = GPUTarget("hip", processor, 64 if processor.startswith("gfx9") else 32)
    for launch in (
        dequantize_launch(spec, torch.bfloat16),
        linear_launch(spec, torch.bfloat16, 1),
    ):
        code = compile_for(launch, target).asm["amdgcn"]
        assert re.search(r"vgpr_spill_count:\s+0\b", code)
        assert re.search(r"private_segment_fixed_size:\s+0\b", code)
        assert not re.search(r"v_(fma|fmac|mad|mac|pk_fma)_f32", code)
