"""Integers, bits, comparisons and float arithmetic: instructions that touch registers only."""

import operator
from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.opcodes import Elementwise, Opcode, elementwise
from tests.kernels.ptx.parse import PtxError
from tests.kernels.ptx.registers import DTYPES, canonical
from tests.kernels.ptx.rounding import from_bfloat16, fused_multiply_add, to_bfloat16

FLOATS = ("f32", "f64")
HALVES = ("f16x2", "bf16x2")


def _bits(kind: str) -> int:
    return 8 * DTYPES[kind].itemsize


def _twice(kind: str) -> str:
    return f"{kind[0]}{2 * _bits(kind)}"


def _rounded(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *values: canonical(function(*values))


@elementwise("add", "sub")
def _add(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    function = np.add if opcode.name == "add" else np.subtract
    if kind in FLOATS:
        opcode.take("rn")
        function = _rounded(function)
    return function, [kind, kind], [kind]


@elementwise("mul")
def _mul(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    if kind in FLOATS:
        if not opcode.take("rn"):
            raise PtxError(f"ptxas may fuse {opcode.text} with an addition: ask for .rn")
        return _rounded(np.multiply), [kind, kind], [kind]
    half = opcode.need("lo", "hi", "wide")
    result = _twice(kind) if half == "wide" else kind
    return lambda x, y: _product(x, y, half, kind), [kind, kind], [result]


@elementwise("mad", "fma")
def _mad(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    if opcode.name == "fma":
        opcode.need("rn")
        if kind != "f32":
            opcode.refuse()
        return _rounded(fused_multiply_add), [kind] * 3, [kind]
    half = opcode.need("lo", "hi", "wide")
    result = _twice(kind) if half == "wide" else kind
    return lambda x, y, z: _product(x, y, half, kind) + z, [kind, kind, result], [result]


def _product(x: np.ndarray, y: np.ndarray, half: str, kind: str) -> np.ndarray:
    if half == "lo":
        return x * y
    if _bits(kind) == 64:
        return _high_of_64(x, y, kind)
    wide = x.astype(DTYPES[_twice(kind)]) * y
    return wide if half == "wide" else (wide >> _bits(kind)).astype(DTYPES[kind])


def _high_of_64(x: np.ndarray, y: np.ndarray, kind: str) -> np.ndarray:
    """The high words of products, by way of 32-bit digits."""
    if kind[0] == "s":
        raise PtxError("mul.hi.s64 is not known")
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    low = (x & mask) * (y & mask)
    first = (x >> half) * (y & mask) + (low >> half)
    second = (x & mask) * (y >> half) + (first & mask)
    return (x >> half) * (y >> half) + (first >> half) + (second >> half)


@elementwise("div", "rem")
def _div(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    if kind in FLOATS:
        opcode.need("rn")
        return _rounded(np.divide), [kind, kind], [kind]
    if kind[0] == "s":
        # Towards zero, where numpy rounds down.
        return (np.fmod if opcode.name == "rem" else _divide_signed), [kind, kind], [kind]
    return (np.remainder if opcode.name == "rem" else np.floor_divide), [kind, kind], [kind]


def _divide_signed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x - np.fmod(x, y)) // y


@elementwise("sqrt", "rcp")
def _root(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    if opcode.name == "rcp" and kind == "f32" and opcode.take("approx"):
        return _rounded(approximate_reciprocal(bool(opcode.take("ftz")))), [kind], [kind]
    opcode.need("rn")
    function = np.sqrt if opcode.name == "sqrt" else np.reciprocal
    return _rounded(function), [kind], [kind]


def approximate_reciprocal(flushes: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Return a reciprocal as far off as the manual lets it be: one unit in the last place.

    In which direction depends on the value, so that no kernel can count on one.
    """

    def flush(values: np.ndarray) -> np.ndarray:
        is_small = np.abs(values) < np.finfo(np.float32).tiny
        return np.where(is_small & flushes, np.copysign(np.float32(0), values), values)

    def reciprocal(value: np.ndarray) -> np.ndarray:
        value = flush(value)
        exact = np.reciprocal(value)
        off = np.where(np.isfinite(exact) & (exact != 0), value.view(np.uint32) % 3, 1)
        return flush((exact.view(np.uint32) + off.astype(np.uint32) - 1).view(np.float32))

    return reciprocal


@elementwise("min", "max")
def _extreme(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    is_max = opcode.name == "max"
    if DTYPES[kind].kind in "iu" and kind not in HALVES:
        return (np.maximum if is_max else np.minimum), [kind, kind], [kind]
    keeps_nan = bool(opcode.take("NaN"))

    def extreme(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        integer = f"u{x.itemsize}"
        if keeps_nan:
            values = (np.maximum if is_max else np.minimum)(x, y)
        else:
            values = (np.fmax if is_max else np.fmin)(x, y)
        # +0 is above -0.
        merge = np.bitwise_and if is_max else np.bitwise_or
        zeros = merge(x.view(integer), y.view(integer)).view(x.dtype)
        return canonical(np.where((x == 0) & (y == 0), zeros, values))

    return _by_halves(extreme, kind) if kind in HALVES else extreme, [kind, kind], [kind]


def _by_halves(function: Callable[..., np.ndarray], kind: str) -> Callable[..., np.ndarray]:
    """Return what does to both halves of words what a function does to floats."""
    is_bfloat16 = kind == "bf16x2"

    def halves(word: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(word).view(np.uint16)
        return from_bfloat16(bits) if is_bfloat16 else bits.view(np.float16)

    def apply(*words: np.ndarray) -> np.ndarray:
        result = function(*(halves(word) for word in np.broadcast_arrays(*words)))
        bits = to_bfloat16(result) if is_bfloat16 else result.view(np.uint16)
        return bits.view(np.uint32)

    return apply


@elementwise("abs", "neg")
def _sign(opcode: Opcode) -> Elementwise:
    # numpy changes the sign bit, of a NaN too.
    kind = opcode.type()
    return (np.abs if opcode.name == "abs" else np.negative), [kind], [kind]


@elementwise("copysign")
def _copysign(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    return (lambda sign, value: np.copysign(value, sign)), [kind, kind], [kind]


@elementwise("and", "or", "xor")
def _logic(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[opcode.name]
    return function, [kind, kind], [kind]


@elementwise("not")
def _not(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    return np.invert, [kind], [kind]


@elementwise("shl", "shr")
def _shift(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    width = _bits(kind)
    function = np.left_shift if opcode.name == "shl" else np.right_shift

    def shift(value: np.ndarray, by: np.ndarray) -> np.ndarray:
        # numpy leaves open what a shift by the width or more gives; here it empties the word.
        shifted = function(value, np.minimum(by, width - 1).astype(value.dtype))
        rest = value >> (width - 1) if kind[0] == "s" and opcode.name == "shr" else 0
        return np.where(by >= width, rest, shifted).astype(value.dtype)

    return shift, [kind, "u32"], [kind]


@elementwise("shf")
def _funnel(opcode: Opcode) -> Elementwise:
    direction, mode, kind = opcode.need("l", "r"), opcode.need("wrap", "clamp"), opcode.type()

    def shift(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        both = high.astype(np.uint64) << np.uint64(32) | low
        by = (by % 32 if mode == "wrap" else np.minimum(by, 32)).astype(np.uint64)
        word = both << by >> np.uint64(32) if direction == "l" else both >> by
        return (word & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return shift, [kind, kind, "u32"], [kind]


_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMPARISONS = (*_ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _comparison(name: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if kind not in FLOATS:
        return _ORDERED[name]
    if name in ("num", "nan"):
        is_nan = name == "nan"
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == is_nan
    if name == "ne":
        return lambda x, y: (x < y) | (x > y)
    if name in _ORDERED:
        return _ORDERED[name]
    ordered = _ORDERED[name[:2]]
    return lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)


@elementwise("setp")
def _setp(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    compare = _comparison(opcode.need(*_COMPARISONS), kind)
    combine = opcode.take("and", "or", "xor")
    if not combine:
        return (lambda x, y: _pair(compare(x, y))), [kind, kind], ["pred", "pred"]
    # operator has and_ and or_, but xor.
    merge = getattr(operator, combine if combine == "xor" else f"{combine}_")

    def combined(x: np.ndarray, y: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result = compare(x, y)
        return merge(result, other), merge(~result, other)

    return combined, [kind, kind, "pred"], ["pred", "pred"]


def _pair(result: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return result, ~result


@elementwise("selp")
def _selp(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    return (lambda x, y, choice: np.where(choice, x, y)), [kind, kind, "pred"], [kind]


@elementwise("testp")
def _testp(opcode: Opcode) -> Elementwise:
    kind = opcode.type()
    smallest = np.finfo(DTYPES[kind]).tiny
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= smallest),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < smallest),
    }
    return tests[opcode.need(*tests)], [kind], ["pred"]
