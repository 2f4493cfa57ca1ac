"""`to_nf4`: what it takes, what it refuses, and that shards are quantized as the whole is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nf4tensor import NF4Spec, NF4Tensor, to_nf4
from nf4tensor.errors import DTypeError, ShapeError, SpecError, UnsupportedError, WeightError
from tests.strategies import DTYPES, PROPERTY
from tests.tensor.weights import assert_same, dense, make

LARGE = 1 << 20
SHAPES = [
    (896, 896),
    (192, 576),
    pytest.param((4304, 1152), id="4304-1152"),
    (1280, 1280),
    pytest.param((151936, 896), marks=pytest.mark.slow),
    (1, 64),
    (7, 33),
    (4, 96, 64),
    (1, 1),
    (2, 1),
    (3, 5),
    (8, 64),
    (9, 65),
    (67, 96),
    (16, 1000),
    (100, 100),
    (5, 4097),
    (13, 2, 80),
    (1, 3, 16),
    (2, 3, 4, 17),
    (63, 320),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_quantizing_a_shard_is_cutting_the_whole(shape):
    weight = dense(*shape, dtype=torch.bfloat16)
    whole = to_nf4(weight)
    for world_size in range(1, 9):
        pieces, shards = weight.chunk(world_size), whole.chunk(world_size)
        assert len(pieces) == len(shards)
        ranks = range(len(pieces))
        if weight.numel() > LARGE:  # rows do not know of each other; that takes no more ranks
            ranks = sorted({0, len(pieces) // 2, len(pieces) - 1})
        for rank in ranks:
            assert torch.equal(to_nf4(pieces[rank]).record, shards[rank].record)


@PROPERTY
@given(num_rows=st.integers(0, 40), count=st.integers(1, 45))
def test_chunks_have_the_sizes_of_torch(num_rows, count):
    q = make(num_rows, 20)
    found, expected = q.chunk(count), q.dequantize().chunk(count)
    assert len(found) == len(expected)
    for piece, expected_piece in zip(found, expected, strict=True):
        assert isinstance(piece, NF4Tensor)
        assert_same(piece, expected_piece)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_detached_and_like_the_weight(dtype):
    weight = nn.Parameter(dense(6, 100, dtype=dtype))
    q = to_nf4(weight)
    assert type(q) is NF4Tensor
    assert (q.shape, q.dtype, q.device) == (weight.shape, dtype, weight.device)
    assert not q.requires_grad
    assert q.is_leaf
    assert q.spec == NF4Spec.for_weight(100)


STRIDED = {
    "transposed": lambda w: w.t(),
    "sliced rows": lambda w: w[33:],
    "every other row": lambda w: w[::2],
    "sliced columns": lambda w: w[:, 16:80],
    "odd columns": lambda w: w[3:, 7:30],
    "every other column": lambda w: w[:, ::2],
    "expanded": lambda w: w[:1].expand(7, -1),
    "permuted": lambda w: w.view(4, 24, 96).permute(1, 2, 0),
    "one column": lambda w: w[:, 5],
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(view, dtype):
    weight = view(dense(96, 96, dtype=dtype))
    q = to_nf4(weight)
    assert torch.equal(q.record, to_nf4(weight.contiguous()).record)
    assert q.is_contiguous()
    assert q.shape == weight.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64, torch.bool])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(DTypeError, match=f"tensor.dtype is {dtype}, expected float32.*cast it"):
        to_nf4(torch.ones(2, 64).to(dtype))


@pytest.mark.parametrize("shape", [(), (4, 0), (0,)])
def test_weights_without_columns_are_refused(shape):
    with pytest.raises(ShapeError, match="at least one dimension and one column"):
        to_nf4(torch.ones(shape))


@pytest.mark.parametrize("block_size", [0, 8, 24, 63, 8192, -64, 64.0, "64", None])
def test_unknown_block_sizes_are_refused(block_size):
    with pytest.raises(SpecError, match="expected a power of two from 16 to 4096"):
        to_nf4(torch.ones(2, 64), block_size)


@pytest.mark.parametrize("size", [0, -1, 2.5])
@pytest.mark.parametrize("keyword", ["scale_block_size", "scaler_block_size"])
def test_unknown_scale_block_sizes_are_refused(keyword, size):
    with pytest.raises(SpecError, match=f"scale_block_size is {size}, expected a positive number"):
        to_nf4(torch.ones(2, 64), **{keyword: size})


def test_unknown_codebook_is_refused():
    with pytest.raises(SpecError, match="quant_type is 'int4', expected one of nf4, fp4"):
        to_nf4(torch.ones(2, 64), quant_type="int4")


def test_options_reach_the_spec():
    weight = dense(3, 1024)
    assert to_nf4(weight, 32, 8).spec == NF4Spec(1024, 32, "square8", 8, 4)
    assert to_nf4(weight, 128, None).spec == NF4Spec(1024, 128, "float32", 0, 0)
    assert to_nf4(weight, quant_type="fp4").spec == NF4Spec.for_weight(1024, quant_type="fp4")
    assert to_nf4(weight, block_size=16, scale_block_size=3).spec.segment_length == 3


def test_keyword_of_torchao_is_accepted():
    weight = dense(3, 1024)
    assert torch.equal(to_nf4(weight, scaler_block_size=4).record, to_nf4(weight, 64, 4).record)


def test_quantized_weights_are_refused():
    with pytest.raises(UnsupportedError, match=r"quantized already.*pass tensor.dequantize\(\)"):
        to_nf4(make(2, 64), 32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_weights_are_refused_with_count_and_place(value, dtype):
    weight = dense(3, 5, 64, dtype=dtype)
    weight[1, 2, 7] = weight[1, 2, 40] = weight[2, 0, 0] = value
    words = rf"shape \(3, 5, 64\) has 3 NaN or infinite elements, the first at \(1, 2, 7\): {value}"
    with pytest.raises(WeightError, match=words):
        to_nf4(weight)
    with pytest.raises(WeightError, match=r"the first at \(7, 2\)"):
        to_nf4(weight[1].t())


def test_largest_numbers_are_finite():
    for dtype in DTYPES:
        weight = torch.full((1, 64), torch.finfo(dtype).max, dtype=dtype)
        assert to_nf4(weight).dequantize().isfinite().all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (64,), (1, 64), (2, 3, 4, 64)])
def test_any_number_of_rows(shape):
    q = make(*shape)
    assert q.shape == shape
    assert q.dequantize().shape == shape
    assert_same(q.reshape(-1, 64), make(*shape).dequantize().reshape(-1, 64))


def test_meta_and_fake_weights_give_shapes():
    q = to_nf4(torch.ones(4, 100, device="meta"))
    assert (q.shape, q.record.shape, q.is_meta) == ((4, 100), (4, q.spec.pitch), True)
    with FakeTensorMode():
        q = to_nf4(torch.ones(4, 100, dtype=torch.bfloat16))
        assert (q.shape, q.dtype) == ((4, 100), torch.bfloat16)
        assert q.dequantize().shape == (4, 100)


@pytest.mark.parametrize("thing", [[1.0], torch.nn.Linear(2, 2), torch.eye(3).to_sparse()])
def test_what_is_no_dense_tensor_is_refused(thing):
    with pytest.raises(DTypeError, match=r"expected a dense torch.Tensor, got .*: convert it"):
        to_nf4(thing)
