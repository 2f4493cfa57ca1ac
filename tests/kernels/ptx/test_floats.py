"""Floats, their comparisons and conversions, against exact fractions and torch's rounding."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.ptx.parse import PtxError
from tests.kernels.ptx.registers import DTYPES
from tests.kernels.ptx.snippets import (
    ORDERED,
    apply,
    bits_of,
    compare,
    floats,
    integers,
    run,
    signed,
)

NAN = 0x7FFFFFFF


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
