"""Loads, stores and atomic additions, in every space."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.ptx import memory
from tests.kernels.ptx.opcodes import Bound, Opcode, instruction, vector
from tests.kernels.ptx.parse import PtxError
from tests.kernels.ptx.registers import DTYPES, Reader, Select

if TYPE_CHECKING:
    from tests.kernels.ptx.execute import Execution

_SPACES = ("global", "shared", "shared::cta", "const", "param", "local")
_CACHE_HINTS = (
    *("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "relaxed", "gpu", "cta", "sys", "volatile"),
    *("L1::no_allocate", "L1::evict_first", "L1::evict_last", "L1::evict_normal"),
    *("L1::evict_unchanged", "L2::evict_first", "L2::evict_last", "L2::evict_normal"),
    *("L2::64B", "L2::128B", "L2::256B"),
)


def address_reader(execution: "Execution", operand: str) -> Reader:
    """Return what reads the addresses of a `[register + offset]` operand."""
    found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if found is None:
        raise PtxError(f"{operand} is no address")
    registers, offset = execution.registers, int(found[2] or "0", 0)
    # Addresses of shared memory may be words.
    read = registers.reader(found[1], "u32" if registers.is_word(found[1]) else "u64")

    def addresses(select: Select) -> np.ndarray:
        threads = execution.threads(select)
        return np.broadcast_to(read(select), threads.shape).astype(np.int64) + offset

    return addresses


class SharedAccess:
    """An instruction's accesses to shared memory."""

    def __init__(self, execution: "Execution", opcode: Opcode):
        self._execution = execution
        self._place = (opcode.pc, opcode.text)

    def offsets(
        self, threads: np.ndarray, addresses: np.ndarray, size: int, *, writes: bool
    ) -> np.ndarray:
        """Check and count accesses; return where they go in the bytes of all blocks."""
        execution = self._execution
        offsets = execution.shared.offsets(threads, addresses, size)
        execution.shared.note(threads, offsets, size, execution.time, writes=writes)
        access = execution.access(*self._place, "shared")
        access.add_shared(execution.warps[threads], execution.lanes[threads], addresses, size)
        return offsets


class _Space:
    """The space of a load or store; without a name, that of its generic addresses."""

    def __init__(self, execution: "Execution", opcode: Opcode, name: str):
        self._execution, self._name = execution, name
        self._place = (opcode.pc, opcode.text)
        self._shared = SharedAccess(execution, opcode)
        while opcode.take(*_CACHE_HINTS):
            pass

    def pieces(
        self, select: Select, addresses: np.ndarray, size: int, *, writes: bool
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | slice]]:
        """Check and count accesses of `size` bytes.

        Returns:
            Arrays of bytes, the offsets in each, and which of the threads go there.
        """
        execution, threads = self._execution, self._execution.threads(select)
        name = self._name or self._window(addresses)
        if not self._name:
            addresses = addresses - memory.WINDOWS.get(name, 0)
        if name == "shared":
            offsets = self._shared.offsets(threads, addresses, size, writes=writes)
            return [(execution.shared.content, offsets, slice(None))]
        if name in ("global", "const"):
            return self._device(threads, addresses, size, writes=writes)
        memory.check_alignment(addresses, size)
        if name == "local":
            return [(execution.local, addresses + threads * execution.local_stride, slice(None))]
        return [(execution.parameters, addresses, slice(None))]

    def _device(self, threads: np.ndarray, addresses: np.ndarray, size: int, *, writes: bool):
        execution, pieces = self._execution, []
        for allocation, inside in execution.memory.find(addresses, size):
            if writes and not allocation.writable:
                raise PtxError(f"a store to {allocation.name}, which is read only")
            mine = slice(None) if inside.all() else inside
            access = execution.access(*self._place, allocation.name)
            access.add_global(execution.warps[threads][mine], addresses[mine], size)
            pieces.append((allocation.backing, addresses[mine] - allocation.start, mine))
        return pieces

    @staticmethod
    def _window(addresses: np.ndarray) -> str:
        inside = [name for name, start in memory.WINDOWS.items() if (addresses >= start).any()]
        if len(inside) > 1 or (inside and (addresses < memory.WINDOWS["shared"]).any()):
            raise PtxError("a generic access to several spaces at once is not known")
        return inside[0] if inside else "global"


def _vector(execution: "Execution", opcode: Opcode) -> tuple[str, np.dtype, int, _Space]:
    """Return what a load or store moves: its type in registers and in memory, how many, where.

    numpy has no bfloat16 and tells NaNs apart, so floats are moved as integers.
    """
    kind = opcode.type()
    dtype = DTYPES[kind]
    bits = kind if kind[0] == "s" else f"b{8 * dtype.itemsize}"
    count = int((opcode.take("v2", "v4", "v8") or "v1")[1:])
    space = _Space(execution, opcode, opcode.take(*_SPACES).partition("::")[0])
    return bits, dtype if dtype.kind == "i" else np.dtype(f"u{dtype.itemsize}"), count, space


@instruction("ld", "ldu")
def _ld(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    bits, dtype, count, space = _vector(execution, opcode)
    addresses = address_reader(execution, operands[1])
    writers = [execution.registers.writer(name, bits) for name in vector(operands[0])]
    assert len(writers) == count, opcode.text

    def run(select: Select) -> None:
        where = addresses(select)
        values = np.empty((count, where.size), dtype)
        for array, offsets, mine in space.pieces(
            select, where, count * dtype.itemsize, writes=False
        ):
            values[:, mine] = memory.load(array, offsets, dtype, count)
        for write, value in zip(writers, values, strict=True):
            write(select, value)

    return Bound(run)


@instruction("st")
def _st(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    bits, dtype, count, space = _vector(execution, opcode)
    addresses = address_reader(execution, operands[0])
    readers = [execution.registers.reader(name, bits) for name in vector(operands[1])]
    assert len(readers) == count, opcode.text

    def run(select: Select) -> None:
        where = addresses(select)
        values = [np.broadcast_to(read(select), where.shape) for read in readers]
        for array, offsets, mine in space.pieces(
            select, where, count * dtype.itemsize, writes=True
        ):
            memory.store(array, offsets, [value[mine].astype(dtype) for value in values])

    return Bound(run)


REDUCTIONS: dict[str, Callable] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_ATOMIC: dict[str, Callable] = REDUCTIONS | {"exch": lambda old, new: new}


@instruction("atom", "red")
def _atom(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    """One thread after the other; the hardware's order is its own."""
    kind = opcode.type()
    dtype, operate = DTYPES[kind], _ATOMIC[opcode.need(*_ATOMIC)]
    space = _Space(execution, opcode, opcode.need("global"))
    returns = opcode.name == "atom"
    addresses = address_reader(execution, operands[returns])
    read = execution.registers.reader(operands[1 + returns], kind)
    write = execution.registers.writer(operands[0] if returns else "_", kind)

    def run(select: Select) -> None:
        where = addresses(select)
        values = np.broadcast_to(read(select), where.shape)
        old = np.empty(where.shape, dtype)
        for array, offsets, mine in space.pieces(select, where, dtype.itemsize, writes=True):
            cells = array.view(dtype)
            for i, at in zip(np.arange(where.size)[mine], offsets // dtype.itemsize, strict=True):
                old[i] = cells[at]
                cells[at] = operate(old[i], values[i])
        write(select, old)

    return Bound(run)


@instruction("prefetch", "membar", "fence")
def _nothing(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    """Of no effect where one instruction is over before the next begins."""
    while opcode.take("global", "L1", "L2", "acq_rel", "sc", "cta", "gpu", "sys", "gl"):
        pass
    return Bound(lambda select: None)
