"""Who computes what where: the choice, on machines that are only pretended."""

import pytest
import torch

from nf4tensor.errors import NF4TensorError
from nf4tensor.kernels import native, select, triton_backend

OPS = tuple(select._REFERENCE)
NOT_COMPILED = "the library was compiled without nvcc, or with NF4TENSOR_CUDA=OFF"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that chooses on some machine: {(op, device): (backend, reason)}."""

    def choose(backend="auto", cuda="13.0", hip=None, xpu=None, compiled=None, triton=None):
        registered = []

        class Library:
            def impl(self, name, kernel, key):
                registered.append((name, key))

        monkeypatch.setenv("NF4TENSOR_BACKEND", backend)
        monkeypatch.setattr(select, "library", Library())
        monkeypatch.setattr(select, "_choices", [])
        for name, version in {"cuda": cuda, "hip": hip, "xpu": xpu}.items():
            monkeypatch.setattr(torch.version, name, version)
        monkeypatch.setattr(native, "register", lambda device: registered.append(("all", device)))
        monkeypatch.setattr(native, "unavailable_because", lambda: "no library")
        monkeypatch.setattr(native, "cuda_unavailable_because", lambda: compiled)
        monkeypatch.setattr(triton_backend, "unavailable_because", lambda: triton)
        select.register_backends()
        table = {(one.op, one.device): (one.backend, one.reason) for one in select.table()}
        return table, registered

    return choose


def backends(table, device):
    return {op: table[op, device][0] for op in OPS}


def test_the_compiled_library_comes_first(machine):
    table, registered = machine()
    assert backends(table, "cuda") == dict.fromkeys(OPS, "cuda")
    assert ("all", "cuda") in registered


def test_then_comes_triton(machine):
    table, registered = machine(compiled=NOT_COMPILED)
    expected = {op: "triton" if op in select._TRITON else "reference" for op in OPS}
    assert backends(table, "cuda") == expected
    assert NOT_COMPILED in table["dequantize", "cuda"][1]
    assert ("dequantize", "CUDA") in registered
    assert ("quantize", "CUDA") not in registered


def test_then_the_reference(machine):
    table, _ = machine(compiled=NOT_COMPILED, triton="triton is not installed")
    assert backends(table, "cuda") == dict.fromkeys(OPS, "reference")
    assert table["linear", "cuda"][1] == "triton is not installed"


def test_rocm_and_xpu_have_triton(machine):
    table, registered = machine(
        cuda=None, hip="6.4", xpu="20250", compiled="this torch is not built for CUDA"
    )
    assert table["linear", "cuda"][0] == table["linear", "xpu"][0] == "triton"
    assert ("linear", "XPU") in registered


def test_a_backend_can_be_forced(machine):
    assert machine("triton")[0]["dequantize", "cuda"][0] == "triton"
    assert machine("cuda")[0]["dequantize", "cuda"][0] == "cuda"
    table, _ = machine("reference", xpu="20250")
    assert {backend for backend, _ in table.values()} == {"reference"}


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("cuda", {"compiled": NOT_COMPILED}, "is cuda, but the compiled kernels cannot be used"),
        ("triton", {"triton": "not installed"}, "is triton, but Triton cannot be used: not inst"),
        ("triton", {"cuda": None}, "this torch is not built for CUDA or ROCm"),
        ("cpu", {}, "is cpu, but the compiled library cannot be used: no library"),
        ("gpu", {}, "expected one of auto, cpu, cuda, triton, reference"),
    ],
)
def test_what_is_not_there_is_refused(machine, backend, options, words):
    with pytest.raises(NF4TensorError, match=words):
        machine(backend, **options)


def test_the_reason_against_compiled_cuda_kernels(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert native.cuda_unavailable_because() == "this torch is not built for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    without_cuda = native._Library(object(), None)  # a library that lacks the symbol
    monkeypatch.setattr(native, "_load", lambda: without_cuda)
    assert native.cuda_unavailable_because() == NOT_COMPILED
