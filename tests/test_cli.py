"""The `nf4tensor` command, run in this process and as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nf4tensor import checkpoint, cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "nf4tensor", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_env_prints_versions_and_a_backend_for_each_op(capsys):
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    for device in ("cpu", "cuda", "xpu", "other"):
        assert f"\n{device} " in printed
    assert "reference  all ops: no kernel for other devices" in printed


def test_env_as_json(capsys):
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert {row["backend"] for row in found["kernels"]} <= {"cpu", "reference"}


def test_env_says_why_the_reference_was_picked():
    result = run("env", NF4TENSOR_BACKEND="reference")
    assert result.returncode == 0
    assert "reference  all ops: NF4TENSOR_BACKEND=reference" in result.stdout


def test_unknown_backend_names_the_known_ones():
    result = run("env", NF4TENSOR_BACKEND="gpu")
    assert result.returncode == 1
    assert (
        "NF4TENSOR_BACKEND is 'gpu', expected one of auto, cpu, cuda, triton, reference"
        in result.stderr
    )


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    assert "env" in capsys.readouterr().out


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A dense checkpoint of two layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 8, bias=False))
    checkpoint.save(model, tmp_path / "dense", progress=False)
    return tmp_path / "dense"


def test_quantize_and_inspect(dense: Path, tmp_path: Path, capsys):
    packed = str(tmp_path / "packed")
    assert cli.main(["quantize", str(dense), packed, "--dry-run"]) == 0
    assert "would become" in capsys.readouterr().out
    assert not Path(packed).exists()
    assert cli.main(["quantize", str(dense), packed, "--block-size", "32"]) == 0
    assert "0.weight" in capsys.readouterr().out
    assert cli.main(["quantize", str(dense), packed]) == 1
    assert "exists: pass overwrite=True" in capsys.readouterr().err
    assert cli.main(["quantize", str(dense), packed, "--overwrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after_bytes"] < found["before_bytes"] / 3
    assert cli.main(["inspect", packed, "--source", str(dense)]) == 0
    printed = capsys.readouterr().out
    assert "nf4 of 64, square8" in printed
    assert "0.weight  64 x 96" in printed
    assert "####" in printed
    assert cli.main(["inspect", packed, "--json"]) == 0
    tensors = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert tensors["0.weight"]["bits"] == pytest.approx(8 * 96 / 96)
    assert tensors["0.bias"]["format"] == "F32"


def test_what_is_not_there_is_an_error(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["inspect", str(tmp_path / "missing")]) == 1
    assert "is no checkpoint" in capsys.readouterr().err
    assert cli.main(["inspect", "nobody/nothing"]) == 1
    assert "nobody/nothing is no file or folder here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["quantize"])
    assert stopped.value.code == 2
