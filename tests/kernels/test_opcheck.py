"""`torch.library.opcheck` of every op of `nf4tensor::`: schemas, fake kernels and gradients.

Every option goes through what torch asks of an op, on each backend that runs here.
"""

import os
import subprocess
import sys

import pytest
import torch

from nf4tensor.kernels import schema
from tests.kernels.test_ops import SPECS, namespace, random, record_of
from tests.strategies import DTYPES

# torch's own, when it takes an op apart.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def check(op: str, *args, **kwargs) -> None:
    """Run torch's own checks of an op."""
    torch.library.opcheck(getattr(namespace, op).default, args, kwargs)


def test_every_op_is_checked_here():
    names = {text.split("(")[0] for text in schema.SCHEMAS}
    assert names == {
        "quantize",
        "quantize_into",
        "dequantize",
        "dequantize_into",
        "linear",
        "matmul",
    }
    for name in names:
        kinds = {str(a.type) for a in getattr(namespace, name).default._schema.arguments}
        assert kinds <= {"Tensor", "int", "Optional[Tensor]"}  # a ScalarType is an int here


def combinations(first, second) -> list:
    """Pair each of one list with each of another; all but a diagonal are slow."""
    return [
        pytest.param(one, other, marks=() if i == j else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


specs_and_dtypes = pytest.mark.parametrize(
    ("spec", "dtype"), combinations(list(SPECS.values()), DTYPES)
)
made_and_dtypes = pytest.mark.parametrize(
    ("spec", "dtype"),
    combinations([s for s in SPECS.values() if s.scale_kind != "dynamic8"], DTYPES),
)


@made_and_dtypes
def test_opcheck_of_quantizing(spec, dtype):
    weight = random(3, spec.in_features, dtype=dtype)
    check("quantize", weight, *spec.op_args)
    check("quantize_into", weight, *spec.op_args, record_of(spec, 3))


@specs_and_dtypes
def test_opcheck_of_dequantizing(spec, dtype):
    record = record_of(spec, 3)
    check("dequantize", record, *spec.op_args, dtype)
    check("dequantize_into", record, *spec.op_args, random(3, spec.in_features, dtype=dtype))


@specs_and_dtypes
def test_opcheck_of_products(spec, dtype):
    record = record_of(spec, 5)
    inputs, bias = random(3, spec.in_features, dtype=dtype), random(5, dtype=dtype)
    check("linear", inputs.requires_grad_(), record, *spec.op_args, bias.requires_grad_())
    check("matmul", random(2, 5, dtype=dtype).requires_grad_(), record, *spec.op_args)


@pytest.mark.parametrize("lead", [(), (2, 3), (0,)])
def test_opcheck_of_leading_dimensions(lead):
    spec = SPECS["nested"]
    weight, record = random(*lead, 80), record_of(spec, *lead)
    check("quantize", weight, *spec.op_args)
    check("quantize_into", weight, *spec.op_args, record)
    check("dequantize", record, *spec.op_args, torch.float32)
    check("dequantize_into", record, *spec.op_args, weight)


def test_opcheck_of_strided_arguments():
    spec = SPECS["nested"]
    record = record_of(spec, 6)[::2]
    check("dequantize", record, *spec.op_args, torch.float32)
    check("dequantize_into", record, *spec.op_args, torch.empty(80, 3).t())
    check("quantize", random(80, 3).t(), *spec.op_args)
    check("linear", random(80, 2).t(), record, *spec.op_args)


@pytest.mark.parametrize(
    ("lead", "shape"),
    combinations([(4, 5), (5,), (3, 4, 5), (1, 5)], [(2,), (), (3, 1, 2), (4, 2), (1, 2)]),
)
def test_opcheck_of_shapes_of_inputs(lead, shape):
    spec = SPECS["nested"]
    record, inputs = record_of(spec, *lead), random(*shape, 80)
    check("linear", inputs.requires_grad_(), record, *spec.op_args)
    check("matmul", random(*shape, 5).requires_grad_(), record, *spec.op_args)


def test_opcheck_of_optional_gradients():
    spec = SPECS["nested"]
    record, inputs, bias = record_of(spec, 5), random(3, 80), random(5)
    check("linear", inputs, record, *spec.op_args)
    check("linear", inputs, record, *spec.op_args, bias.requires_grad_())
    check("linear", inputs.requires_grad_(), record, *spec.op_args, bias.detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [{"NF4TENSOR_BACKEND": "reference"}, {"NF4TENSOR_ISA": "scalar"}]
)
def test_opcheck_of_other_backends(choice):
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not backends", __file__]
    result = subprocess.run(
        command, env=os.environ | choice, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
