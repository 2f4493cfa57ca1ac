"""The ops of `nf4tensor::`: products and their gradients, and argument errors.

Values are checked in `test_reference.py`, what torch asks of an op in `test_opcheck.py`.
"""

import pytest
import torch
import torch.nn.functional as F

from nf4tensor.errors import DTypeError, ShapeError, SpecError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
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
