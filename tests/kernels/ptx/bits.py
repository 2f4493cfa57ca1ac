"""Instructions that move bits and bytes inside of words."""

import numpy as np

from tests.kernels.ptx.opcodes import Elementwise, Opcode, elementwise
from tests.kernels.ptx.registers import DTYPES


@elementwise("prmt")
def _prmt(opcode: Opcode) -> Elementwise:
    kind = opcode.type()

    def permute(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = y.astype(np.uint64) << np.uint64(32) | x
        result = np.uint32(0)
        for i in range(4):
            pick = selector >> np.uint32(4 * i) & np.uint32(15)
            byte = (both >> (8 * (pick & 7)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
            sign = (byte >> np.uint32(7)) * np.uint32(255)
            result = result | np.where(pick & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return result

    return permute, [kind] * 3, [kind]


@elementwise("lop3")
def _lop3(opcode: Opcode) -> Elementwise:
    kind = opcode.type()

    def logic(x: np.ndarray, y: np.ndarray, z: np.ndarray, table: np.ndarray) -> np.ndarray:
        result = np.zeros(np.broadcast(x, y, z).shape, DTYPES[kind])
        for row in range(8):
            if int(table) >> row & 1:
                result |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        return result

    return logic, [kind, kind, kind, "u32"], [kind]


def _mask(position: np.ndarray, length: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A word with `length` bits set from `position` on, as many as it has."""
    width = 8 * dtype.itemsize

    def below(count: np.ndarray) -> np.ndarray:
        short = np.minimum(count, width - 1).astype(dtype)
        ones = (np.array(1, dtype) << short) - np.array(1, dtype)
        return np.where(count >= width, ~np.array(0, dtype), ones)

    start = np.minimum(position & 255, width)
    return below(start + (length & 255)) & ~below(start)


@elementwise("bfe")
def _bfe(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    width, unsigned = 8 * DTYPES[kind].itemsize, np.dtype(f"u{DTYPES[kind].itemsize}")

    def extract(value: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        value, position, length = value.view(unsigned), position & 255, length & 255
        start = np.minimum(position, width - 1).astype(unsigned)
        # The bits of the result that come from the word; all others are the sign.
        taken = np.where(position < width, _mask(position, length, unsigned) >> start, 0)
        last = np.minimum(position + length - 1, width - 1).astype(unsigned)
        is_negative = (value >> last & 1).astype(bool) & (length > 0) & (kind[0] == "s")
        bits = value >> start & taken | np.where(is_negative, ~taken, 0)
        return bits.astype(unsigned).view(DTYPES[kind])

    return extract, [kind, "u32", "u32"], [kind]


@elementwise("bfi")
def _bfi(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    width, dtype = 8 * DTYPES[kind].itemsize, DTYPES[kind]

    def insert(
        value: np.ndarray, into: np.ndarray, position: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        mask = _mask(position, length, dtype)
        moved = value << np.minimum(position & 255, width - 1).astype(dtype)
        return (into & ~mask) | (moved & mask)

    return insert, [kind, kind, "u32", "u32"], [kind]


@elementwise("popc", "clz")
def _count(opcode: Opcode) -> Elementwise:
    kind = opcode.type()

    def count(value: np.ndarray) -> np.ndarray:
        places = np.arange(8 * value.itemsize, dtype=value.dtype)
        ones = value[..., None] >> places & np.array(1, value.dtype)
        if opcode.name == "popc":
            return ones.sum(-1).astype(np.uint32)
        empty = np.array(8 * value.itemsize)
        return np.where(value == 0, empty, ones[..., ::-1].argmax(-1)).astype(np.uint32)

    return count, [kind], ["u32"]


@elementwise("brev")
def _brev(opcode: Opcode) -> Elementwise:
    kind = opcode.type()

    def reverse(value: np.ndarray) -> np.ndarray:
        result = np.zeros_like(value)
        width = 8 * value.itemsize
        for i in range(width):
            result |= (value >> i & 1) << (width - 1 - i)
        return result

    return reverse, [kind], [kind]


@elementwise("dp4a")
def _dp4a(opcode: Opcode) -> Elementwise:
    first, second = opcode.type(), opcode.type()
    total = "s32" if "s32" in (first, second) else "u32"

    def dot(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        def byte(word: np.ndarray, i: int) -> np.ndarray:
            # A word of its type: what is shifted in from above is the sign, if there is one.
            return word << np.array(24 - 8 * i, word.dtype) >> np.array(24, word.dtype)

        terms = (byte(x, i).astype(np.int64) * byte(y, i) for i in range(4))
        return (z + sum(terms)).astype(DTYPES[total])

    return dot, [second, first, total], [total]
