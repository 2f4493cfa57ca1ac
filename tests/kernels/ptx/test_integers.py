"""Integers, bits and comparisons of them, against Python's integers."""

import random

import numpy as np
import pytest

from tests.kernels.ptx.registers import DTYPES
from tests.kernels.ptx.snippets import ORDERED, apply, bits_of, compare, integers, run, signed


def toward_zero(x: int, y: int) -> int:
    return (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)


def extract(kind: str, value: int, position: int, length: int) -> int:
    """bfe, as the manual has it."""
    last = bits_of(kind) - 1
    position, length = position & 255, length & 255
    sign = value >> min(position + length - 1, last) & 1 if kind[0] == "s" and length else 0
    bits = [
        value >> position + i & 1 if i < length and position + i <= last else sign
        for i in range(last + 1)
    ]
    return sum(bit << i for i, bit in enumerate(bits))


def insert(kind: str, value: int, into: int, position: int, length: int) -> int:
    """bfi, as the manual has it."""
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i < bits_of(kind):
            place = 1 << position + i
            into = into & ~place | (place if value >> i & 1 else 0)
    return into


def permute(x: int, y: int, selector: int) -> int:
    both = (y << 32 | x).to_bytes(8, "little")
    result = []
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = both[pick & 7]
        result.append((255 if byte & 128 else 0) if pick & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def dot(kind: str, x: int, y: int, z: int) -> int:
    def bytes_of(word: int) -> list[int]:
        return [signed(word >> 8 * i, f"{kind[0]}8") for i in range(4)]

    return z + sum(a * b for a, b in zip(bytes_of(x), bytes_of(y), strict=True))


# Opcode, types of sources and result, the function on integers, limits of sources.
INTEGER_CASES = [
    ("add.s32", "s32 s32", "s32", lambda x, y: x + y),
    ("add.s64", "s64 s64", "s64", lambda x, y: x + y),
    ("sub.s16", "s16 s16", "s16", lambda x, y: x - y),
    ("mul.lo.s32", "s32 s32", "s32", lambda x, y: x * y),
    ("mul.lo.u64", "u64 u64", "u64", lambda x, y: x * y),
    ("mul.hi.u32", "u32 u32", "u32", lambda x, y: x * y >> 32),
    ("mul.hi.s32", "s32 s32", "s32", lambda x, y: x * y >> 32),
    ("mul.hi.u64", "u64 u64", "u64", lambda x, y: x * y >> 64),
    ("mul.wide.u32", "u32 u32", "u64", lambda x, y: x * y),
    ("mul.wide.s32", "s32 s32", "s64", lambda x, y: x * y),
    ("mul.wide.u16", "u16 u16", "u32", lambda x, y: x * y),
    ("mad.lo.s32", "s32 s32 s32", "s32", lambda x, y, z: x * y + z),
    ("mad.hi.u32", "u32 u32 u32", "u32", lambda x, y, z: (x * y >> 32) + z),
    ("mad.wide.u32", "u32 u32 u64", "u64", lambda x, y, z: x * y + z),
    ("min.s32", "s32 s32", "s32", min),
    ("max.u64", "u64 u64", "u64", max),
    ("abs.s32", "s32", "s32", abs),
    ("neg.s64", "s64", "s64", lambda x: -x),
    ("and.b32", "b32 b32", "b32", lambda x, y: x & y),
    ("or.b64", "b64 b64", "b64", lambda x, y: x | y),
    ("xor.b16", "b16 b16", "b16", lambda x, y: x ^ y),
    ("not.b32", "b32", "b32", lambda x: ~x),
    ("shl.b32", "b32 u32/40", "b32", lambda x, n: x << n),
    ("shl.b64", "b64 u32/80", "b64", lambda x, n: x << n),
    ("shr.u32", "u32 u32/40", "u32", lambda x, n: x >> n),
    ("shr.s32", "s32 u32/40", "s32", lambda x, n: x >> n),
    ("shr.s64", "s64 u32/80", "s64", lambda x, n: x >> n),
    ("shr.u16", "u16 u32/20", "u16", lambda x, n: x >> n),
    ("shf.l.wrap.b32", "b32 b32 u32", "b32", lambda x, y, n: (y << 32 | x) << n % 32 >> 32),
    ("shf.r.wrap.b32", "b32 b32 u32", "b32", lambda x, y, n: (y << 32 | x) >> n % 32),
    ("shf.r.clamp.b32", "b32 b32 u32/40", "b32", lambda x, y, n: (y << 32 | x) >> min(n, 32)),
    ("prmt.b32", "b32 b32 b32", "b32", permute),
    ("bfe.u32", "u32 u32/70 u32/70", "u32", lambda *a: extract("u32", *a)),
    ("bfe.s32", "s32 u32/70 u32/70", "s32", lambda *a: extract("s32", *a)),
    ("bfe.u64", "u64 u32/70 u32/70", "u64", lambda *a: extract("u64", *a)),
    ("bfe.s64", "s64 u32 u32", "s64", lambda *a: extract("s64", *a)),
    ("bfi.b32", "b32 b32 u32/70 u32/70", "b32", lambda *a: insert("b32", *a)),
    ("bfi.b64", "b64 b64 u32/70 u32/70", "b64", lambda *a: insert("b64", *a)),
    ("popc.b32", "b32", "u32", lambda x: x.bit_count()),
    ("clz.b32", "b32", "u32", lambda x: 32 - x.bit_length()),
    ("clz.b64", "b64", "u32", lambda x: 64 - x.bit_length()),
    ("brev.b32", "b32", "b32", lambda x: int(f"{x:032b}"[::-1], 2)),
    ("dp4a.u32.u32", "u32 u32 u32", "u32", lambda *a: dot("u32", *a)),
    ("dp4a.s32.s32", "s32 s32 s32", "s32", lambda *a: dot("s32", *a)),
    ("cvt.u32.u16", "u16", "u32", lambda x: x),
    ("cvt.s64.s32", "s32", "s64", lambda x: x),
    ("cvt.u16.u32", "u32", "u16", lambda x: x),
    ("cvt.u32.u8", "u32", "u32", lambda x: x & 255),
    ("cvt.s32.s8", "u32", "s32", lambda x: signed(x, "s8")),
    ("mov.b32", "b32", "b32", lambda x: x),
]


@pytest.mark.parametrize("case", INTEGER_CASES, ids=lambda case: case[0])
def test_integers(case):
    opcode, sources, result, function = case
    kinds, _, limits = zip(*(source.partition("/") for source in sources.split()), strict=True)
    columns = [
        integers(kind, small=int(limit or 0))
        if limit
        else random.Random(i).sample(integers(kind), 400)
        for i, (kind, limit) in enumerate(zip(kinds, limits, strict=True))
    ]
    actual = apply(opcode, kinds, result, *columns)
    expected = [signed(function(*row), result) for row in zip(*columns, strict=True)]
    assert actual.tolist() == expected


@pytest.mark.parametrize("kind", ["u32", "s32", "s64"])
def test_division(kind):
    columns = integers(kind), [value or 7 for value in reversed(integers(kind))]
    rows = list(zip(*columns, strict=True))
    quotients = [signed(toward_zero(x, y), kind) for x, y in rows]
    assert apply(f"div.{kind}", [kind] * 2, kind, *columns).tolist() == quotients
    rests = [signed(x - toward_zero(x, y) * y, kind) for x, y in rows]
    assert apply(f"rem.{kind}", [kind] * 2, kind, *columns).tolist() == rests


@pytest.mark.parametrize("table", [0x80, 0xE8, 0x96, 0xCA, 0x1B])
def test_lop3(table):
    columns = [random.Random(i).sample(integers("b32"), 400) for i in range(3)]
    actual = apply("lop3.b32", ["b32"] * 3, "b32", *columns, more=hex(table))
    for value, words in zip(actual.tolist(), zip(*columns, strict=True), strict=True):
        rows = [sum((word >> i & 1) << 2 - j for j, word in enumerate(words)) for i in range(32)]
        assert value == sum((table >> row & 1) << i for i, row in enumerate(rows))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_comparisons_of_integers(kind):
    x, y = (np.array(random.Random(i).sample(integers(kind), 96), DTYPES[kind]) for i in range(2))
    y[::4] = x[::4]
    names = dict(ORDERED)
    if kind[0] == "u":
        names |= {
            "lo": ORDERED["lt"],
            "ls": ORDERED["le"],
            "hi": ORDERED["gt"],
            "hs": ORDERED["ge"],
        }
    for name, function in names.items():
        expected = [1 if function(a, b) else 2 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert compare(f"setp.{name}.{kind}", kind, x, y) == expected
    both = [
        bool(a < b and i != 5) | (a >= b and i != 5) << 1
        for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True))
    ]
    assert compare(f"setp.lt.and.{kind}", kind, x, y) == both


def test_words_are_taken_apart_and_put_together():
    body = """
        mad.wide.u32 %address, %r0, 8, %rd0; ld.global.b64 %rd10, [%address];
        mov.b64 {%r1, %r2}, %rd10; mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r3, {%rs2, %rs1};
        mov.b64 %rd11, {%r2, %r3}; st.global.b64 [%address], %rd11;
    """
    words = np.random.default_rng(0).integers(0, 1 << 64, 32, np.uint64)
    (after,), _ = run(body, words)
    low = words & 0xFFFFFFFF
    assert (after == (words >> 32 | (low >> 16 | (low & 0xFFFF) << 16) << 32)).all()
