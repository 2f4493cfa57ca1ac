"""Geometry: offsets against the oracle, sizes against the promised ones, and every refusal."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nf4tensor.errors import NF4TensorError, SpecError
from nf4tensor.format.spec import FORMAT_VERSION, NF4Spec
from tests import oracle
from tests.strategies import PROPERTY, QUANT_TYPES

BLOCK_SIZES = tuple(2**i for i in range(4, 13))


@PROPERTY
@given(
    in_features=st.integers(1, 20000),
    block_size=st.sampled_from(BLOCK_SIZES),
    scale_block_size=st.one_of(st.none(), st.integers(1, 300)),
    quant_type=st.sampled_from(QUANT_TYPES),
)
def test_for_weight_is_clause_3_5(in_features, block_size, scale_block_size, quant_type):
    spec = NF4Spec.for_weight(in_features, block_size, scale_block_size, quant_type)
    expected = oracle.whole_spec(in_features, block_size, scale_block_size, quant_type)
    assert oracle.Spec.of(spec) == expected
    assert spec.format_version == FORMAT_VERSION == 1
    if scale_block_size is not None:
        assert spec.segment_length <= scale_block_size
        # No segment is empty, and the last one is not much shorter than the others.
        assert (spec.num_segments - 1) * spec.segment_length < spec.num_blocks


@PROPERTY
@given(
    in_features=st.integers(1, 20000),
    block_size=st.sampled_from(BLOCK_SIZES),
    scale_kind=st.sampled_from(["float32", "square8", "dynamic8"]),
    num_segments=st.integers(1, 9),
)
def test_offsets_are_clauses_1_5_to_1_7(in_features, block_size, scale_kind, num_segments):
    blocks = -(-in_features // block_size)
    length = -(-blocks // num_segments)
    segments = (0, 0) if scale_kind == "float32" else (length, num_segments)
    spec = NF4Spec(in_features, block_size, scale_kind, *segments)
    expected = oracle.Spec.of(spec)
    assert spec.num_blocks == expected.blocks
    assert spec.codes_bytes == (in_features + 1) // 2
    assert spec.scales_offset_bytes == expected.scales_at
    assert spec.scales_bytes == blocks * (4 if scale_kind == "float32" else 1)
    if scale_kind != "float32":
        assert spec.segments_offset_bytes == expected.segments_at
    assert spec.pitch == expected.pitch
    assert spec.pitch % 32 == 0
    assert spec.pitch - 32 < spec.end_bytes <= spec.pitch


@pytest.mark.parametrize(
    ("columns", "bits"), [(576, 4.44), (4096, 4.19), (11008, 4.14), (14336, 4.14)]
)
def test_square8_has_the_sizes_of_clause_11_1(columns, bits):
    assert round(8 * NF4Spec.for_weight(columns).pitch / columns, 2) == bits


@pytest.mark.parametrize(
    ("columns", "num_segments", "bits"),
    [(576, 2, 4.89), (4096, 1, 4.19), (11008, 2, 4.16), (14336, 2, 4.14)],
)
def test_dynamic8_has_the_sizes_of_clause_11_1(columns, num_segments, bits):
    spec = NF4Spec(columns, 64, "dynamic8", 256, num_segments)
    assert round(8 * spec.pitch / columns, 2) == bits


def test_defaults_are_double_quantized_nf4():
    spec = NF4Spec.for_weight(14336)
    assert spec == NF4Spec(14336, 64, "square8", 224, 1, "nf4", 1)
    assert NF4Spec.for_weight(64 * 257) == NF4Spec(64 * 257, 64, "square8", 129, 2)
    assert NF4Spec.for_weight(100, scale_block_size=None) == NF4Spec(100, 64, "float32", 0, 0)


def test_spec_is_frozen_and_hashable():
    spec = NF4Spec.for_weight(4096)
    assert hash(spec) == hash(NF4Spec.for_weight(4096))
    assert len({spec, NF4Spec.for_weight(4096), NF4Spec.for_weight(4096, 32)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 32


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale_block_size", [None, 256])
def test_op_args_are_six_integers_and_come_back(quant_type, scale_block_size):
    spec = NF4Spec.for_weight(100, 32, scale_block_size, quant_type)
    assert len(spec.op_args) == 6
    assert all(type(argument) is int for argument in spec.op_args)
    assert NF4Spec.from_op_args(*spec.op_args) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version is 2"),
        ({"in_features": 0}, "in_features is 0"),
        ({"block_size": 48}, "block_size is 48"),
        ({"block_size": 8}, "block_size is 8"),
        ({"block_size": 8192}, "block_size is 8192"),
        ({"block_size": 64.0}, "block_size is 64.0"),
        ({"block_size": -64}, "block_size is -64"),
        ({"scale_kind": "linear8"}, "scale_kind is 'linear8'"),
        ({"quant_type": "int4"}, "quant_type is 'int4'"),
        ({"segment_length": 3}, "4 blocks do not fit in 1 segments of 3 blocks"),
        ({"segment_length": 0}, "do not fit"),
        ({"num_segments": 0}, "do not fit"),
        ({"scale_kind": "float32"}, "float32 scales have no segments"),
    ],
)
def test_impossible_geometry_is_refused(change, message):
    fields = dataclasses.asdict(NF4Spec(256, 64, "square8", 4, 1))
    with pytest.raises(SpecError, match=message) as caught:
        NF4Spec(**{**fields, **change})
    assert isinstance(caught.value, NF4TensorError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, "in_features is 0"),
        ({"in_features": 64, "block_size": 100}, "block_size is 100"),
        ({"in_features": 64, "block_size": 0}, "block_size is 0"),
        ({"in_features": 64, "scale_block_size": 0}, "scale_block_size is 0"),
        ({"in_features": 64, "scale_block_size": -1}, "scale_block_size is -1"),
        ({"in_features": 64, "scale_block_size": 2.5}, "scale_block_size is 2.5"),
        ({"in_features": 64, "quant_type": "NF4"}, "quant_type is 'NF4'"),
    ],
)
def test_for_weight_refuses(arguments, message):
    with pytest.raises(SpecError, match=message):
        NF4Spec.for_weight(**arguments)


@pytest.mark.parametrize("position", [2, 5])
@pytest.mark.parametrize("value", [-1, 3])
def test_from_op_args_refuses_unknown_names(position, value):
    arguments = list(NF4Spec.for_weight(64).op_args)
    arguments[position] = value
    with pytest.raises(SpecError, match=f"is {value}, expected 0 to"):
        NF4Spec.from_op_args(*arguments)
