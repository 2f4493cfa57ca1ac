"""The class: decoding, its views in words, `data`, copies and files."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nf4tensor import NF4Spec, NF4Tensor, NF4TensorWarning, to_nf4
from nf4tensor.errors import DTypeError, ShapeError, SpecError, WeightError
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same, dense, file_of, load, make, shares_memory

SPEC_WORDS = "NF4Spec(in_features=64, block_size=64, scale_kind='square8'"
VIEWS = {
    "rows": lambda q: q,
    "one row": lambda q: q[2],
    "some rows": lambda q: q[1:3],
    "transposed": lambda q: q.t(),
    "flat": lambda q: q.view(-1),
    "expanded": lambda q: q[:1].expand(5, -1),
    "cut": lambda q: q[:, 16:48],
    "empty": lambda q: q[:0],
    "parameter": lambda q: nn.Parameter(q, requires_grad=False),
    "trained parameter": lambda q: nn.Parameter(q),
}
each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@each_view
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_dequantize_has_the_shape_and_the_dtype(view, dtype):
    view = view(make(4, 64, dtype=torch.bfloat16))
    decoded = view.dequantize(dtype)
    assert type(decoded) is torch.Tensor
    assert decoded.dtype == (dtype or torch.bfloat16)
    assert decoded.shape == view.shape
    assert_same(view.get_original_weight(), view.dequantize(torch.bfloat16))


def test_dequantize_decodes_the_view():
    q = make(4, 64)
    d = q.dequantize()
    assert_same(q.t().dequantize(), d.t())
    assert_same(q.view(-1).dequantize(), d.view(-1))
    assert_same(q[1:3].dequantize(), d[1:3])
    assert_same(make(2, 3, 64).mT.dequantize(), make(2, 3, 64).dequantize().mT)


@pytest.mark.parametrize("view", ["rows", "transposed", "flat", "some rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_into(view, dtype):
    q = VIEWS[view](make(4, 64))
    out = torch.empty(q.shape, dtype=dtype)
    assert q.dequantize(out=out) is out
    assert_same(out, q.dequantize(dtype))
    strided = torch.empty(*reversed(q.shape), dtype=dtype).permute(*reversed(range(q.dim())))
    if view != "flat":
        assert_same(q.dequantize(out=strided), q.dequantize(dtype))


def test_dequantize_refuses_what_does_not_fit():
    q = make(4, 64)
    with pytest.raises(DTypeError, match=r"float64.*cast it first"):
        q.dequantize(torch.float64)
    with pytest.raises(DTypeError, match="pass one of them"):
        q.dequantize(torch.float16, out=torch.empty(4, 64))
    with pytest.raises(DTypeError, match="float64"):
        q.dequantize(out=torch.empty(4, 64, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"\(64, 4\), expected \(4, 64\)"):
        q.dequantize(out=torch.empty(64, 4))


def test_strides_are_those_of_the_decoded_weight():
    q = make(2, 6, 64)
    d = q.dequantize()
    for view in (lambda w: w, lambda w: w[:, ::2], lambda w: w.mT, lambda w: w[1, 3]):
        assert view(q).stride() == view(d).stride()
    assert not q.mT.is_contiguous()
    assert q[1].is_contiguous()


@each_view
def test_repr_says_what_it_is(view):
    view = view(make(4, 64))
    words = repr(view)
    assert words.startswith(f"NF4Tensor(shape={tuple(view.shape)}, dtype=torch.float32, device=cpu")
    assert f"nbytes={view.nbytes}" in words
    assert ("requires_grad=True" in words) == view.requires_grad
    assert ("view=" in words) == (view.view_kind != "rows")
    assert f"{view}" == words


def test_repr_names_the_spec_and_works_everywhere():
    q = make(4, 64)
    assert SPEC_WORDS in repr(q)
    assert "device=meta" in repr(q.to("meta"))
    assert "NF4Tensor(shape=(3,)" in repr(list(make(2, 3)))
    linear = nn.Linear(64, 4)
    linear.weight = nn.Parameter(q, requires_grad=False)
    assert repr(linear) == "Linear(in_features=64, out_features=4, bias=True)"
    with FakeTensorMode() as mode:
        assert "nbytes=256" in repr(mode.from_tensor(q))


def test_nbytes_are_the_true_bytes():
    assert make(4, 64).nbytes == 4 * 64
    assert make(4, 4096).nbytes == 4 * NF4Spec.for_weight(4096).pitch
    assert make(4, 64)[1].nbytes == 64


# data


def test_data_shares_the_record():
    q = make(4, 64)
    assert isinstance(q.data, NF4Tensor)
    q.data.zero_()
    assert not q.dequantize().any()


def test_data_takes_bytes_of_the_same_spec():
    q, other = make(4, 64), make(4, 64, seed=1)
    address = q.data_ptr()
    q.data = other
    assert q.data_ptr() == address
    assert torch.equal(q.record, other.record)
    with pytest.raises(SpecError, match=r"(?s)block_size=32.*block_size=64.*assign=True"):
        q.data = make(4, 64, block_size=32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_quantizes_into_place(dtype):
    q, weight = make(4, 64), dense(4, 64, dtype=dtype, seed=1)
    parameter = nn.Parameter(q)
    with pytest.warns(NF4TensorWarning, match="rounds to 4 bits"):
        parameter.data = weight
    assert torch.equal(q.record, to_nf4(weight).record)


def test_data_refuses_what_does_not_fit():
    q = make(4, 64)
    before = q.record.clone()
    with pytest.raises(ShapeError, match="replace the parameter instead"):
        q.data = dense(3, 64)
    with pytest.raises(ShapeError, match="on meta to an NF4Tensor"):
        q.data = dense(4, 64).to("meta")
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(DTypeError, match=r"cast it, or call dequantize_\(model\)"):
            q.data = dense(4, 64).to(dtype)
    with pytest.warns(NF4TensorWarning), pytest.raises(WeightError, match=r"1 NaN.*\(2, 5\)"):
        q.data = dense(4, 64).index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(torch.nan))
    assert torch.equal(q.record, before)


# Copies


@each_view
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), lambda q: load(file_of(q))],
)
def test_copies_keep_bytes_and_nature(view, duplicate):
    view = view(make(4, 64, dtype=torch.float16))
    twin = duplicate(view)
    assert type(twin) is NF4Tensor
    assert torch.equal(twin.record, view.record)
    assert (twin.spec, twin.view_kind) == (view.spec, view.view_kind)
    assert isinstance(twin, nn.Parameter) == isinstance(view, nn.Parameter)
    assert twin.requires_grad == view.requires_grad
    assert_same(twin, view)
    assert view.numel() == 0 or not shares_memory(twin, view)


@each_view
def test_shallow_copy_shares_memory(view):
    view = view(make(4, 64))
    twin = copy.copy(view)
    assert shares_memory(twin, view)
    assert isinstance(twin, nn.Parameter) == isinstance(view, nn.Parameter)
    assert twin.requires_grad == view.requires_grad
    assert_same(twin, view)


def test_deepcopy_keeps_what_is_tied():
    model = nn.ModuleList([nn.Linear(64, 4), nn.Linear(64, 4)])
    model[0].weight = model[1].weight = nn.Parameter(make(4, 64), requires_grad=False)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert not shares_memory(twin[0].weight, model[0].weight)


# Files


def test_file_of_a_view_holds_its_bytes_only():
    q = make(1000, 64)
    assert len(file_of(q)) > q.nbytes
    for view in (q[3], q[10:12], q[5:6].t(), q[7:8].view(1, 1, 64), q[:2, :16]):
        assert len(file_of(view)) < 4000
    assert_same(load(file_of(q[10:12])), q[10:12])


def test_unknown_format_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    newer = (64, 64, "square8", 1, 1, "nf4", 2)
    monkeypatch.setattr("nf4tensor.tensor.nf4_tensor.astuple", lambda spec: newer)
    file = file_of(make(4, 64))
    with pytest.raises(SpecError, match=r"format_version is 2, this nf4tensor reads 1"):
        load(file)


def test_files_load_onto_another_device():
    q = load(file_of(make(4, 64)), map_location="meta")
    assert q.is_meta
    assert q.record.is_meta


def test_whole_modules_are_saved():
    model = nn.Sequential(nn.Linear(64, 4))
    model[0].weight = nn.Parameter(make(4, 64), requires_grad=False)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded[0].weight.record, model[0].weight.record)
    assert isinstance(loaded[0].weight, nn.Parameter)
    assert_same(loaded(dense(2, 64)), model(dense(2, 64)))


def test_damaged_pickles_are_refused():
    q = make(4, 64)
    rebuild, (spec, record, *rest) = q.__reduce_ex__(4)
    with pytest.raises(ShapeError, match=r"expected \[\*, 64\] bytes"):
        rebuild(spec, record[:, :-1], *rest)
    with pytest.raises(DTypeError, match=r"expected torch.uint8"):
        rebuild(spec, record.float(), *rest)
    with pytest.raises(DTypeError, match=r"the saved dtype is torch.int32"):
        rebuild(spec, record, torch.int32, *rest[1:])
