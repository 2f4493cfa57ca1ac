"""Questions about memory, and values for other libraries."""

import numpy as np
import pytest
import torch
from torch import nn

from nf4tensor import NF4TensorWarning, quantize_
from nf4tensor.errors import UnsupportedError
from tests.tensor.weights import assert_same, make


def test_address_is_that_of_the_record():
    q = make(4, 65)
    assert q.data_ptr() == q.record.data_ptr() != 0
    assert q[1].data_ptr() == q.data_ptr() + q.spec.pitch
    assert q.clone().data_ptr() != q.data_ptr()
    assert nn.Parameter(q, requires_grad=False).data_ptr() == q.data_ptr()


def test_sharing_between_processes():
    q = make(4, 65)
    before = q.record.clone()
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert q.t().is_shared()
    assert torch.equal(q.record, before)
    model = quantize_(nn.Sequential(nn.Linear(64, 64)), progress=False)
    model.share_memory()
    assert model[0].weight.is_shared()


def test_pinning_is_asked_of_the_record():
    assert not make(4, 65).is_pinned()
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError):
            make(4, 65).pin_memory()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize(
    "leave",
    [
        lambda w: w.numpy(),
        lambda w: np.asarray(w),
        lambda w: w.tolist(),
        lambda w: torch.from_dlpack(w),
        lambda w: np.from_dlpack(w),
    ],
)
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w[1], lambda w: w.t(), lambda w: w[:0]])
def test_values_for_other_libraries_are_decoded(leave, view):
    q = view(make(4, 65))
    with pytest.warns(NF4TensorWarning, match="decodes an NF4Tensor"):
        found = leave(q)
    assert_same(torch.as_tensor(found), torch.as_tensor(leave(q.dequantize())))


@pytest.mark.filterwarnings("ignore::nf4tensor.NF4TensorWarning")
def test_single_elements():
    q = make(4, 65)
    d = q.dequantize()
    assert q[1, 2].item() == d[1, 2].item()
    assert float(q[1, 2]) == float(d[1, 2])
    assert f"{q[1, 2]:.3f}" == f"{d[1, 2]:.3f}"
    assert bool(q[1, 2]) == bool(d[1, 2])
    with pytest.raises(RuntimeError):
        bool(q)
    assert d[1, 2].item() in q
    assert 1e9 not in q


@pytest.mark.parametrize(
    "look",
    [
        lambda w: w.apply_(lambda element: element),
        lambda w: w.map_(w, lambda one, other: one),
        lambda w: w.storage(),
    ],
)
def test_elements_in_memory_are_refused(look):
    with pytest.raises(UnsupportedError, match=r"has no memory of floats.*use dequantize\(\)"):
        look(make(4, 65))


def test_what_reads_memory_below_python_is_an_error_and_no_crash():
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(make(4, 65))


def test_questions_that_every_tensor_answers():
    q = make(4, 65, dtype=torch.bfloat16)
    d = q.dequantize()
    for ask in (
        lambda w: w.dtype,
        lambda w: w.device,
        lambda w: w.layout,
        lambda w: w.shape,
        lambda w: w.dim(),
        lambda w: w.numel(),
        len,
        lambda w: w.is_leaf,
        lambda w: w.requires_grad,
        lambda w: w.is_floating_point(),
        lambda w: w.element_size(),
        lambda w: w.type(),
        lambda w: w.grad,
        lambda w: w.is_meta,
        lambda w: torch.is_tensor(w),
        lambda w: torch.result_type(w, 1.0),
    ):
        assert ask(q) == ask(d)
    assert hash(q) == id(q)


def test_safetensors_is_refused(tmp_path):
    """It takes the address for that of as many floats as the tensor has, and reads beyond it."""
    safetensors = pytest.importorskip("safetensors.torch", reason="the extra `hf` is missing")
    q = make(16, 256)
    with pytest.raises(UnsupportedError, match=r"safetensors cannot write.*dequantize_\(model\)"):
        safetensors.save_file({"w": q}, tmp_path / "w.safetensors")
    with pytest.raises(UnsupportedError, match=r"safetensors cannot write"):
        safetensors.save({"w": q})
