"""The ops of `nf4tensor::`: schemas, fake kernels and gradients by `opcheck`, and argument errors.

Values are checked in `test_reference.py`; here every option goes through what torch asks of an op.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from nf4tensor.errors import DTypeError, ShapeError, SpecError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops, schema
from tests.strategies import DTYPES
from tests.tensor.weights import assert_same_products

SPECS = {
    "nested": NF4Spec.for_weight(80, 32, 2),
    "float scales": NF4Spec.for_weight(80, 64, None),
    "fp4": NF4Spec.for_weight(65, 16, quant_type="fp4"),
    "imported": NF4Spec(64, 16, "dynamic8", 4, 2),
}
namespace = torch.ops.nf4tensor
# torch's own, when it takes an op apart.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a dense tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def record_of(spec: NF4Spec, *lead: int) -> torch.Tensor:
    """Return rows of a spec; imported ones are zero."""
    if spec.scale_kind == "dynamic8":
        return torch.zeros(*lead, spec.pitch, dtype=torch.uint8)
    return ops.quantize(random(*lead, spec.in_features), spec)


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
    command = [sys.executable, "-m", "pytest", "-q", "-k", "opcheck and not backends", __file__]
    result = subprocess.run(
        command, env=os.environ | choice, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


# Values and gradients of the products


@each_spec
@each_dtype
def test_products_are_those_of_the_decoded_weight(spec, dtype):
    record = record_of(spec, 5)
    weight = ops.dequantize(record, spec, dtype)
    inputs, bias = random(3, spec.in_features, dtype=dtype), random(5, dtype=dtype)
    absolute, magnitudes = bias.double().abs(), weight.double().abs()
    along = inputs.double().abs() @ magnitudes.t()
    for found, expected, bound in (
        (ops.linear(inputs, record, spec, bias), F.linear(inputs, weight, bias), along + absolute),
        (ops.linear(inputs, record, spec), inputs @ weight.t(), along),
        (ops.matmul(bias, record, spec), bias @ weight, absolute @ magnitudes),
    ):
        assert_same_products(found, expected, bound, spec.in_features + 1)


@pytest.mark.parametrize("lead", [(), (4,), (3, 4)])
@pytest.mark.parametrize("shape", [(), (2,), (1, 2), (4, 2), (4, 1), (3, 1, 2)])
def test_gradients_are_summed_to_the_shape_of_the_input(lead, shape):
    spec = SPECS["float scales"]
    record = record_of(spec, *lead, 5)
    weight = ops.dequantize(record, spec, torch.float32)
    for product, dense, width in (
        (ops.linear, lambda a: a @ weight.mT, 80),
        (ops.matmul, lambda a: a @ weight, 5),
    ):
        inputs = random(*shape, width).requires_grad_()
        (found,) = torch.autograd.grad(product(inputs, record, spec).square().sum(), inputs)
        (expected,) = torch.autograd.grad(dense(inputs).square().sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_gradient_of_a_bias_that_broadcasts():
    spec = SPECS["float scales"]
    record, inputs = record_of(spec, 5), random(2, 3, 80)
    bias = random(5).requires_grad_()
    (found,) = torch.autograd.grad(ops.linear(inputs, record, spec, bias).sum(), bias)
    assert torch.equal(found, torch.full((5,), 6.0))
    with torch.no_grad():
        assert not ops.linear(inputs, record, spec, bias).requires_grad


# Argument errors, from the real kernels and from the fake ones


SPEC = SPECS["nested"]
RECORD = record_of(SPEC, 4)
ERRORS = [
    (DTypeError, "weight.dtype is torch.float64", "quantize", (random(4, 80).double(),), ()),
    (DTypeError, "weight.dtype is torch.int32", "quantize", (random(4, 80).int(),), ()),
    (
        ShapeError,
        r"weight has shape \(4, 79\), expected \[\*, 80\]",
        "quantize",
        (random(4, 79),),
        (),
    ),
    (ShapeError, r"weight has shape \(\)", "quantize", (torch.tensor(1.0),), ()),
    (
        DTypeError,
        "weight.dtype is torch.float64",
        "quantize_into",
        (random(4, 80).double(),),
        (RECORD,),
    ),
    (DTypeError, "record.dtype is torch.int8", "quantize_into", (random(4, 80),), (RECORD.char(),)),
    (
        ShapeError,
        r"record has shape \(4, 95\)",
        "quantize_into",
        (random(4, 80),),
        (RECORD[:, 1:],),
    ),
    (
        ShapeError,
        r"weight has leading dimensions \(3,\)",
        "quantize_into",
        (random(3, 80),),
        (RECORD,),
    ),
    (DTypeError, "record.dtype is torch.int8", "dequantize", (RECORD.char(),), (torch.float32,)),
    (DTypeError, "dtype is torch.float64", "dequantize", (RECORD,), (torch.float64,)),
    (ShapeError, r"expected \[\*, 96\] bytes", "dequantize", (RECORD[:, :-1],), (torch.float32,)),
    (DTypeError, "out.dtype is torch.int32", "dequantize_into", (RECORD,), (random(4, 80).int(),)),
    (ShapeError, r"expected \(4, 80\)", "dequantize_into", (RECORD,), (random(4, 81),)),
    (ShapeError, r"expected \(4, 80\)", "dequantize_into", (RECORD,), (random(2, 4, 80),)),
    (DTypeError, "input.dtype is torch.float64", "linear", (random(2, 80).double(), RECORD), ()),
    (DTypeError, "record.dtype is torch.float32", "linear", (random(2, 80), RECORD.float()), ()),
    (ShapeError, r"input has shape \(2, 79\)", "linear", (random(2, 79), RECORD), ()),
    (ShapeError, r"input has shape \(\)", "linear", (torch.tensor(1.0), RECORD), ()),
    (ShapeError, "a 1-D weight cannot be multiplied", "linear", (random(2, 80), RECORD[0]), ()),
    (DTypeError, "input.dtype is torch.int64", "matmul", (random(2, 4).long(), RECORD), ()),
    (
        ShapeError,
        r"expected \[\*, 4\] for a weight of shape \(4, 80\)",
        "matmul",
        (random(2, 80), RECORD),
        (),
    ),
]


@pytest.mark.parametrize(("error", "words", "op", "before", "after"), ERRORS)
def test_arguments_that_do_not_fit_are_refused(error, words, op, before, after):
    def on_meta(args):
        return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]

    with pytest.raises(error, match=words):
        getattr(ops, op)(*before, SPEC, *after)
    with pytest.raises(error, match=words):  # the fake kernel, while a graph is traced
        getattr(namespace, op).default(*on_meta(before), *SPEC.op_args, *on_meta(after))
    with pytest.raises((ValueError, TypeError)):  # a compiled kernel knows no classes of ours
        getattr(namespace, op).default(*before, *SPEC.op_args, *after)


def test_imported_scales_are_never_made():
    spec = SPECS["imported"]
    words = r"dynamic8 scales are only imported.*to_nf4\(q.dequantize\(\) \+ delta\)"
    with pytest.raises(SpecError, match=words):
        ops.quantize(random(4, 64), spec)
    with pytest.raises(SpecError, match=words):
        ops.quantize_into(random(4, 64), spec, record_of(spec, 4))


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, 0, "in_features is 0"),
        (1, 24, "expected a power of two"),
        (2, 3, "scale_kind is 3, expected 0 to 2"),
        (3, 0, "do not fit in|segment_length is 0"),
        (4, 0, "do not fit in|num_segments is 0"),
        (5, 2, "quant_type is 2, expected 0 to 1"),
    ],
)
def test_integers_that_are_no_spec_are_refused(position, value, words):
    op_args = list(SPEC.op_args)
    op_args[position] = value
    with pytest.raises(ValueError, match=words):
        namespace.dequantize.default(RECORD, *op_args, torch.float32)


def test_results_of_wrappers():
    out = torch.empty(4, 80)
    assert ops.dequantize_into(RECORD, SPEC, out) is out
    assert ops.quantize_into(out, SPEC, RECORD.clone()) is None
    assert torch.equal(
        ops.quantize(out, SPEC)[:, : SPEC.codes_bytes], RECORD[:, : SPEC.codes_bytes]
    )
    assert ops.zero_record((2,), SPEC, torch.device("cpu")).shape == (2, SPEC.pitch)
