"""Constants: every level to the bit, and that thresholds and orders follow from them."""

import hashlib
import struct

import pytest

from nf4tensor.format import codebook
from tests import oracle

MAP_SHA256 = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
NF4_THRESHOLD_BITS = """
    BF591CD8 BF1C5270 BEEB8480 BEADEA76 BE703CEC BE0D38BC BD3A7871 3D22FAFF
    3DF64862 3E5067E0 3E9582D4 3EC753F9 3F006D04 3F248DAF 3F5C89DA
"""
FP4_THRESHOLD_BITS = "3B2AAAAB 3DB00000 3E555556 3E955556 3ED55556 3F155556 3F555556"


def bits_of(values) -> list[str]:
    return [f"{oracle.to_bits(value):08X}" for value in values]


def test_levels_have_the_specified_bits():
    assert bits_of(codebook.NF4_LEVELS) == oracle.NF4_BITS.split()
    assert bits_of(codebook.FP4_LEVELS) == oracle.FP4_BITS.split()
    assert codebook.LEVELS == {"nf4": codebook.NF4_LEVELS, "fp4": codebook.FP4_LEVELS}


def test_thresholds_have_the_specified_bits():
    assert bits_of(codebook.NF4_THRESHOLDS) == NF4_THRESHOLD_BITS.split()
    assert bits_of(codebook.FP4_THRESHOLDS) == FP4_THRESHOLD_BITS.split()


@pytest.mark.parametrize("name", ["NF4_LEVELS", "FP4_LEVELS", "NF4_THRESHOLDS", "DYNAMIC_MAP"])
def test_constants_are_float32(name):
    values = getattr(codebook, name)
    assert all(isinstance(value, float) for value in values)
    assert [oracle.fl(value) for value in values] == list(values)


def test_dynamic_map_is_that_of_bitsandbytes():
    packed = struct.pack("<256f", *codebook.DYNAMIC_MAP)
    assert hashlib.sha256(packed).hexdigest() == MAP_SHA256


def test_dynamic_map_is_sorted_and_lacks_minus_one():
    levels = codebook.DYNAMIC_MAP
    assert list(levels) == sorted(set(levels))
    assert levels[127] == 0
    assert levels[255] == 1
    assert all(levels[126 - i] == -levels[128 + i] for i in range(127))


def test_zero_codes_decode_to_positive_zero():
    assert codebook.ZERO_CODE == {"nf4": 7, "fp4": 0}
    for quant_type, code in codebook.ZERO_CODE.items():
        assert oracle.to_bits(codebook.LEVELS[quant_type][code]) == 0
    assert oracle.to_bits(codebook.FP4_LEVELS[8]) == 0


def test_fp4_order_sorts_the_magnitudes():
    order = codebook.FP4_CODE_BY_COUNT
    assert sorted(order) == list(range(8))
    magnitudes = [codebook.FP4_LEVELS[code] for code in order]
    assert magnitudes == sorted(magnitudes)
    assert [-level for level in codebook.FP4_LEVELS[9:]] == list(codebook.FP4_LEVELS[1:8])
