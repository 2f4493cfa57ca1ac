"""Each benchmark, run on small shapes and without other packages: what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nf4tensor.kernels import native

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The folder that the runs of this file share."""
    return tmp_path_factory.mktemp("results")


def run(script: str, *arguments: str) -> str:
    """Run a script and return what it printed."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def quick(name: str, results: Path, *arguments: str) -> dict[str, list[dict]]:
    """Run a benchmark quickly and return its tables."""
    run(f"bench_{name}.py", "--quick", "--no-peers", "--results", str(results), *arguments)
    (path,) = results.glob(f"{name}-*.json")
    content = json.loads(path.read_text())
    assert content["skipped"]["bitsandbytes"] == "--no-peers"
    return content["tables"]


@pytest.fixture(scope="module")
def dequantize(results) -> dict[str, list[dict]]:
    """What the benchmark of dequantize wrote."""
    return quick("dequantize", results)


@pytest.fixture(scope="module")
def linear(results) -> dict[str, list[dict]]:
    """What the benchmark of linear wrote."""
    return quick("linear", results, "--threads", "1")


needs_kernels = pytest.mark.skipif(
    native.unavailable_because() is not None, reason="the script measures compiled kernels"
)


@needs_kernels
def test_dequantize(dequantize):
    (rows,) = dequantize.values()
    contestants = {row["contestant"] for row in rows}
    assert {f"{native.isa()}, square8 scales", "scalar, float32 scales", "copy_"} <= contestants
    assert {row["threads"] for row in rows} == {1, 2}
    assert all(row["ms"] > 0 for row in rows)


@needs_kernels
def test_quantize(results):
    rows, memory = quick("quantize", results, "--threads", "1").values()
    assert {native.isa(), "scalar", "reference"} == {row["contestant"] for row in rows}
    (ours,) = memory
    assert ours["contestant"] == "ours"
    assert "peak %" in ours or "does not tell" in ours["note"]


def test_linear(linear):
    assert set(linear) == {
        f"{direction}, 128x512, {dtype}"
        for direction in ("forward", "backward")
        for dtype in ("bfloat16", "float32")
    }
    for rows in linear.values():
        assert [row["rows"] for row in rows if row["contestant"] == "ours"] == [1, 4]


@needs_kernels
def test_roofline(dequantize, linear, results):
    pytest.importorskip("matplotlib")
    if not json.loads(next(results.glob("linear-*.json")).read_text())["roofs"]:
        pytest.skip("no C++ compiler, so no roofs")
    picture = results / "roofline.png"
    run("roofline.py", "--results", str(results), "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.hf
def test_sharding(results):
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="needs the extra hf")
    table, runs, memory, losses = quick("sharding", results, "--worlds", "2").values()
    assert len(table) == 4  # two bases, two shapes
    assert all(row["2 ranks"] == "ok" for row in table)
    assert all(row["gathered bytes"] > row["base bytes"] > 0 for row in runs)
    assert [row["met"] for row in memory + losses] == ["yes"] * 4


@pytest.mark.slow
@pytest.mark.hf
def test_step(results, tmp_path):
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="needs the extra hf")
    model = tmp_path / "model"
    make = "import sys; from tests.examples.test_finetune import _make_model; "
    command = [sys.executable, "-W", "ignore", "-c", make + "_make_model(sys.argv[1])", str(model)]
    subprocess.run(command, check=True, cwd=BENCHMARKS.parent, timeout=300)
    (rows,) = quick("step", results, "--threads", "1", "--model", str(model)).values()
    assert {row["base"] for row in rows} == {"nf4tensor", "dense"}
    assert {row["compute"] for row in rows} == {"float32", "bfloat16"}


@pytest.mark.hf
def test_step_without_a_model_says_what_to_do(results):
    command = [sys.executable, str(BENCHMARKS / "bench_step.py"), "--model", "./missing"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 1
    assert "--model ./missing: no such folder" in result.stderr
