"""Properties of quantizing and decoding: shards, what survives, errors, writing over a row."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops, reference
from tests import bounds, oracle, oracle_columns
from tests.oracle_tensors import records_of, to_record
from tests.strategies import DTYPES, PROPERTY, kinds, make_rows, seeds, specs

dtypes = st.sampled_from(DTYPES)
both = pytest.mark.parametrize("kernels", [reference, ops], ids=["reference", "ops"])


@both
@PROPERTY
@given(spec=specs(), kinds=kinds(), seed=seeds)
def test_rows_are_quantized_one_by_one(kernels, spec, kinds, seed):
    """Clause 5.10: quantizing a shard of rows is cutting the quantized whole."""
    weight = make_rows(spec, kinds, 5, seed, torch.float32)
    whole = kernels.quantize(weight, spec)
    shards = [kernels.quantize(shard, spec) for shard in weight.split(2)]
    assert torch.equal(torch.cat(shards), whole)


@both
@PROPERTY
@given(spec=specs(), kinds=kinds(), seed=seeds, dtype=dtypes)
def test_quantizing_a_decoded_weight_is_clauses_11_2_to_11_4(kernels, spec, kinds, seed, dtype):
    weight = make_rows(spec, kinds, 2, seed, dtype)
    assume(weight.isfinite().all())
    smallest = {"nf4": 11, "fp4": 96}[spec.quant_type] * bounds.SMALLEST
    first = kernels.quantize(weight, spec)
    second = kernels.quantize(kernels.dequantize(first, spec, torch.float32), spec)
    for before, after in zip(records_of(first), records_of(second), strict=True):
        plain = oracle.Spec.of(spec)
        old, new = oracle.take_apart(before, plain), oracle.take_apart(after, plain)
        for block, scale in enumerate(oracle.scales(before, spec)):
            codes = slice(block * spec.block_size, (block + 1) * spec.block_size)
            assert scale < smallest or new.codes[codes] == old.codes[codes]
        assert [base for _, base in new.pairs] == [base for _, base in old.pairs]
        if spec.scale_kind == "float32":
            assert new.scales == old.scales


@PROPERTY
@given(spec=specs(), kinds=kinds(), seed=seeds, dtype=dtypes)
def test_error_is_within_the_bound(spec, kinds, seed, dtype):
    weight = make_rows(spec, kinds, 2, seed, dtype)
    assume(weight.isfinite().all())
    decoded = reference.dequantize(reference.quantize(weight, spec), spec, torch.float32)
    for row, decoded_row in zip(weight.double(), decoded.double(), strict=True):
        absmax = torch.stack([block.abs().amax() for block in row.split(spec.block_size)])
        error = torch.zeros_like(absmax)
        if spec.scale_kind == "square8":
            for segment in range(0, spec.num_blocks, spec.segment_length):
                values = absmax[segment : segment + spec.segment_length]
                if values.any():
                    of_segment = bounds.scale_bound(values[values > 0].amin(), values.amax())
                    error[segment : segment + spec.segment_length] = of_segment
        bound = bounds.weight_bound(absmax, error, spec.quant_type, torch.float32)
        per_weight = bound.repeat_interleave(spec.block_size)[: spec.in_features]
        assert ((row - decoded_row).abs() <= per_weight).all()


@both
@PROPERTY
@given(data=st.data(), spec=specs(scale_block_sizes=(1, 2, 3, 256)), kinds=kinds(), seed=seeds)
def test_quantize_into_is_clause_5_11(kernels, data, spec, kinds, seed):
    start = data.draw(st.sampled_from(range(0, spec.in_features, 16)))
    whole = oracle.quantize(make_rows(spec, kinds, 1, seed, torch.float32).tolist(), spec)[0]
    row, cut_spec = oracle_columns.cut(whole, spec, start, spec.in_features)
    record = to_record([row, row])
    new_spec = NF4Spec(*cut_spec)
    weight = make_rows(new_spec, kinds, 2, seed + 1, torch.float32)
    kernels.quantize_into(weight, new_spec, record)
    phase = oracle.take_apart(row, cut_spec).phase
    assert records_of(record) == [
        oracle.quantize_row(each, cut_spec, phase) for each in weight.tolist()
    ]
