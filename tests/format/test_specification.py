"""The written specification against the oracle: tables, example, numbered clauses, and claims.

What the page says of bytes is parsed out of it here, so that text and code cannot drift apart.
"""

import math
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nf4tensor.format import codebook
from tests import oracle
from tests.strategies import PROPERTY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "nf4tensor/format/README.md").read_text()
CLAUSES = re.findall(r"^- \*\*(\d+\.\d+)\*\*", PAGE, re.MULTILINE)
WORD = r"\b[0-9A-F]{8}\b"
bits = st.integers(0, 0x7F7FFFFF)


def paragraph(clause: str) -> str:
    """Return the text of one clause."""
    return PAGE.split(f"- **{clause}**")[1].split("\n- **")[0].split("\n## ")[0]


def fence(language: str) -> list[str]:
    """Return the words of the fenced block of that name."""
    return PAGE.split(f"```{language}\n")[1].split("```")[0].split()


def floats(words: list[str]) -> list[float]:
    return [oracle.from_bits(int(word, 16)) for word in words]


def ulps(a: float, b: float) -> int:
    return abs(oracle.to_bits(a) - oracle.to_bits(b))


def fit(absmax: list[float]) -> tuple[list[int], float, list[float]]:
    """Return q, step and the decoded scales of one segment, by the oracle."""
    q, (step, base) = oracle.fit_square8(absmax)
    return q, step, [oracle.fl(oracle.fl(each * each * step) + base) for each in q]


# The page


def test_page_is_ascii():
    assert PAGE.isascii()


def test_clauses_are_numbered_without_gaps():
    chapters = {}
    for clause in CLAUSES:
        chapter, number = map(int, clause.split("."))
        chapters.setdefault(chapter, []).append(number)
    assert list(chapters) == list(range(1, len(chapters) + 1))
    for numbers in chapters.values():
        assert numbers == list(range(1, len(numbers) + 1))
    assert [int(n) for n in re.findall(r"^## (\d+)\. ", PAGE, re.MULTILINE)] == list(chapters)


def test_quoted_clauses_exist():
    known = {*CLAUSES, *(clause.split(".")[0] for clause in CLAUSES)}
    pattern = re.compile(r"[Cc]lauses? ((?:\d+(?:\.\d+)?(?:, | and | to )?)+)")
    texts = [path.read_text() for path in sorted(ROOT.glob("*/**/*.py"))]
    texts += [path.read_text() for path in sorted((ROOT / "csrc").rglob("*.*"))]
    quoted = [number for text in [PAGE, *texts] for number in pattern.findall(text)]
    assert quoted
    numbers = {number for group in quoted for number in re.findall(r"\d+(?:\.\d+)?", group)}
    assert numbers <= known


def test_level_table_is_the_codebook():
    rows = [line for line in paragraph("4.1").splitlines() if re.search(WORD, line)]
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]
    table = {int(row[i]): row[i + 1 : i + 5] for row in cells for i in (0, 5)}
    assert sorted(table) == list(range(16))
    for code, (nf4, nf4_bits, fp4, fp4_bits) in table.items():
        assert float(nf4) == codebook.NF4_LEVELS[code] == floats([nf4_bits])[0]
        assert float(fp4) == codebook.FP4_LEVELS[code] == floats([fp4_bits])[0]
    assert [table[code][1] for code in range(16)] == oracle.NF4_BITS.split()
    assert [table[code][3] for code in range(16)] == oracle.FP4_BITS.split()


def test_threshold_tables_are_the_codebook():
    assert tuple(floats(re.findall(WORD, paragraph("4.2")))) == codebook.NF4_THRESHOLDS
    assert tuple(floats(re.findall(WORD, paragraph("4.3")))) == codebook.FP4_THRESHOLDS


def test_map_table_is_the_codebook():
    words = re.findall(WORD, paragraph("4.5"))
    assert tuple(floats(words)) == codebook.DYNAMIC_MAP[128:]


def test_worked_example():
    row = [float(word) for word in fence("weights")]
    spec = oracle.whole_spec(20, 16, 256, "nf4")
    record = bytes.fromhex("".join(fence("record")))
    assert spec == (20, 16, "square8", 2, 1, "nf4")
    assert (spec.scales_at, spec.segments_at, spec.pitch) == (12, 16, 32)
    assert oracle.quantize([row], spec) == [record]
    assert [f"{word:08X}" for word in oracle.dequantize(record, spec)] == fence("decoded")
    plain = oracle.quantize([row], oracle.whole_spec(20, 16, None, "nf4"))
    assert plain == [bytes.fromhex("".join(fence("record-float32")))]


# The oracle's arithmetic


def rounded(exact: Fraction) -> float:
    """Round a fraction to float32 by comparing it with the two neighbours it lies between."""
    sign, exact = (-1 if exact < 0 else 1), abs(exact)
    low, high = 0, 0x7F7FFFFF
    while low < high:
        middle = (low + high + 1) // 2
        below = Fraction(oracle.from_bits(middle)) <= exact
        low, high = (middle, high) if below else (low, middle - 1)
    at = Fraction(oracle.from_bits(low))
    above = Fraction(oracle.from_bits(low + 1)) if low < 0x7F7FFFFF else Fraction(2**128)
    up = exact - at > above - exact or (exact - at == above - exact and low % 2)
    return sign * oracle.from_bits(low + up)


@PROPERTY
@given(a=bits, b=bits, near=st.booleans())
def test_fl_rounds_the_exact_result_once(a, b, near):
    # Near one another, sums and quotients reach the halfway cases.
    x, y = floats([f"{a:x}", f"{abs(a - b % 64) if near else b:x}"])
    for exact, value in (
        (Fraction(x) + Fraction(y), x + y),
        (Fraction(x) - Fraction(y), x - y),
        (Fraction(x) * Fraction(y), x * y),
        *([(Fraction(x) / Fraction(y), x / y)] if y else []),
    ):
        assert oracle.to_bits(oracle.fl(value)) & 0x7FFFFFFF == oracle.to_bits(abs(rounded(exact)))


@PROPERTY
@given(a=bits, place=st.integers(0, 254), offset=st.integers(-3, 3))
def test_fl_of_a_square_root_rounds_once(a, place, offset):
    tie = oracle.from_bits(oracle.to_bits((place + 0.5) ** 2) + offset)
    for x in (oracle.from_bits(a), tie):
        root = oracle.fl(math.sqrt(x))
        below, above = (
            (Fraction(oracle.from_bits(oracle.to_bits(root) + i)) for i in (-1, 1))
            if (root)
            else (Fraction(0), Fraction(1))
        )
        low, high = ((Fraction(root) + side) / 2 for side in (below, above))
        assert low**2 <= Fraction(x) <= high**2


@pytest.mark.parametrize(
    ("value", "bfloat16", "float16"),
    [
        (1.0, 0x3F80, 0x3C00),
        (-0.0, 0x8000, 0x8000),
        (1 + 2**-8, 0x3F80, 0x3C04),
        (1 + 3 * 2**-8, 0x3F82, 0x3C0C),
        (2.0**-149, 0x0000, 0x0000),
        (3 * 2.0**-134, 0x0002, 0x0000),
        (-(2.0**-133), 0x8001, 0x8000),
        (2.0**-24, 0x3380, 0x0001),
        (2.0**-25, 0x3300, 0x0000),
        (3 * 2.0**-25, 0x33C0, 0x0002),
        (65519.0, 0x4780, 0x7BFF),
        (65520.0, 0x4780, 0x7C00),
        (-3.4028234663852886e38, 0xFF80, 0xFC00),
        (math.inf, 0x7F80, 0x7C00),
        (math.nan, 0x7FC0, 0x7E00),
    ],
)
def test_rounding_to_16_bits_is_clause_6_2(value, bfloat16, float16):
    assert oracle.round_bits(value, "bfloat16") == bfloat16
    assert oracle.round_bits(value, "float16") == float16


# The claims of clause 11


def test_counterexamples_of_clause_11_4():
    words = re.findall(WORD, paragraph("11.4"))
    moving, (first, second), narrow = floats(words[:2]), floats(words[2:4]), floats(words[4:])
    q, step, again = fit(moving)
    assert (q, step) == ([0, 255], first)
    assert fit(again)[:2] == ([0, 255], second)
    assert ulps(first, second) == 1
    q, _, again = fit(narrow)
    assert q == [0, 1, 255]
    assert fit(again)[0] == [0, 0, 255]


def test_example_of_clause_11_5():
    smallest, largest, decoded = floats(re.findall(WORD, paragraph("11.5")))
    assert fit([smallest, largest])[2] == [smallest, decoded]
    assert ulps(largest, decoded) == 2


def segment(generator: random.Random) -> list[float]:
    """Return absmax values of one segment that lie close, far, or near the ends of float32."""
    low = generator.randrange(1, 0x7F7FFFFF)
    high = min(low + int(2 ** generator.uniform(0, 29)), 0x7F7FFFFF)
    return [oracle.from_bits(generator.randint(low, high)) for _ in range(generator.randint(1, 6))]


@pytest.mark.parametrize("seed", range(8))
def test_square8_survives_as_clauses_11_4_and_11_5_say(seed):
    generator = random.Random(seed)
    for _ in range(2000):
        absmax = segment(generator)
        q, (step, base) = oracle.fit_square8(absmax)
        decoded = fit(absmax)[2]
        assert all(math.isfinite(scale) and scale >= base for scale in decoded)
        is_normal = step >= 2.0**-126
        if is_normal:
            assert ulps(max(decoded), max(absmax)) <= 2
        q_again, (step_again, base_again) = oracle.fit_square8(decoded)
        assert base_again == base
        assert ulps(step_again, step) <= 1
        if is_normal and max(absmax) >= base * 65 / 64:
            assert q_again == q


@pytest.mark.parametrize(("quant_type", "smallest"), [("nf4", 11), ("fp4", 96)])
def test_codes_survive_from_the_scale_of_clause_11_2(quant_type, smallest):
    """Every scale up to 4096 times the smallest number; above, rounding errors only shrink."""
    levels = oracle.LEVELS[quant_type]
    codes = [0 if (quant_type, code) == ("fp4", 8) else code for code in range(16)]
    for units in range(1, 4097):
        block = [oracle.fl(level * units * 2.0**-149) for level in levels]
        kept, absmax = oracle.quantize_block(block, quant_type)
        assert absmax == units * 2.0**-149
        assert (kept == codes) == (units >= smallest)
