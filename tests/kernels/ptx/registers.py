"""The registers of all threads, and how an operand is read or written as some PTX type.

A register is a row of an array with a column a thread. Types are views of rows, so integers wrap
and floats round as numpy's, which are those of IEEE 754.
"""

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.parse import Kernel, PtxError, parse_number

# All threads, or the indices of some.
Select = slice | np.ndarray
Reader = Callable[[Select], np.ndarray]
Writer = Callable[[Select, np.ndarray], None]

# How numpy holds each type; bfloat16 and packed types are bits.
DTYPES = {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
} | {
    f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
    for kind in "bus"
    for size in (1, 2, 4, 8)
}
_NAN_BITS = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}


def canonical(values: np.ndarray) -> np.ndarray:
    """Return floats with the one NaN that the processors make of every operation."""
    is_nan = np.isnan(values)
    if not is_nan.any():
        return values
    nan = np.array(_NAN_BITS[values.itemsize], f"u{values.itemsize}").view(values.dtype)
    return np.where(is_nan, nan, values)


class Registers:
    """Register files by width, special registers, and the addresses of variables."""

    def __init__(self, kernel: Kernel, special: dict[str, np.ndarray], symbols: dict[str, int]):
        self._special, self._symbols = special, symbols
        self._place: dict[str, tuple[str, int]] = {}
        counts = dict.fromkeys(("pred", "b16", "b32", "b64"), 0)
        for name, kind in kernel.registers.items():
            self._place[name] = (kind, counts[kind])
            counts[kind] += 1
        num_threads = special["%laneid"].size
        self._files = {
            kind: np.zeros((count, num_threads), DTYPES[kind]) for kind, count in counts.items()
        }

    def row(self, name: str) -> np.ndarray:
        """Return all threads' values of a register, as its own bits."""
        if name not in self._place:
            raise PtxError(f"{name} is no register")
        kind, index = self._place[name]
        return self._files[kind][index]

    def is_word(self, operand: str) -> bool:
        """Say whether an operand is a 32-bit register."""
        return self._place.get(operand, ("", 0))[0] == "b32"

    def reader(self, operand: str, kind: str) -> Reader:
        """Return what reads an operand as a type; of a wider register it is the low bits."""
        dtype = DTYPES[kind]
        if operand.startswith("!"):
            inverted = self.reader(operand[1:], kind)
            return lambda select: ~inverted(select)
        if operand in self._place or operand in self._special:
            row = self._special[operand] if operand in self._special else self.row(operand)
            if row.itemsize < dtype.itemsize or (kind == "pred") != (row.dtype == bool):
                raise PtxError(f"{operand} is no {kind}")
            if row.itemsize == dtype.itemsize:
                row = row.view(dtype)
                return lambda select: row[select]
            narrow = np.dtype(f"u{dtype.itemsize}")
            return lambda select: row[select].astype(narrow).view(dtype)
        value = self._constant(operand, dtype)
        return lambda select: value

    def writer(self, operand: str, kind: str) -> Writer:
        """Return what writes an operand; a wider register is extended, with the sign if signed."""
        if operand == "_":
            return lambda select, value: None
        row, dtype = self.row(operand), DTYPES[kind]
        if row.itemsize < dtype.itemsize or (kind == "pred") != (row.dtype == bool):
            raise PtxError(f"{operand} is no {kind}")
        if row.itemsize == dtype.itemsize:
            row = row.view(dtype)
        elif dtype.kind == "f":
            raise PtxError(f"{operand} is wider than its {kind}")

        def write(select: Select, value: np.ndarray) -> None:
            row[select] = value

        return write

    def _constant(self, operand: str, dtype: np.dtype) -> np.ndarray:
        bits = 8 * dtype.itemsize
        name, _, offset = operand.partition("+")
        if name in self._symbols:
            value = self._symbols[name] + int(offset or 0)
        else:
            try:
                value = parse_number(operand)
            except ValueError as error:
                raise PtxError(f"{operand} is no operand that is known") from error
        return np.array(value & (1 << bits) - 1, f"u{dtype.itemsize}").view(dtype)[()]
