"""Each instruction on its own, against Python's integers and exact fractions."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.ptx.parse import PtxError
from tests.kernels.ptx.registers import DTYPES
from tests.kernels.ptx.snippets import apply, run

NAN = 0x7FFFFFFF


def bits_of(kind: str) -> int:
    return 8 * DTYPES[kind].itemsize


def signed(value: int, kind: str) -> int:
    """Read a word as its type does."""
    top = 1 << bits_of(kind)
    value %= top
    return value - top if kind[0] == "s" and value >= top // 2 else value


def integers(kind: str, count: int = 400, small: int = 0) -> list[int]:
    """Draw words of all sizes, or below `small`, with the extremes."""
    generator = random.Random(f"{kind} {small}")
    if small:
        return [generator.randrange(small) for _ in range(count)]
    width = bits_of(kind)
    edges = [0, 1, 2, (1 << width - 1) - 1, 1 << width - 1, (1 << width) - 1]
    drawn = [generator.getrandbits(generator.randint(1, width)) for _ in range(count)]
    words = [generator.choice([drawn[i], edges[i % len(edges)]]) for i in range(count)]
    return [signed(word, kind) for word in words]


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


def floats(count: int = 600, seed: int = 0) -> np.ndarray:
    """Draw float32 of all sizes, with NaNs, infinities, zeros and subnormals."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 1 << 32, count, np.uint32)
    edges = [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001]
    edges += [0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0xFFFFFFFF]
    values[generator.random(count) < 0.4] = 0
    values = np.where(values == 0, generator.choice(np.array(edges, np.uint32), count), values)
    near = generator.random(count) < 0.3
    # Neighbours of 1, whose sums and products round in every way.
    values[near] = 0x3F800000 + generator.integers(-999, 999, int(near.sum()))
    return values.view(np.float32)


def expected_bits(values: np.ndarray) -> np.ndarray:
    """What float64 results of float32 operands round to: for + - * / and roots that is right."""
    rounded = values.astype(np.float32)
    return np.where(np.isnan(rounded), NAN, rounded.view(np.uint32))


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.rn.f32", np.add),
        ("add.f32", np.add),
        ("sub.rn.f32", np.subtract),
        ("mul.rn.f32", np.multiply),
        ("div.rn.f32", np.divide),
    ],
)
def test_float_arithmetic(opcode, function):
    x, y = floats(seed=1), floats(seed=2)
    with np.errstate(all="ignore"):
        expected = expected_bits(function(x.astype(np.float64), y.astype(np.float64)))
    assert (apply(opcode, ["f32", "f32"], "f32", x, y).view(np.uint32) == expected).all()


@pytest.mark.parametrize(
    ("opcode", "function"), [("sqrt.rn.f32", np.sqrt), ("rcp.rn.f32", lambda x: 1 / x)]
)
def test_roots(opcode, function):
    x = floats(seed=3)
    with np.errstate(all="ignore"):
        expected = expected_bits(function(x.astype(np.float64)))
    assert (apply(opcode, ["f32"], "f32", x).view(np.uint32) == expected).all()


def test_approximate_reciprocals():
    x = floats(seed=11)
    x = np.concatenate([x, np.ldexp(np.float32(1), np.arange(-149, 128))])
    is_small = np.abs(x) < np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        exact = (1 / x.astype(np.float64)).astype(np.float32)
    for flush in (False, True):
        result = apply(f"rcp.approx{'.ftz' * flush}.f32", ["f32"], "f32", x)
        assert (np.isnan(result) == np.isnan(x)).all()
        assert (np.isinf(result) == (np.isinf(exact) | (is_small & flush))).all()
        assert not (np.abs(result[result != 0]) < np.finfo(np.float32).tiny).any() or not flush
        usual = np.isfinite(exact) & ~is_small & (result != 0)
        assert set((result.view(np.int32) - exact.view(np.int32))[usual]) == {-1, 0, 1}


def test_fma_rounds_once():
    generator = np.random.default_rng(4)
    count = 3000
    x, y = (generator.integers(0x3F000000, 0x40000000, count, np.uint32) for _ in range(2))
    x, y = x.view(np.float32), y.view(np.float32)
    # Addends that leave the result near a tie: minus the product, give or take, or tiny ones.
    z = (-x * y).astype(np.float32) * generator.choice(np.float32([0, 1, 2**-24, 2**20]), count)
    z[::3] = np.float32(2.0**-60)
    z[1::7] = np.float32(-(2.0**-140))
    actual = apply("fma.rn.f32", ["f32"] * 3, "f32", x, y, z)
    for row in zip(x.tolist(), y.tolist(), z.tolist(), actual, strict=True):
        a, b, c = map(Fraction, row[:3])
        exact, result = a * b + c, row[3]
        error = abs(Fraction(float(result)) - exact)
        for other in (np.nextafter(result, np.float32(s * np.inf)) for s in (-1, 1)):
            distance = abs(Fraction(float(other)) - exact)
            assert error < distance or (error == distance and result.view(np.uint32) % 2 == 0), row


def test_min_max_abs_neg_copysign():
    x, y = floats(seed=5), floats(seed=6)

    def order(value: float) -> tuple[float, float]:
        return value, math.copysign(1, value)

    for name, choose in (("min", min), ("max", max)):
        for suffix in ("", ".NaN"):
            actual = apply(f"{name}{suffix}.f32", ["f32", "f32"], "f32", x, y)
            for a, b, result in zip(x, y, actual, strict=True):
                numbers = [value for value in (a, b) if not np.isnan(value)]
                if not numbers or (suffix and len(numbers) < 2):
                    assert result.view(np.uint32) == NAN
                else:
                    expected = choose(numbers, key=order)
                    assert result.view(np.uint32) == expected.view(np.uint32)
    words, others = x.view(np.uint32), y.view(np.uint32)
    assert (apply("abs.f32", ["f32"], "f32", x).view(np.uint32) == words & 0x7FFFFFFF).all()
    assert (apply("neg.f32", ["f32"], "f32", x).view(np.uint32) == words ^ 0x80000000).all()
    signed_y = apply("copysign.f32", ["f32", "f32"], "f32", x, y).view(np.uint32)
    assert (signed_y == (others & 0x7FFFFFFF | words & 0x80000000)).all()


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_min_max_of_halves(kind):
    generator = np.random.default_rng(12)
    words = generator.integers(0, 1 << 32, (2, 960), np.uint32)
    words[:, ::7] &= 0x80008000
    words[0, ::5] |= 0x7F807C00
    halves = words.view(np.uint16)
    wide = halves.astype(np.uint32) << 16 if kind == "bf16x2" else halves.view(np.float16)
    x, y = wide.view(np.float32) if kind == "bf16x2" else wide.astype(np.float32)
    for name in ("min", "max"):
        for suffix in ("", ".NaN"):
            expected = apply(f"{name}{suffix}.f32", ["f32", "f32"], "f32", x, y)
            half = kind.removesuffix("x2")
            bits = apply(f"cvt.rn.{half}.f32", ["f32"], "b16", expected)
            actual = apply(f"{name}{suffix}.{kind}", ["b32", "b32"], "b32", *words)
            assert (actual.view(np.uint16) == bits).all()


ORDERED = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


def compare(opcode: str, kind: str, x, y) -> list[int]:
    """Run a setp and return its two predicates as bits 0 and 1."""
    prefix = "%rd" if bits_of(kind) == 64 else "%r"
    size = bits_of(kind) // 8
    body = f"""
        mad.wide.u32 %address, %r0, {size}, %rd0; ld.global.b{8 * size} {prefix}10, [%address];
        mad.wide.u32 %address, %r0, {size}, %rd1; ld.global.b{8 * size} {prefix}11, [%address];
        setp.ne.b32 %p3, %r0, 5;
        {opcode} %p1|%p2, {prefix}10, {prefix}11{", %p3" if ".and" in opcode else ""};
        selp.u32 %r12, 1, 0, %p1; selp.u32 %r13, 2, 0, %p2; or.b32 %r12, %r12, %r13;
        mad.wide.u32 %address, %r0, 4, %rd2; st.global.u32 [%address], %r12;
    """
    out = np.zeros(len(x), np.uint32)
    return run(body, np.asarray(x), np.asarray(y), out, threads=len(x))[0][2].tolist()


def test_comparisons_of_floats():
    pairs = list(itertools.product(np.float32([0.0, -0.0, 1.0, -2.0, np.inf, np.nan]), repeat=2))
    x, y = (np.resize(np.float32(column), 64) for column in zip(*pairs, strict=True))
    for name, function in ORDERED.items():
        for suffix, of_nan in (("", False), ("u", True)):
            expected = [
                of_nan if math.isnan(a) or math.isnan(b) else bool(function(a, b))
                for a, b in zip(x, y, strict=True)
            ]
            actual = compare(f"setp.{name}{suffix}.f32", "f32", x, y)
            assert actual == [1 if result else 2 for result in expected]
    is_nan = [math.isnan(a) or math.isnan(b) for a, b in zip(x, y, strict=True)]
    assert compare("setp.nan.f32", "f32", x, y) == [1 if nan else 2 for nan in is_nan]
    assert compare("setp.num.f32", "f32", x, y) == [2 if nan else 1 for nan in is_nan]


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


def test_classes_of_floats():
    x = floats(seed=7)[:96]
    smallest = float(np.finfo(np.float32).tiny)
    classes = {
        "finite": math.isfinite,
        "infinite": math.isinf,
        "number": lambda value: not math.isnan(value),
        "notanumber": math.isnan,
        "normal": lambda value: math.isfinite(value) and abs(value) >= smallest,
        "subnormal": lambda value: 0 < abs(value) < smallest,
    }
    for name, function in classes.items():
        body = f"""
            mad.wide.u32 %address, %r0, 4, %rd0; ld.global.u32 %r1, [%address];
            testp.{name}.f32 %p1, %r1; selp.u32 %r2, 1, 0, %p1;
            mad.wide.u32 %address, %r0, 4, %rd1; st.global.u32 [%address], %r2;
        """
        after, _ = run(body, x, np.zeros(96, np.uint32), threads=96)
        assert after[1].tolist() == [function(value) for value in x.tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_conversions_to_halves(dtype):
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    # All that lies between halves, too: 12 bits below the last one that stays.
    x = np.concatenate(
        [floats(seed=8), (floats(seed=9).view(np.uint32) & 0xFFFFF800).view(np.float32)]
    )
    rounded = torch.from_numpy(x).to(dtype)
    expected = (
        torch.where(rounded.isnan(), 0x7FFF, rounded.view(torch.int16)).numpy().view(np.uint16)
    )
    assert (apply(f"cvt.rn.{kind}.f32", ["f32"], "b16", x) == expected).all()
    words = apply(f"cvt.rn.{kind}x2.f32", ["f32", "f32"], "b32", x, x[::-1])
    assert (words >> 16 == expected).all()
    assert (words & 0xFFFF == expected[::-1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_conversions_from_halves(dtype):
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    halves = np.arange(1 << 16, dtype=np.uint16)[::67]
    values = torch.from_numpy(halves.view(np.int16)).view(dtype).float().numpy()
    expected = np.where(np.isnan(values), NAN, values.view(np.uint32))
    assert (apply(f"cvt.f32.{kind}", ["b16"], "b32", halves) == expected).all()


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", round), ("rzi", int), ("rmi", math.floor), ("rpi", math.ceil)]
)
def test_conversions_to_integers(mode, function):
    halves = np.arange(-40, 40, dtype=np.float32) / 8
    x = np.concatenate([floats(seed=10), halves, np.float32([2**31, -(2**31), 2**32, 3e9])])
    for kind in ("s32", "u32", "s64", "u8"):
        limits = np.iinfo(DTYPES[kind])

        def convert(value: float, kind=kind, limits=limits) -> int:
            if math.isnan(value):
                return signed(1 << 63, kind) if bits_of(kind) == 64 else 0
            if math.isinf(value):
                return limits.max if value > 0 else limits.min
            return min(max(function(value), limits.min), limits.max)

        result = kind if kind != "u8" else "u32"
        actual = apply(f"cvt.{mode}.{kind}.f32", ["f32"], result, x)
        assert actual.tolist() == [int(convert(value)) for value in x.tolist()]


def test_conversions_from_integers_round_to_even():
    for kind in ("s32", "u32", "u64", "u16"):
        x = [*integers(kind), *(value for value in range(2**24, 2**24 + 20) if kind != "u16")]
        actual = apply(f"cvt.rn.f32.{kind}", [kind], "f32", x)
        for value, result in zip(x, actual, strict=True):
            error = abs(int(result) - value)
            for other in (np.nextafter(result, np.float32(s * np.inf)) for s in (-1, 1)):
                distance = abs(Fraction(float(other)) - value)
                assert error < distance or (error == distance and result.view(np.uint32) % 2 == 0)


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


@pytest.mark.parametrize(
    "opcode",
    ["ex2.approx.f32", "sqrt.approx.f32", "add.ftz.f32", "add.rz.f32", "cvt.rz.f32.s32", "wgmma"],
)
def test_what_is_not_known_is_named(opcode):
    sources = ["f32"] * (2 if opcode.startswith("add") else 1)
    with pytest.raises(PtxError, match=opcode.replace(".", r"\.")):
        apply(opcode, sources, "f32", *([1.0] for _ in sources))


def test_products_that_ptxas_may_fuse_are_refused():
    with pytest.raises(PtxError, match=r"may fuse mul\.f32 with an addition: ask for \.rn"):
        apply("mul.f32", ["f32", "f32"], "f32", [1.0], [2.0])
