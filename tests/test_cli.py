"""The `nf4tensor` command, run in this process and as a user would."""

import json
import os
import subprocess
import sys

import pytest
import torch

from nf4tensor import cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "nf4tensor.cli", *arguments],
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
