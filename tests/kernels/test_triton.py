"""The Triton kernels by Triton's interpreter, which needs no GPU; and how the package finds them.

What the kernels become on a GPU is tested in test_triton_machine_code.py.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from nf4tensor.errors import UnsupportedError
from nf4tensor.kernels import triton_backend
from tests.source_tree import ROOT

FILES = [f"tests/kernels/triton_interpreted_{op}.py" for op in ("dequantize", "linear")]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_interpreted(marks: str) -> None:
    """Run the tests of the files that have such marks; Triton reads the variable when imported."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marks, *FILES],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


@needs_triton
def test_under_the_interpreter():
    run_interpreted("not slow")


@needs_triton
@pytest.mark.slow
def test_more_under_the_interpreter():
    run_interpreted("slow")


def test_without_triton_the_reason_names_the_extra(monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert "pip install 'nf4tensor[triton]'" in triton_backend.unavailable_because()


@needs_triton
def test_a_first_call_while_a_graph_is_captured_is_refused(monkeypatch):
    from nf4tensor.kernels import triton_record

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        UnsupportedError, match=r"first use of fp4 weights on cuda:3 .* once before"
    ):
        triton_record.tables("fp4", torch.device("cuda", 3))
    triton_record.tables("fp4", torch.device("cpu"))


@needs_triton
def test_with_triton_there_is_no_reason():
    assert triton_backend.unavailable_because() is None
