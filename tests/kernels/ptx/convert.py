"""Conversions between types, and moves between registers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.ptx.memory import WINDOWS
from tests.kernels.ptx.opcodes import Bound, Elementwise, Opcode, elementwise, instruction, vector
from tests.kernels.ptx.registers import DTYPES, Select, canonical
from tests.kernels.ptx.rounding import from_bfloat16, to_bfloat16

if TYPE_CHECKING:
    from tests.kernels.ptx.execute import Execution

_FLOATS = ("f16", "bf16", "f32", "f64")
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}


@elementwise("cvt")
def _cvt(opcode: Opcode) -> Elementwise:
    source, result = opcode.type(), opcode.type()
    if result in _HALVES:
        if source != "f32":
            opcode.refuse()
        opcode.need("rn")
        round_half = _to_float(_HALVES[result])
        return (lambda high, low: _pack(round_half(high), round_half(low))), ["f32"] * 2, [result]
    return _converter(opcode, source, result), [source], [result]


def _converter(opcode: Opcode, source: str, result: str) -> Callable[[np.ndarray], np.ndarray]:
    if source in _FLOATS and result not in _FLOATS:
        return _to_integer(_TO_INTEGRAL[opcode.need(*_TO_INTEGRAL)], source, result)
    if result not in _FLOATS:
        return lambda value: value.astype(DTYPES[result])
    if source in _FLOATS and (rounding := opcode.take(*_TO_INTEGRAL)):
        if source != result or source == "bf16":
            opcode.refuse()
        return lambda value: canonical(_TO_INTEGRAL[rounding](value))
    widens = source in _FLOATS and DTYPES[source].itemsize < DTYPES[result].itemsize
    if not widens:
        opcode.need("rn")
    if "bf16" in (source, result) and "f32" not in (source, result):
        opcode.refuse()
    if source == "bf16":
        return lambda value: canonical(from_bfloat16(value))
    return _to_float(result)


def _to_float(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    if kind == "bf16":
        return to_bfloat16
    return lambda value: canonical(value.astype(DTYPES[kind]))


def _to_integer(
    round_value: Callable[[np.ndarray], np.ndarray], source: str, result: str
) -> Callable[[np.ndarray], np.ndarray]:
    """Clamps to the range of the integer; NaN is 0, or the top bit where 64 bits take part."""
    dtype = DTYPES[result]
    limits = np.iinfo(dtype)
    has_64_bits = source == "f64" or dtype.itemsize == 8
    of_nan = np.array(1 << 8 * dtype.itemsize - 1 if has_64_bits else 0, f"u{dtype.itemsize}")

    def convert(value: np.ndarray) -> np.ndarray:
        value = from_bfloat16(value) if source == "bf16" else value
        value = round_value(value.astype(np.float64))
        inside = (value > float(limits.min)) & (value < float(limits.max))
        exact = np.where(inside, value, 0.0).astype(dtype)
        clamped = np.where(value > 0, dtype.type(limits.max), dtype.type(limits.min))
        return np.where(np.isnan(value), of_nan.view(dtype), np.where(inside, exact, clamped))

    return convert


def _pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    high, low = (half.view(np.uint16).astype(np.uint32) for half in (high, low))
    return high << np.uint32(16) | low


@instruction("mov")
def _mov(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    kind = opcode.type()
    registers, (target, source) = execution.registers, operands
    if target.startswith("{") or source.startswith("{"):
        return _mov_parts(execution, kind, target, source)
    read, write = registers.reader(source, kind), registers.writer(target, kind)
    return Bound(lambda select: write(select, read(select)))


def _mov_parts(execution: "Execution", kind: str, target: str, source: str) -> Bound:
    """Take a word apart, or put it together, the low part first."""
    registers = execution.registers
    names = vector(target if target.startswith("{") else source)
    bits = 8 * DTYPES[kind].itemsize // len(names)
    part, word = f"b{bits}", f"b{8 * DTYPES[kind].itemsize}"
    dtype = DTYPES[word]
    if target.startswith("{"):
        read = registers.reader(source, word)
        writers = [registers.writer(name, part) for name in names]

        def split(select: Select) -> None:
            value = read(select)
            for i, write in enumerate(writers):
                write(select, (value >> (bits * i)).astype(DTYPES[part]))

        return Bound(split)
    write = registers.writer(target, word)
    readers = [registers.reader(name, part) for name in names]

    def join(select: Select) -> None:
        parts = (read(select).astype(dtype) << (bits * i) for i, read in enumerate(readers))
        write(select, sum(parts, start=np.zeros((), dtype)))

    return Bound(join)


@elementwise("cvta")
def _cvta(opcode: Opcode) -> Elementwise:
    """Generic addresses: those of global and constant variables are the same, others in windows."""
    kind = opcode.type()
    to_space = bool(opcode.take("to"))
    space = opcode.need("global", "const", "param", *WINDOWS)
    window = np.uint64(WINDOWS.get(space, 0))
    function = np.subtract if to_space else np.add
    return (lambda address: function(address, window)), [kind], [kind]
