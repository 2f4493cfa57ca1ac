"""Who computes what where: the choice, on machines that are only pretended."""

import subprocess
import sys
from collections import Counter

import pytest
import torch

from nf4tensor.errors import NF4TensorError
from nf4tensor.kernels import native, select, triton_backend

OPS = tuple(select._REFERENCE)
NOT_COMPILED = "the library was compiled without nvcc, or with NF4TENSOR_CUDA=OFF"
BUILD = "80-real,86-real,89-real,90-real,100-real,120"  # what CMakeLists.txt compiles for


class CpuLibrary:
    """A library that was compiled without nvcc."""


class CudaLibrary:
    """A library for some CUDA devices."""

    nf4tensor_register_cuda = None

    def __init__(self, architectures):
        self.nf4tensor_cuda_architectures = architectures.encode


@pytest.fixture
def machine(monkeypatch):
    """Return a function that chooses on some machine: {(op, device): (backend, reason)}."""

    def choose(backend="auto", *, build=BUILD, triton=True, devices=(), **versions):
        registered = []
        versions = {"cuda": "13.0", "hip": None, "xpu": None} | versions

        class Ops:
            def impl(self, name, kernel, key):
                registered.append((name, key))

        def start(of_cuda):
            if devices:
                of_cuda()
                of_cuda()  # torch does that where it failed to initialize later on

        monkeypatch.setenv("NF4TENSOR_BACKEND", backend)
        monkeypatch.setattr(select, "library", Ops())
        monkeypatch.setattr(select, "_choices", {})
        select._register_for_cuda.cache_clear()
        for name, version in versions.items():
            monkeypatch.setattr(torch.version, name, version)
        monkeypatch.setattr(torch.cuda, "_lazy_call", start)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: devices[index])
        library = CpuLibrary() if build is None else CudaLibrary(build)
        monkeypatch.setattr(native, "_load", lambda: native._Library(library, None))
        monkeypatch.setattr(native, "register", lambda device: registered.append(("all", device)))
        monkeypatch.setattr(native, "unavailable_because", lambda: "no library")
        monkeypatch.setattr(triton_backend, "find_spec", lambda name: triton or None)
        try:
            select.register_backends()
        finally:
            select._register_for_cuda.cache_clear()
        table = {(one.op, one.device): (one.backend, one.reason) for one in select.table()}
        assert set(Counter(registered).values()) <= {1}
        return table, registered

    return choose


def backends(table, device):
    return {op: table[op, device][0] for op in OPS}


TRITON_FIRST = {op: "triton" if op in select._TRITON else "reference" for op in OPS}


def test_the_compiled_library_comes_first(machine):
    table, registered = machine(devices=[(9, 0)])
    assert backends(table, "cuda") == dict.fromkeys(OPS, "cuda")
    assert ("all", "cuda") in registered


def test_then_comes_triton(machine):
    table, registered = machine(build=None, devices=[(9, 0)])
    assert backends(table, "cuda") == TRITON_FIRST
    assert NOT_COMPILED in table["dequantize", "cuda"][1]
    assert ("dequantize", "CUDA") in registered
    assert ("quantize", "CUDA") not in registered


def test_then_the_reference(machine):
    table, _ = machine(build=None, triton=False, devices=[(9, 0)])
    assert backends(table, "cuda") == dict.fromkeys(OPS, "reference")
    assert table["linear", "cuda"][1].startswith("triton is not installed")


def test_nothing_is_registered_for_cuda_before_it_has_started(machine):
    """Its devices are not known, and asking for them would start it."""
    table, registered = machine()
    assert backends(table, "cuda") == dict.fromkeys(OPS, "cuda")
    assert not [key for _, key in registered if key.lower() == "cuda"]


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        (BUILD, (8, 0)),
        (BUILD, (8, 7)),  # the machine code of 8.6
        (BUILD, (10, 3)),
        (BUILD, (12, 1)),
        (BUILD, (13, 0)),  # PTX of 12.0
        ("90-virtual", (10, 0)),
        ("90a-real", (9, 0)),
        ("100f", (10, 3)),
        ("native", (7, 5)),  # nobody knows
    ],
)
def test_devices_that_the_library_was_compiled_for(machine, build, capability):
    table, _ = machine(build=build, devices=[capability])
    assert backends(table, "cuda") == dict.fromkeys(OPS, "cuda")


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        (BUILD, (7, 5)),
        (BUILD, (11, 0)),
        ("90-real", (8, 0)),
        ("90-real", (10, 0)),
        ("90-virtual", (8, 9)),
        ("90a", (10, 0)),
        ("100a", (10, 3)),
        ("103f", (10, 0)),
        ("100f", (11, 0)),
    ],
)
def test_devices_that_it_was_not_compiled_for_have_triton(machine, build, capability):
    table, registered = machine(build=build, devices=[(9, 0), capability])
    assert backends(table, "cuda") == TRITON_FIRST
    assert ("all", "cuda") not in registered
    reason = table["dequantize", "cuda"][1]
    if (build, capability) == (BUILD, (7, 5)):
        assert reason == (
            f"Triton; device 1 has compute capability 7.5, and the library was compiled for {BUILD}"
        )
    assert "has compute capability" in reason


def test_devices_that_triton_has_no_code_for_have_the_reference(machine):
    table, registered = machine(devices=[(6, 1)])
    assert backends(table, "cuda") == dict.fromkeys(OPS, "reference")
    reason = "device 0 has compute capability 6.1, and Triton's code needs 7.0"
    assert table["linear", "cuda"][1] == reason
    assert not [key for _, key in registered if key.lower() == "cuda"]


def test_rocm_and_xpu_have_triton(machine):
    table, registered = machine(cuda=None, hip="6.4", xpu="20250", devices=[(6, 0)])
    assert table["linear", "cuda"][0] == table["linear", "xpu"][0] == "triton"
    assert {("linear", "XPU"), ("linear", "CUDA")} <= set(registered)


def test_a_backend_can_be_forced(machine):
    for devices in ([], [(9, 0)]):
        assert machine("triton", devices=devices)[0]["dequantize", "cuda"][0] == "triton"
        assert machine("cuda", devices=devices)[0]["dequantize", "cuda"][0] == "cuda"
        table, _ = machine("reference", xpu="20250", devices=devices)
        assert {backend for backend, _ in table.values()} == {"reference"}


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("cuda", {"build": None}, "is cuda, but the compiled kernels cannot be used: the libr"),
        ("cuda", {"devices": [(7, 5)]}, r"compiled kernels cannot be used: device 0 .* 7\.5"),
        ("cuda", {"cuda": None}, "cannot be used: this torch is not built for CUDA"),
        ("triton", {"triton": False}, "is triton, but Triton cannot be used: triton is not inst"),
        ("triton", {"devices": [(6, 1)]}, r"but Triton cannot be used: device 0 .* 6\.1"),
        ("triton", {"cuda": None}, "this torch is not built for CUDA or ROCm"),
        ("cpu", {}, "is cpu, but the compiled library cannot be used: no library: unset it"),
        ("gpu", {}, "expected one of auto, cpu, cuda, triton, reference"),
    ],
)
def test_what_is_not_there_is_refused(machine, backend, options, words):
    with pytest.raises(NF4TensorError, match=words):
        machine(backend, **options)


def test_importing_the_package_does_not_start_cuda():
    code = "import torch, nf4tensor; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("capability", "is_fused"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_triton_multiplies_where_it_has_matrix_units(monkeypatch, capability, is_fused):
    triton_linear = pytest.importorskip("nf4tensor.kernels.triton_linear")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = triton_linear._has_matrix_units.__wrapped__(torch.device("cuda", 0))
    assert found == is_fused
    assert triton_linear._has_matrix_units.__wrapped__(torch.device("xpu", 0))
