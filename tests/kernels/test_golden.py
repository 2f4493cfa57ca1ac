"""The bytes of bitsandbytes 0.50.2, stored under `tests/golden/`: codes, scales, decoded weights.

`tests/golden/make_bitsandbytes.py` made them. The records of cases that are only decoded are built
here by clause 10, from its stored tensors.
"""

import hashlib
import importlib.metadata
import json
import math

import numpy as np
import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops, reference
from tests import oracle
from tests.golden import make_bitsandbytes as golden
from tests.oracle_tensors import decode, to_record

MANIFEST = json.loads((golden.FOLDER / "bitsandbytes.json").read_text())
CASES = MANIFEST["cases"]
WIDE = [name for name in CASES if name.startswith("wide")]
KERNELS = [reference, ops]
both = pytest.mark.parametrize("kernels", KERNELS, ids=["reference", "ops"])


@pytest.fixture(scope="module")
def arrays():
    with np.load(golden.FOLDER / "bitsandbytes.npz") as stored:
        return dict(stored)


def weight_of(arrays, case: str) -> torch.Tensor:
    bits = arrays[f"{CASES[case]['weight']}/weight"]
    return torch.from_numpy(bits.copy()).view(torch.bfloat16)


def sha256(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def import_record(arrays, case: str) -> tuple[oracle.Spec, torch.Tensor]:
    """Build the record of a case by clauses 10.1 to 10.4."""
    description = CASES[case]
    (rows, in_features), size = description["shape"], description["block_size"]
    block_size = size if in_features % size == 0 or rows == 1 else math.gcd(in_features, size)
    f, blocks = size // block_size, math.ceil(in_features / block_size)
    packed = arrays[f"{case}/packed"].reshape(rows, -1)
    absmax = np.repeat(arrays[f"{case}/absmax"], f)[: rows * blocks].reshape(rows, blocks)
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(rows, -1).tolist()
    shape = (in_features, block_size)
    if not description["nested"]:
        spec = oracle.Spec(*shape, "float32", 0, 0, description["quant_type"])
        parts = [oracle.Parts(codes[r], absmax[r].tolist(), 0, []) for r in range(rows)]
        return spec, to_record([oracle.assemble(each, spec) for each in parts])
    length = 256 * f
    num_segments = math.ceil((length - math.gcd(blocks, length) + blocks) / length)
    spec = oracle.Spec(*shape, "dynamic8", length, num_segments, description["quant_type"])
    groups, offset = arrays[f"{case}/nested_absmax"].tolist(), float(arrays[f"{case}/offset"])
    records = []
    for row in range(rows):
        start = row * blocks
        touched = {(start + block) // length for block in range(blocks)}
        indices = [start // length + i for i in range(num_segments)]
        pairs = [(groups[g], offset) if g in touched else (0.0, 0.0) for g in indices]
        parts = oracle.Parts(codes[row], absmax[row].tolist(), start % length, pairs)
        records.append(oracle.assemble(parts, spec))
    return spec, to_record(records)


def test_golden_is_of_the_stated_version():
    assert MANIFEST["bitsandbytes"] == golden.VERSION
    assert set(CASES) == set(golden.CASES)
    assert [CASES[name]["block_size"] for name in WIDE] == list(golden.WIDE_BLOCK_SIZES)


@both
@pytest.mark.parametrize("case", [*WIDE, "odd"])
def test_nf4_codes_and_absmax_are_clause_10_6(kernels, arrays, case):
    weight = weight_of(arrays, case)
    spec = NF4Spec.for_weight(weight.shape[-1], CASES[case]["block_size"], None)
    _, expected = import_record(arrays, case)
    assert torch.equal(kernels.quantize(weight, spec), expected)


def test_zero_block_is_77(arrays):
    assert (arrays["wide-32/packed"].reshape(3, -1)[1, :16] == 0x77).all()
    assert arrays["wide-32/absmax"].reshape(3, -1)[1, 0] == 0
    assert arrays["odd/packed"][-1] & 15 == 7


@both
@pytest.mark.parametrize("dtype", golden.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_decoded_weights_are_those_of_bitsandbytes(kernels, arrays, case, dtype):
    """In every dtype, both quant types, plain and nested, and where blocks cross rows."""
    spec, record = import_record(arrays, case)
    decoded = kernels.dequantize(record, NF4Spec(*spec), golden.DTYPES[dtype])
    assert sha256(decoded) == CASES[case]["sha256"][dtype]


@pytest.mark.parametrize("case", ["fp4", "odd", "narrow-nested", "crossing-nested"])
def test_the_oracle_decodes_them_too(arrays, case):
    spec, record = import_record(arrays, case)
    rows = [bytes(row.tolist()) for row in record]
    expected = np.array(decode(rows, spec, torch.float32), dtype=np.uint32)
    assert hashlib.sha256(expected.tobytes()).hexdigest() == CASES[case]["sha256"]["float32"]


def test_cases_reach_what_their_names_say(arrays):
    spec, record = import_record(arrays, "nested-nf4")
    assert (spec.block_size, spec.segment_length, spec.num_segments) == (64, 256, 2)
    parts = [oracle.take_apart(bytes(row.tolist()), spec) for row in record]
    assert len({each.phase for each in parts}) > 30
    assert sum(each.pairs[1] != (0.0, 0.0) for each in parts) == 1
    spec, _ = import_record(arrays, "crossing-nested")
    assert (spec.block_size, spec.segment_length, spec.num_segments) == (32, 512, 2)
    # bitsandbytes stores code 8 for tiny positive weights; it decodes to +0.0.
    packed = arrays["fp4/packed"]
    assert 8 in {*(packed >> 4).tolist(), *(packed & 15).tolist()}


@pytest.mark.slow
def test_the_installed_bitsandbytes_still_makes_these_bytes(arrays):
    try:
        installed = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the extra `bnb` is not installed")
    if installed != golden.VERSION:
        pytest.skip(f"golden bytes are of bitsandbytes {golden.VERSION}, not {installed}")
    weights = golden.weights()
    for case in (*WIDE, "fp4"):
        stored, _ = golden.call(weights[CASES[case]["weight"]], golden.CASES[case])
        for key, value in stored.items():
            np.testing.assert_array_equal(value, arrays[f"{case}/{key}"])
