"""New tensors that look like an NF4Tensor."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from nf4tensor import NF4Tensor, NF4TensorWarning
from nf4tensor.errors import UnsupportedError
from nf4tensor.kernels import ops
from nf4tensor.tensor import fallback
from tests.strategies import DTYPES, QUANT_TYPES
from tests.tensor.weights import assert_same, dense, make, make_dynamic8, shares_memory


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale_block_size", [None, 256])
def test_new_zeros_makes_zero_rows(quant_type, scale_block_size):
    q = make(4, 65, quant_type=quant_type, scale_block_size=scale_block_size)
    for size in ((7, 65), (4, 65), (0, 65)):
        zeros = q.new_zeros(size)
        assert isinstance(zeros, NF4Tensor)
        assert torch.equal(zeros.record, ops.zero_record(size[:1], q.spec, q.device))
        assert_same(zeros, torch.zeros(size))
    assert_same(q[0].new_zeros(65), torch.zeros(65))
    assert_same(make(2, 3, 65).new_zeros(5, 1, 65), torch.zeros(5, 1, 65))


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_zeros_of_a_dtype(dtype):
    assert_same(make(4, 65).new_zeros(3, 65, dtype=dtype), torch.zeros(3, 65, dtype=dtype))


def test_empty_chunk_of_fsdp():
    empty = make(4, 65).new_empty(0)
    assert isinstance(empty, NF4Tensor)
    assert empty.shape == (0,)
    assert empty.record.shape == (0, make(4, 65).spec.pitch)
    assert empty.dequantize().shape == (0,)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((4, 64), {}),
        ((65,), {}),
        ((2, 4, 65), {}),
        ((), {}),
        ((4, 65), {"dtype": torch.int64}),
        ((4, 65), {"dtype": torch.float64}),
    ],
)
def test_sizes_and_dtypes_without_such_rows_are_dense(size, options):
    q = make(4, 65)
    zeros = q.new_zeros(size, **options)
    assert type(zeros) is torch.Tensor
    assert torch.equal(zeros, torch.zeros(size, **options))
    empty = q.new_empty(size, **options)
    assert type(empty) is torch.Tensor
    assert (empty.shape, empty.dtype) == (zeros.shape, zeros.dtype)


@pytest.mark.parametrize(
    "make_like",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda w: torch.full_like(w, 2.5),
        lambda w: torch.zeros_like(w, dtype=torch.int32),
        lambda w: w.new_ones(3, 65),
        lambda w: w.new_full((4, 65), 1.5),
        lambda w: w.new_tensor([1.0, 2.0]),
        lambda w: torch.empty_like(w, dtype=torch.float64).zero_(),
        lambda w: torch.empty_like(w.mT).zero_(),
        lambda w: w.mT.new_zeros(65, 4),
        lambda w: w.view(-1).new_zeros(7),
        lambda w: w.new_empty_strided((2, 65), (65, 1)).zero_(),
    ],
)
def test_other_likes_are_dense_and_decode_nothing(make_like):
    q = make(4, 65, dtype=torch.bfloat16)
    found = make_like(q)
    assert type(found) is torch.Tensor
    assert torch.equal(found, make_like(q.dequantize()))
    assert found.dtype == make_like(q.dequantize()).dtype


def test_random_likes_are_dense():
    q = make(4, 65)
    for make_like in (torch.rand_like, torch.randn_like):
        found = make_like(q)
        assert type(found) is torch.Tensor
        assert (found.shape, found.dtype) == (q.shape, q.dtype)


def test_empty_rows_are_valid_ones():
    """A float write keeps the phase of a row, so that one of any bytes would stay broken."""
    q, weight = make(4, 200, scale_block_size=2), dense(4, 200, seed=1)
    for empty in (
        torch.empty_like(q),
        q.new_empty(4, 200),
        q.to("meta").new_empty(4, 200, device="cpu"),
    ):
        with torch.no_grad():
            assert_same(empty, torch.zeros(4, 200))
            empty.data.copy_(make(4, 200, scale_block_size=2))
        assert torch.equal(empty.record, q.record)
    empty = torch.empty_like(q.to("meta"), device="cpu")
    with pytest.warns(NF4TensorWarning, match="rounds"):
        empty.copy_(weight)
    assert torch.equal(empty.record, make(4, 200, seed=1, scale_block_size=2).record)


def test_like_rows_of_imported_scales():
    q = make_dynamic8(3)
    assert_same(q.new_zeros(2, 64), torch.zeros(2, 64))
    assert_same(torch.empty_like(q), torch.zeros(3, 64))


# Accumulators


ACCUMULATE = {
    "+=": lambda h, x: h.__iadd__(x),
    "add_": lambda h, x: h.add_(x, alpha=2),
    "sub_": lambda h, x: h.sub_(x),
    "mul_": lambda h, x: h.mul_(2.0),
    "copy_": lambda h, x: h.copy_(x),
    "detached": lambda h, x: h.detach().add_(x),
    "data": lambda h, x: h.data.add_(x),
    "one row": lambda h, x: h[0].add_(x[0]),
    "some rows": lambda h, x: h[:2].add_(x[:2]),
    "flat": lambda h, x: h.view(-1).add_(x.view(-1)),
    "transposed": lambda h, x: h.t().add_(x.t()),
    "assignment": lambda h, x: h.__setitem__(0, x[0]),
}


@pytest.mark.parametrize("accumulate", ACCUMULATE.values(), ids=ACCUMULATE)
def test_accumulating_into_new_zeros_is_refused(accumulate):
    h, x = make(4, 65).new_zeros(3, 65), dense(3, 65)
    with pytest.raises(UnsupportedError, match=r"make the accumulator with torch.zeros"):
        accumulate(h, x)
    assert_same(h, torch.zeros(3, 65))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_new_zeros_that_rows_were_copied_into_are_weights():
    q = make(4, 65)
    padded = q.new_zeros(6, 65)
    padded.narrow(0, 0, 4).copy_(q)
    local = padded.narrow(0, 0, 4)
    local.add_(1.0)
    assert_same(local, q.clone().add_(1.0))
    assert_same(q.new_zeros(3, 65) + dense(3, 65), dense(3, 65))
    assert_same(q.new_zeros(3, 65).zero_(), torch.zeros(3, 65))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_empty_shards_take_writes_as_the_filled_ones_of_other_ranks():
    local = make(4, 65).new_zeros(2, 65).narrow(0, 0, 0)
    local.add_(torch.ones(0, 65))
    local.copy_(torch.ones(0, 65))
    local.copy_(make(0, 65))


# Padding


@pytest.mark.parametrize(
    "padding", [(0, 0, 0, 3), (0, 0, 2, 3), (0, 0, 2, 0), (0, 0, 1, 0, 0, 2), (0, 0), ()]
)
def test_padding_of_rows_writes_zero_rows(padding):
    q = make(2, 3, 65)
    found = F.pad(q, padding)
    assert isinstance(found, NF4Tensor)
    assert_same(found, F.pad(q.dequantize(), padding))
    assert not shares_memory(found, q)


@pytest.mark.parametrize("padding", [(1, 0), (0, 2, 0, 1), (0, 0, 0, -1), (0, 0, -1, 2)])
def test_other_padding_decodes(padding):
    q = make(3, 65)
    with pytest.warns(NF4TensorWarning, match="constant_pad_nd"):
        assert_same(F.pad(q, padding), F.pad(q.dequantize(), padding))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_other_modes_of_padding_decode(mode):
    """Circular padding writes into column slices of what `new_empty` made: they would be lost."""
    q = make(1, 3, 4, 4)
    for padding in ((-1, 1, -2, 1), (1, 1, 1, 1)) if mode == "circular" else ((1, 1, 1, 1),):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NF4TensorWarning)
            found = F.pad(q, padding, mode)
        assert_same(found, F.pad(q.dequantize(), padding, mode))
    fallback._warned.clear()
    with pytest.warns(NF4TensorWarning, match=f"{mode} padding decodes"):
        F.pad(q, (1, 1, 1, 1), mode)


def test_padding_with_another_value_decodes():
    q = make(3, 65)
    with pytest.warns(NF4TensorWarning, match="constant_pad_nd"):
        found = F.pad(q, (0, 0, 0, 1), value=1.0)
    assert_same(found, F.pad(q.dequantize(), (0, 0, 0, 1), value=1.0))
