"""Weights of bitsandbytes in and out, against the bytes that it wrote (`tests/golden`)."""

import copy
import hashlib
import json
import pickle

import numpy as np
import pytest
import torch

from nf4tensor import NF4Tensor, to_nf4
from nf4tensor.errors import CheckpointError, UnsupportedError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.integrations.bitsandbytes import (
    BitsAndBytesLayout,
    from_params4bit,
    from_state_dict,
    prefixes,
    to_state_dict,
)
from nf4tensor.kernels import reference
from tests.golden import make_bitsandbytes as golden
from tests.integrations.golden_entries import (
    CASES,
    as_bytes,
    assert_same_entries,
    entries,
    text_entry,
)
from tests.kernels.test_golden import import_record

NAME = "layer.weight"
NESTED = [case for case in CASES if CASES[case]["nested"]]
# Where the blocks cross rows, a tensor alone does not say how large they were.
WHOLE_ROWS = [case for case in CASES if not case.startswith("crossing")]


def load(case: str) -> tuple[NF4Tensor, BitsAndBytesLayout]:
    return from_state_dict(entries(case), NAME)


@pytest.fixture(scope="module")
def arrays():
    with np.load(golden.FOLDER / "bitsandbytes.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("case", CASES)
def test_records_are_clause_10(arrays, case):
    spec, record = import_record(arrays, case)
    weight, layout = load(case)
    assert weight.spec == NF4Spec(*spec)
    assert torch.equal(weight.record.view(record.shape), record)
    assert (list(weight.shape), weight.dtype) == (CASES[case]["shape"], torch.bfloat16)
    assert not weight.requires_grad
    assert (layout.storage_dtype, layout.packed_shape) == (CASES[case]["storage"], "column")
    assert layout.quant_state == CASES[case]["quant_state"]


@pytest.mark.parametrize("dtype", golden.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_decoded_weights_are_those_of_bitsandbytes(case, dtype):
    decoded = load(case)[0].dequantize(golden.DTYPES[dtype])
    assert hashlib.sha256(as_bytes(decoded)).hexdigest() == CASES[case]["sha256"][dtype]


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_is_written_again_byte_for_byte(case):
    weight, layout = load(case)
    assert_same_entries(to_state_dict(weight, NAME, layout), entries(case))
    again = BitsAndBytesLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout
    moved = copy.deepcopy(pickle.loads(pickle.dumps(weight))).to(torch.float32)
    assert_same_entries(to_state_dict(moved, NAME, again), entries(case))


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_keep_their_shape(case):
    transposed = {**entries(case), NAME: entries(case)[NAME].t()}
    weight, layout = from_state_dict(transposed, NAME)
    assert torch.equal(weight.record, load(case)[0].record)
    assert layout.packed_shape == "row"
    assert_same_entries(to_state_dict(weight, NAME, layout), transposed)


@pytest.mark.parametrize("case", WHOLE_ROWS)
def test_without_a_layout_it_is_written_as_uint8_columns(case):
    expected = entries(case)
    expected[NAME] = expected[NAME].view(-1).view(torch.uint8).view(-1, 1)
    assert_same_entries(to_state_dict(load(case)[0], NAME), expected)


def test_without_a_layout_crossing_blocks_are_written_smaller():
    weight, _ = load("crossing")
    written = to_state_dict(weight, NAME)
    again, layout = from_state_dict(written, NAME)
    assert torch.equal(again.record, weight.record)
    assert json.loads(layout.quant_state)["blocksize"] == 32
    # Nested scales keep the size of their blocks: it is in the length of their segments.
    assert_same_entries(to_state_dict(load("crossing-nested")[0], NAME), entries("crossing-nested"))


def test_entries_share_no_memory():
    for case in ("odd", "narrow-nested"):  # one row, several
        given = entries(case)
        weight, layout = from_state_dict(given, NAME)
        before = weight.record.clone()
        for entry in (*given.values(), *to_state_dict(weight, NAME, layout).values()):
            entry.zero_()
        assert torch.equal(weight.record, before)


def test_an_unused_nibble_stays():
    given = entries("odd")
    given[NAME][-1] &= 0xF0
    weight, layout = from_state_dict(given, NAME)
    assert_same_entries(to_state_dict(weight, NAME, layout), given)


def test_json_is_kept_letter_by_letter():
    given = entries("narrow-nested")
    name = f"{NAME}.quant_state.bitsandbytes__nf4"
    found = json.loads(bytes(given[name].tolist()))
    found["nested_offset"] = 0.1  # no float32 number
    given[name] = text_entry(json.dumps(dict(reversed(found.items())), indent=1))
    weight, layout = from_state_dict(given, NAME)
    assert_same_entries(to_state_dict(weight, NAME, layout), given)
    _, base = reference.read_pairs_of_blocks(weight.record, weight.spec)
    assert (base == torch.tensor(0.1)).all()


# Tensors that did not come from bitsandbytes


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("scale_block_size", [None, 4])
@pytest.mark.parametrize("shape", [(8, 576), (3, 96), (1, 100), (2, 3, 64), (65,)])
def test_own_tensors_become_plain_ones_of_the_same_values(shape, scale_block_size, quant_type):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float16)
    weight[..., :32] = 0
    tensor = to_nf4(weight, 64, scale_block_size, quant_type=quant_type)
    written = to_state_dict(tensor, NAME)
    again, layout = from_state_dict(written, NAME)
    assert again.spec.scale_kind == "float32"
    assert again.dtype == torch.float16
    assert_same_entries(to_state_dict(again, NAME, layout), written)
    for dtype in golden.DTYPES.values():
        assert as_bytes(again.dequantize(dtype)) == as_bytes(tensor.dequantize(dtype))


def test_decoded_scales_are_the_absmax():
    tensor = to_nf4(torch.randn(8, 576))
    scales = reference.read_scales(tensor.record, tensor.spec)
    assert torch.equal(to_state_dict(tensor, NAME)[f"{NAME}.absmax"], scales.flatten())


@pytest.mark.parametrize(("shape", "block_size"), [((8, 64), 16), ((8, 48), 64), ((2, 65), 64)])
def test_blocks_that_bitsandbytes_lacks_are_refused(shape, block_size):
    tensor = to_nf4(torch.randn(shape), block_size)
    with pytest.raises(UnsupportedError, match=rf"{NAME}: rows of .* need flat blocks of \d+, and"):
        to_state_dict(tensor, NAME)


@pytest.mark.filterwarnings("ignore:.*rounds to 4 bits")
def test_rows_that_were_written_to_leave_their_blocks():
    weight, layout = load("crossing")
    weight[5].copy_(torch.randn(96))
    with pytest.raises(UnsupportedError, match="of 96 weights in blocks of 32 do not agree with"):
        to_state_dict(weight, NAME, layout)
    again, _ = from_state_dict(to_state_dict(weight, NAME), NAME)
    assert torch.equal(again.record, weight.record)
    # Where no block crosses a row, whatever is written fits.
    weight, layout = load("fp4")
    weight[2].copy_(torch.randn(256))
    again, _ = from_state_dict(to_state_dict(weight, NAME, layout), NAME)
    assert torch.equal(again.record, weight.record)


@pytest.mark.parametrize("case", NESTED)
def test_cuts_of_nested_weights_are_refused_or_right(case):
    weight, layout = load(case)
    num_refused = 0
    for cut in (weight[1:], weight[:-1], weight[:, 32:], weight[:, :-32], weight[::2]):
        with pytest.raises(CheckpointError, match="its layout is that of Description"):
            to_state_dict(cut, NAME, layout)
        try:
            written = to_state_dict(cut, NAME)
        except UnsupportedError:
            num_refused += 1
        else:
            again, _ = from_state_dict(written, NAME)
            assert as_bytes(again.dequantize()) == as_bytes(cut.dequantize())
    assert num_refused < 5


def test_first_rows_of_nested_weights_can_be_written():
    weight, _ = load("nested-nf4")
    again, _ = from_state_dict(to_state_dict(weight[:30], NAME), NAME)
    assert torch.equal(again.dequantize(), weight[:30].dequantize())
    with pytest.raises(UnsupportedError, match="do not agree with flat blocks of 64"):
        to_state_dict(weight[1:], NAME)


def test_only_whole_tensors_are_written():
    weight, layout = load("fp4")
    for view in (weight.t(), weight.view(-1), weight[:0]):
        with pytest.raises(UnsupportedError, match="expected a whole weight with its values"):
            to_state_dict(view, NAME)
    with pytest.raises(UnsupportedError, match="expected an NF4Tensor, got Tensor: of a sharded"):
        to_state_dict(weight.dequantize(), NAME)
    with pytest.raises(UnsupportedError, match="expected a whole weight with its values"):
        to_state_dict(weight.to("meta"), NAME)
    other = load("storage-float32")[1]
    with pytest.raises(CheckpointError, match="pass the layout that came with it, or none"):
        to_state_dict(weight, NAME, other)
    odd, layout = load("odd")
    layout = BitsAndBytesLayout(layout.quant_state, "float16")
    with pytest.raises(CheckpointError, match="says float16, which cannot hold 33 bytes"):
        to_state_dict(odd, NAME, layout)


# Finding weights


class Unread(dict):
    """A state dict that tells which entries were read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


def test_prefixes_are_found_by_name_and_nothing_else_is_read():
    first, second = entries("odd", "a.weight"), entries("narrow-nested", "a.b.weight")
    others = {"a.bias": torch.zeros(1), "c.weight": torch.zeros(1), "c.weight.absmax": None}
    state_dict = Unread({**others, **second, **first})
    found = prefixes(state_dict)
    assert list(found) == ["a.b.weight", "a.weight"]
    assert {name: set(names) for name, names in found.items()} == {
        "a.weight": set(first),
        "a.b.weight": set(second),
    }
    assert not state_dict.read
    from_state_dict(state_dict, "a.weight")
    assert state_dict.read == set(first)


def test_prefixes_of_a_safetensors_file(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="the extra `hf` is missing")
    torch_files = pytest.importorskip("safetensors.torch")
    stored = {**entries("fp4", "a.weight"), "a.bias": torch.zeros(4)}
    torch_files.save_file(stored, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        ((prefix, names),) = prefixes(file.keys()).items()
        weight, layout = from_state_dict({n: file.get_tensor(n) for n in names}, prefix)
    written = to_state_dict(weight, prefix, layout)
    torch_files.save_file({**written, "a.bias": torch.zeros(4)}, tmp_path / "again.safetensors")
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("model", "again")]
    assert files[0] == files[1]


def test_a_dense_parameter_is_no_params4bit():
    with pytest.raises(UnsupportedError, match="Parameter has no quant_state: bitsandbytes quanti"):
        from_params4bit(torch.nn.Parameter(torch.zeros(2, 2)))
