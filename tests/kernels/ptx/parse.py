"""Read the text of a PTX module: its constants and, of each kernel, parameters, variables and code.

Nothing here knows what an instruction does.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = {
    f"{kind}{bits}": bits // 8
    for kind, widths in {"b": (8, 16, 32, 64), "u": (8, 16, 32, 64), "s": (8, 16, 32, 64)}.items()
    for bits in widths
} | {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4}

_STATEMENT = re.compile(
    r"\s*(?:(?P<label>[\w$]+)\s*:|(?P<brace>[{}])|(?P<text>[^;{}]*(?:\{[^}]*\}[^;{}]*)*);)"
)
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_VARIABLE = re.compile(
    r"\.(?P<space>const|global|shared|local)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?P<name>[\w$]+)(?P<array>\[(?P<length>\d*)\])?\s*(?:=\s*(?P<value>.*))?$",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+[^,]*?"
    r"(?P<name>[\w$]+)(?:\[(?P<length>\d+)\])?\s*$"
)


class PtxError(Exception):
    """The text, or what a kernel does, is not what PTX allows or this interpreter knows."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; the predicate is a register or empty."""

    predicate: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Variable:
    """A variable of a module or of a kernel, with its initial bytes."""

    space: str
    name: str
    align: int
    content: bytes


@dataclass
class Frame:
    """Variables of one space, laid out one behind the other."""

    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, align: int, size: int) -> None:
        """Place a variable at the next multiple of its alignment."""
        self.offsets[name] = -(-self.size // align) * align
        self.size = self.offsets[name] + size


@dataclass
class Kernel:
    """An entry: `registers` are names with pred, b16, b32 or b64."""

    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    parameters: Frame = field(default_factory=Frame)
    parameter_sizes: list[int] = field(default_factory=list)
    shared: Frame = field(default_factory=Frame)
    local: Frame = field(default_factory=Frame)

    def mentions(self, name: str) -> bool:
        """Say whether an operand has a name in it."""
        return any(name in operand for what in self.code for operand in what.operands)


class Module:
    """A module: its kernels by name, and its constant and global variables."""

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        self.kernels: dict[str, Kernel] = {}
        outside = []
        end = 0
        for found in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*", text):
            outside.append(text[end : found.start()])
            end = _closing_brace(text, found.end())
            kernel = Kernel(found[1])
            _read_parameters(kernel, found[2])
            _read_body(kernel, text[found.end() + 1 : end])
            self.kernels[kernel.name] = kernel
            end += 1
        outside.append(text[end:])
        variables = [
            _read_variable(statement["text"].strip())
            for part in outside
            for statement in _statements(part)
            if re.match(r"\s*\.(const|global|shared)\b", statement["text"] or "")
        ]
        self.variables = [v for v in variables if v.space != "shared"]
        for variable in (v for v in variables if v.space == "shared"):
            for kernel in self.kernels.values():
                if kernel.mentions(variable.name):
                    kernel.shared.add(variable.name, variable.align, len(variable.content))


def _closing_brace(text: str, opening: int) -> int:
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise PtxError("a brace is never closed")


def _statements(text: str) -> Iterator[re.Match[str]]:
    # Visibility is of no interest here, and stands before what is.
    text = re.sub(r"\.(visible|weak|extern|common)\b", "", text)
    text = re.sub(r"\.(version|target|address_size)[^\n]*", "", text).rstrip()
    position = 0
    while position < len(text):
        found = _STATEMENT.match(text, position)
        if found is None:
            raise PtxError(f"no statement of PTX: {text[position:].strip()[:80]}")
        yield found
        position = found.end()


def _read_parameters(kernel: Kernel, text: str) -> None:
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _PARAMETER.match(part)
        if found is None:
            raise PtxError(f"no parameter of a kernel: {part}")
        element = _size_of(found["type"])
        size = element * int(found["length"] or 1)
        kernel.parameters.add(found["name"], int(found["align"] or element), size)
        kernel.parameter_sizes.append(size)


def _read_body(kernel: Kernel, text: str) -> None:
    for statement in _statements(text):
        body = (statement["text"] or "").strip()
        if statement["label"]:
            kernel.labels[statement["label"]] = len(kernel.code)
        elif body.startswith(".reg"):
            _declare_registers(kernel, body)
        elif body.startswith((".shared", ".local")):
            variable = _read_variable(body)
            frame = kernel.shared if variable.space == "shared" else kernel.local
            frame.add(variable.name, variable.align, len(variable.content))
        elif body and not body.startswith((".pragma", ".loc")):
            kernel.code.append(_read_instruction(body))


def _declare_registers(kernel: Kernel, text: str) -> None:
    kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, flags=re.DOTALL).groups()
    kind = "pred" if kind == "pred" else f"b{8 * _size_of(kind)}"
    for name in (name.strip() for name in names.split(",")):
        family = re.fullmatch(r"(.*)<(\d+)>", name)
        members = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
        for member in members:
            if kernel.registers.setdefault(member, kind) != kind:
                raise PtxError(f"{member} is declared twice, with two types")


def _read_variable(text: str) -> Variable:
    found = _VARIABLE.match(text)
    if found is None:
        raise PtxError(f"no variable that is known: {text[:80]}")
    element = _size_of(found["type"])
    values = re.findall(r"[^,\s{}]+", found["value"] or "")
    length = int(found["length"] or len(values)) if found["array"] else 1
    try:
        content = b"".join(_to_bytes(value, element) for value in values)
    except ValueError as error:
        raise PtxError(f"no numbers: {text[:80]}") from error
    align = int(found["align"] or element)
    return Variable(found["space"], found["name"], align, content.ljust(length * element, b"\0"))


def _size_of(kind: str) -> int:
    if kind not in SIZES:
        raise PtxError(f".{kind} is no type that is known")
    return SIZES[kind]


def _to_bytes(value: str, size: int) -> bytes:
    return (parse_number(value) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _read_instruction(text: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(text)
    if found is None:
        raise PtxError(f"no instruction of PTX: {text}")
    operands = tuple(re.sub(r"\s+", " ", operand) for operand in _OPERAND.findall(found[4]))
    return Instruction(found[2] or "", found[1] == "!", found[3], operands)


def parse_number(text: str) -> int:
    """Return an immediate as an integer, a float's as its bits.

    Raises:
        ValueError: It is not one.
    """
    if text[:2].lower() in ("0f", "0d"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)
