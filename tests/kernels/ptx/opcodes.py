"""How an instruction becomes something to run: its modifiers one by one, and the table of them all.

The modules of instructions fill the table; a modifier or name that none of them takes is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tests.kernels.ptx.parse import Instruction, PtxError
from tests.kernels.ptx.registers import DTYPES, Reader, Select

if TYPE_CHECKING:
    from tests.kernels.ptx.execute import Execution


class Opcode:
    """A name, its place in the code, and the modifiers that nobody has taken yet."""

    def __init__(self, text: str, pc: int = 0):
        self.text, self.pc = text, pc
        self.name, *self._modifiers = text.split(".")

    def take(self, *choices: str) -> str:
        """Remove and return the modifier that is one of the choices, "" if none is."""
        for modifier in self._modifiers:
            if modifier in choices:
                self._modifiers.remove(modifier)
                return modifier
        return ""

    def need(self, *choices: str) -> str:
        """Remove and return the modifier that must be one of the choices."""
        return self.take(*choices) or self.refuse()

    def type(self) -> str:
        """Remove and return the last modifier, a type."""
        if not self._modifiers or self._modifiers[-1] not in DTYPES:
            self.refuse()
        return self._modifiers.pop()

    def finish(self) -> None:
        """Refuse what is left."""
        if self._modifiers:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Say that it is not known."""
        raise PtxError(f"{self.text} is not an instruction that this interpreter knows")


@dataclass(frozen=True)
class Bound:
    """An instruction with its operands found: `run` executes it for some threads.

    One with a scope waits until all threads of the block have come, or those of the warp in `mask`.
    """

    run: Callable[[Select], None]
    scope: str = ""
    mask: Reader | None = None


Builder = Callable[["Execution", Opcode, Sequence[str]], Bound]
# Of an elementwise instruction: the function, the types of its sources and of its results.
Elementwise = tuple[Callable[..., object], Sequence[str], Sequence[str]]
_TABLE: dict[str, Builder] = {}


def instruction(*names: str) -> Callable[[Builder], Builder]:
    """Enter what binds instructions of these names."""

    def enter(builder: Builder) -> Builder:
        _TABLE.update(dict.fromkeys(names, builder))
        return builder

    return enter


def elementwise(*names: str) -> Callable[[Callable[[Opcode], Elementwise]], None]:
    """Enter instructions in which every thread has only to do with its own registers."""

    def enter(describe: Callable[[Opcode], Elementwise]) -> None:
        def build(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
            function, sources, results = describe(opcode)
            names = operands[0].split("|") if len(results) > 1 else operands[:1]
            writers = [
                execution.registers.writer(name, kind)
                for name, kind in zip(names, results, strict=False)
            ]
            readers = [
                execution.registers.reader(operand, kind)
                for operand, kind in zip(operands[1:], sources, strict=True)
            ]

            def run(select: Select) -> None:
                values = function(*(read(select) for read in readers))
                for write, value in zip(
                    writers, values if len(results) > 1 else (values,), strict=False
                ):
                    write(select, value)

            return Bound(run)

        instruction(*names)(build)

    return enter


def bind(execution: "Execution", what: Instruction, pc: int) -> Bound:
    """Return the instruction ready to run.

    Raises:
        PtxError: It is not one that is known.
    """
    opcode = Opcode(what.opcode, pc)
    if opcode.name not in _TABLE:
        opcode.refuse()
    try:
        bound = _TABLE[opcode.name](execution, opcode, what.operands)
    except (PtxError, ValueError) as error:
        raise PtxError(f"{what}: {error}") from error
    opcode.finish()
    return bound


def vector(operand: str) -> list[str]:
    """Return the registers of a `{...}` operand, or the one register."""
    return [part.strip() for part in operand.strip("{} ").split(",")]
