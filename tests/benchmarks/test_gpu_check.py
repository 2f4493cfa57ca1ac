"""The GPU check's dry run, and how it takes sections that fail, die, hang or have no time."""

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nf4tensor.errors import NF4TensorError
from nf4tensor.kernels import native, ops

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("gpu_check", "gpu_worker", "gpu_exactness", "gpu_kernels", "gpu_timing", "gpu_limits")
BAD_SECTIONS = """
import os, time

def raises(check):
    check.row("some", {"found": 1})
    check.at("the place")
    raise ValueError("this is wrong")

def dies(check):
    check.row("some", {"found": 2})
    check.at("the grave")
    os._exit(3)

def hangs(check):
    check.at("the wait")
    time.sleep(600)

def works(check):
    check.left_out["somebody"] = "not there"
    check.row("some", {"found": 3, "goal": ">= 4", "met": "no"})
"""


@pytest.fixture(scope="module")
def gpu():
    """The modules of the check, importable as the script imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Run the script on the nf4tensor that is imported here."""
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--skip-build", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def test_dry_run(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--no-peers", "--seconds", "280"]
    result = run(*arguments, "--results", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "gpu-check-cpu.json").read_text())
    assert {"torch", "command", "device"} <= content.keys()
    sections = content["sections"]
    skipped = {name for name, found in sections.items() if found["status"] == "skipped"}
    assert skipped == {"mappings", "graph"}
    assert {found["status"] for name, found in sections.items() if name not in skipped} == {"ok"}
    bits = [row for found in sections.values() for row in found["tables"].get("bits", [])]
    assert len(bits) > 15
    assert all(row["differ"] == 0 < row["cases"] for row in bits)
    assert sections["dequantize"]["left out"]["bitsandbytes"] == "--no-peers"
    assert "goals met: 0 of 0" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named(tmp_path):
    result = run("--results", str(tmp_path))
    assert result.returncode == 1
    assert "sees no CUDA device: run this on a machine with a GPU" in result.stdout
    content = json.loads((tmp_path / "gpu-check-cuda.json").read_text())
    assert content["sections"]["exactness"] == {
        "seconds": 0.0,
        "status": "skipped",
        "because": "build failed",
    }


def test_what_a_bad_section_does_is_told_and_the_next_one_runs(gpu, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_sections.py").write_text(BAD_SECTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("raises", "dies", "hangs", "works")
    sections = {name: (f"bad_sections:{name}", 30) for name in names}
    sections["hangs"] = ("bad_sections:hangs", 8)  # seconds, of which the new process takes some
    monkeypatch.setattr(gpu.gpu_check, "SECTIONS", sections)
    arguments = ["--device", "cpu", "--skip-build", "--results", str(tmp_path)]
    assert gpu.gpu_check.main(arguments) == 1
    found = json.loads((tmp_path / "gpu-check-cpu.json").read_text())["sections"]
    statuses = [found[name]["status"] for name in names]
    assert statuses == ["failed", "failed", "failed", "ok"]
    assert found["raises"]["because"].startswith("ValueError: this is wrong")
    assert "(at the place)" in found["raises"]["because"]
    assert "exit status 3, see above\n(at the grave)" in found["dies"]["because"]
    assert "its time is over" in found["hangs"]["because"]
    rows = [found[name]["tables"]["some"][0]["found"] for name in ("raises", "dies", "works")]
    assert rows == [1, 2, 3]
    printed = capsys.readouterr().out
    assert "goals met: 0 of 1\nnot met: some: found 3, goal >= 4, met no" in printed
    assert "left out: somebody: not there" in printed


def test_without_time_every_section_is_skipped_by_name(gpu, tmp_path):
    arguments = ["--device", "cpu", "--skip-build", "--seconds", "0", "--results", str(tmp_path)]
    assert gpu.gpu_check.main(arguments) == 0
    sections = json.loads((tmp_path / "gpu-check-cpu.json").read_text())["sections"]
    assert list(sections) == list(gpu.gpu_check.SECTIONS)
    assert {found["because"] for found in sections.values()} == {"no time left"}


def test_old_torch_is_refused(gpu):
    with pytest.raises(gpu.gpu_check.CheckError, match=r"torch is 2\.9\.1, expected 2\.11"):
        gpu.gpu_check.check_facts(SimpleNamespace(device="cpu"), {"torch": "2.9.1"})


def test_commands_that_fail_or_take_long(gpu):
    def told(code: str, seconds: float = 60.0) -> str:
        command = [sys.executable, "-c", code]
        return gpu.gpu_check.run_command(command, dict(os.environ), time.monotonic() + seconds)

    assert told("print(1)") == ""
    assert told("print(1); raise SystemExit(2)") == "1\nexit status 2"
    with pytest.raises(TimeoutError, match="its time is over"):
        told("import time; time.sleep(60)", 0.5)
    missing = gpu.gpu_check.run_command(["no-such-program"], {}, time.monotonic() + 1)
    assert "no-such-program" in missing


def test_build_is_for_the_gpu_at_hand(gpu, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        gpu.gpu_check, "run_command", lambda command, environment, until: seen.append(environment)
    )
    facts = {"capability": "90", "nvcc": None}
    said = gpu.gpu_check.build(tmp_path / "package", SimpleNamespace(device="cuda"), facts, 0.0)
    assert said.startswith("built by")
    assert {environment["CUDAARCHS"] for environment in seen} == {"90-real"}
    assert {environment["NF4TENSOR_CUDA"] for environment in seen} == {"ON"}
    assert (tmp_path / "package" / "nf4tensor" / "kernels" / "ops.py").exists()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("c++"), reason="needs CMake")
def test_build_without_a_build_backend(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.gpu_check.importlib.util, "find_spec", lambda name: None)
    options, until = SimpleNamespace(device="cpu"), time.monotonic() + 500
    assert gpu.gpu_check.build(tmp_path / "package", options, {}, until) == "built by CMake"
    assert (tmp_path / "package" / "nf4tensor" / "_C.so").exists()
    assert (tmp_path / "package" / "nf4tensor" / "__init__.py").exists()


def test_difference_is_of_bits_but_for_those_of_a_nan(gpu):
    difference = gpu.gpu_exactness.difference
    one = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    same = one.clone()
    same.view(torch.int32)[0, 1] ^= 1
    assert difference(one, same) is None
    other = one.clone()
    other[1, 0] = -0.0
    assert difference(other, one) == "1 of 4, the first at (1, 0): -0.0, expected 0.0"


# What only a GPU runs, with a GPU that is pretended


class Pretended(str):
    """A device that torch takes for the CPU, and the sections for a GPU."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return other == "cuda"


@pytest.fixture
def check(gpu, monkeypatch):
    """What a section is given; calls are made where a GPU would replay them."""

    def tune(mapping, max_blocks=0):
        if mapping == "staged":
            raise NF4TensorError("this GPU has no such stores")

    properties = SimpleNamespace(multi_processor_count=2, L2_cache_size=1 << 10)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.5
    )
    pretended = {
        "get_device_properties": lambda device: properties,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": lambda enable_timing: event,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda graph, stream=None: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "mem_get_info": lambda: (1 << 40, 1 << 40),
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(native, "tune_dequantize", tune)
    monkeypatch.setattr(native, "fuse_linear", lambda max_inputs: None)
    monkeypatch.setattr(gpu.gpu_kernels, "launches_of", lambda check, run: 1)
    monkeypatch.setattr(gpu.gpu_timing, "FLUSH_BYTES", 1 << 10)
    sent = SimpleNamespace(send=lambda message: None)
    options = SimpleNamespace(device=Pretended("cpu"), quick=True, no_peers=True)
    return gpu.gpu_worker.Check(sent, options, None, 60.0)


def test_mappings_are_timed_beside_each_other(gpu, check):
    assert check.run("gpu_kernels:mappings")["status"] == "ok"
    assert "tune_dequantize('staged')" in check.left_out
    (rows, _) = check._tables.values()
    timed = [row["mapping"] for row in rows]
    assert timed[:4] == ["copy_", "default", "direct", "pair"]
    assert rows[0]["of copy"] == 1.0


def test_fused_products_are_timed_beside_decoded_ones(gpu, check):
    assert check.run("gpu_kernels:linear")["status"] == "ok"
    rows = check._tables["linear 64x512, bfloat16"]
    assert [row["contestant"] for row in rows][:4] == ["ours", "fused", "decoded", "torch"]
    assert check._tables["crossover"][0]["fused is faster up to rows"] == 16


def test_goals_are_those_of_full_sizes_on_a_gpu(gpu, check, monkeypatch):
    check.judges = True
    monkeypatch.setattr(gpu.gpu_kernels, "COPY_GOALS", {(64, 512): 0.5, (64, 1024): 0.9})
    assert check.run("gpu_kernels:dequantize")["status"] == "ok"
    met = [[row["met"] for row in rows if "met" in row] for title, rows in check._tables.items()]
    assert met == [["yes", "yes"], ["yes", "yes"], ["no", "no"], ["yes"]]


def test_graphs_are_replayed_over_other_inputs(gpu, check):
    """The pretended graph replays nothing: each op's output stays empty, which is noticed."""
    outcome = check.run("gpu_limits:graph")
    assert outcome["status"] == "failed"
    assert "graph of dequantize_into" in outcome["because"]
    assert len(check._tables["bits"]) == 4 + 2 * len(gpu.gpu_limits.GRAPH_ROWS)


def test_a_gpu_with_other_bits_is_noticed(gpu, check, monkeypatch):
    real = ops.dequantize

    def wrong(record, spec, dtype):
        weight = real(record, spec, dtype)
        weight.view(-1)[-1] = 3.0
        return weight

    monkeypatch.setattr(ops, "dequantize", wrong)
    assert check.run("gpu_limits:huge")["status"] == "failed"
    assert "dequantize, huge" in {row["of"] for row in check._tables["differences"]}
