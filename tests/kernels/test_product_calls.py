"""How the products of the compiled kernels are called: layouts, threads, graphs, memory, errors.

What they compute is tested in test_products.py.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from tests.kernels.compiled import assert_same_bits, layouts, make_finite_record, needs_compiled
from tests.kernels.test_products import dense, make_spec
from tests.strategies import DTYPES

pytestmark = needs_compiled

namespace = torch.ops.nf4tensor
SPEC = make_spec(576)
# One size for each way to multiply: few inputs, some, and blocks of many.
NUM_INPUTS = (1, 3, 8, 70, 600)


def make_record(num_rows: int = 300, spec: NF4Spec = SPEC) -> Tensor:
    """Return a weight large enough for threads to share."""
    return ops.quantize(dense(num_rows, spec.in_features), spec)


def products(record: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return both products with every number of inputs."""
    found = []
    for num_inputs in NUM_INPUTS:
        x = dense(num_inputs, SPEC.in_features, dtype=dtype)
        y = dense(num_inputs, record.shape[0], dtype=dtype, seed=1)
        found += [ops.linear(x, record, SPEC, y[0].contiguous()), ops.matmul(y, record, SPEC)]
    return found


def assert_all_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


# Layouts


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype):
    """No base address is aligned, and no stride matters."""
    spec = make_spec(65, 16)
    record = make_finite_record((9,), spec)
    x, y, bias = dense(3, 65, dtype=dtype), dense(3, 9, dtype=dtype), dense(9, dtype=dtype)
    product, other = ops.linear(x, record, spec, bias), ops.matmul(y, record, spec)
    apart = torch.stack([bias, bias], 1)[:, 1]
    for records in [record, *layouts(record)]:
        for inputs in layouts(x):
            assert_same_bits(ops.linear(inputs, records, spec, apart), product)
        for inputs in layouts(y):
            assert_same_bits(ops.matmul(inputs, records, spec), other)
    assert_same_bits(
        ops.linear(x[:1].expand(3, 65), record, spec), ops.linear(x[[0] * 3], record, spec)
    )


# Threads and graphs


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    record, before = make_record(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = products(record, dtype)
        torch.set_num_threads(2)
        assert_all_same(products(record, dtype), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
def test_a_result_does_not_depend_on_the_inputs_beside_it(threads):
    record, x, y = make_record(), dense(70, SPEC.in_features), dense(70, 300)
    for product, inputs in ((ops.linear, x), (ops.matmul, y)):
        together = product(inputs, record, SPEC)
        for num_inputs in (9, 31, 64):
            assert_same_bits(product(inputs[:num_inputs], record, SPEC), together[:num_inputs])


@pytest.mark.parametrize("num_callers", [2, 12])
def test_calls_at_once(num_callers):
    """More of them than there are buffers that are kept."""
    record = make_record()
    expected = products(record)
    with ThreadPoolExecutor(num_callers) as pool:
        calls = [pool.submit(products, record) for _ in range(2 * num_callers)]
        for call in calls:
            assert_all_same(call.result(), expected)


def test_products_inside_of_backward():
    """A hook multiplies, and goes backward itself, between the products of a backward pass."""
    record, seen, gradients = make_record(), [], []
    expected = products(record)

    def nested(gradient: Tensor) -> None:
        seen.append(products(record))
        with torch.enable_grad():
            inner = dense(3, SPEC.in_features).requires_grad_()
            ops.linear(inner, record, SPEC).sum().backward()
        seen.append(products(record))

    for hook in (None, nested):
        x = dense(70, SPEC.in_features).requires_grad_()
        hidden = ops.matmul(ops.linear(x, record, SPEC), record, SPEC)
        if hook is not None:
            hidden.register_hook(hook)
        ops.linear(hidden, record, SPEC).sum().backward()
        gradients.append(x.grad)
    assert_same_bits(*gradients)
    assert len(seen) == 2
    for found in seen:
        assert_all_same(found, expected)


@pytest.mark.parametrize("num_inputs", [3, 70])
def test_compiled_graphs_give_the_same_bits(num_inputs):
    record, bias = make_record(), dense(300)

    def step(x: Tensor) -> Tensor:
        hidden = ops.linear(x, record, SPEC, bias).relu()
        return ops.matmul(hidden, record, SPEC)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = []
    for function in (step, compiled):
        x = dense(num_inputs, SPEC.in_features).requires_grad_()
        output = function(x)
        output.sum().backward()
        results.append([output.detach(), x.grad])
    assert_all_same(*results)


# Memory that is kept between products

BUFFER = 10 << 20  # a block of inputs and, for two threads, tiles and sums


def test_workspace_is_given_back():
    record = make_record()
    expected = products(record)
    assert 0 < ops.release_workspace()
    assert ops.release_workspace() == 0
    assert_all_same(products(record), expected)
    assert 0 < ops.release_workspace() <= BUFFER


def run(code: str, timeout: int = 60) -> None:
    """Run a program of its own that fails with what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_workspace_is_bounded():
    """Whatever the sizes, one buffer is kept for calls that come one after another."""
    run(f"""
import torch
from nf4tensor.kernels import ops
from tests.kernels.test_products import dense, make_spec

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(2)
spec, tall_spec = make_spec(8192), make_spec(16)
wide, tall = ops.quantize(dense(16, 8192), spec), ops.quantize(dense(8192, 16), tall_spec)
inputs = dense(3000, 8192)  # 98 MB; the outputs are small

def multiply(num_inputs):
    ops.linear(inputs[:num_inputs], wide, spec)
    ops.matmul(inputs[:num_inputs], tall, tall_spec)

multiply(3000)
ops.release_workspace()
before = resident()
for _ in range(2):
    for num_inputs in range(1, 3000, 149):
        multiply(num_inputs)
grown, released = resident() - before, ops.release_workspace()
assert 0 < released <= {BUFFER}, released
assert grown <= released + (2 << 20), (grown, released)  # what else a process does
assert resident() - before <= 2 << 20, (grown, released)
""")


def test_a_forked_child_multiplies():
    """Buffers of the parent, also those that its threads were using, are not in the way."""
    run("""
import os, torch
from nf4tensor.kernels import ops
from tests.kernels.test_product_calls import make_record, products

torch.set_num_threads(1)  # a fork loses OpenMP's other threads
record = make_record()
expected = products(record)
child = os.fork()
if child == 0:
    same = all(map(torch.equal, products(record), expected)) and ops.release_workspace() > 0
    os._exit(0 if same and all(map(torch.equal, products(record), expected)) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert all(map(torch.equal, products(record), expected))
""")


# Argument errors of the compiled kernels: nothing that Python can pass may crash

X, RECORD = dense(4, 576), ops.quantize(dense(5, 576), SPEC)


def freed(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage is gone, as FSDP leaves it."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("op", "arguments", "bias", "words"),
    [
        ("linear", (X, RECORD), dense(4), "bias has the last size 4, expected 5"),
        ("linear", (X, RECORD), dense(0), "last size 0, expected 5"),
        ("linear", (X, RECORD), dense(1, 5), "bias has 2 dimensions, expected one"),
        ("linear", (X, RECORD), dense(5).half(), "bias has elements of dtype code"),
        ("linear", (X.half(), RECORD), dense(5), "bias has elements of dtype code"),
        ("linear", (X, RECORD), torch.tensor(1.0), "bias has no dimensions"),
        ("linear", (X[:, 1:], RECORD), None, "input has the last size 575, expected 576"),
        ("linear", (X.double(), RECORD), None, "input has elements of dtype code"),
        ("linear", (X, RECORD[:, 1:]), None, f"last size {SPEC.pitch - 1}, expected {SPEC.pitch}"),
        ("linear", (X, RECORD.char()), None, "record has elements of dtype code"),
        ("linear", (X, RECORD[0]), None, "record has one dimension"),
        ("linear", (dense(3, 4, 576), RECORD.expand(2, 5, -1)), None, "leading sizes 3 and 2"),
        ("matmul", (dense(3, 4, 5), RECORD.expand(2, 5, -1)), None, "leading sizes 3 and 2"),
        ("matmul", (dense(4, 6), RECORD), None, "input has the last size 6, expected 5"),
        ("matmul", (torch.tensor(1.0), RECORD), None, "input has no dimensions"),
        ("linear", (freed(X), RECORD), None, "input has 9216 bytes, its storage only 0"),
        ("linear", (X, freed(RECORD)), None, "record has .* bytes, its storage only 0: it was"),
        ("linear", (X, RECORD), freed(dense(5)), "bias has 20 bytes, its storage only 0"),
        ("matmul", (freed(dense(4, 5)), RECORD), None, "input has 80 bytes, its storage only 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(op, arguments, bias, words):
    after = () if op == "matmul" else (bias,)
    with pytest.raises(ValueError, match=words):
        getattr(namespace, op).default(*arguments, *SPEC.op_args, *after)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["input", "record", "bias"])
def test_strided_arguments_of_freed_storages_are_refused(which):
    """In a program of its own, which crashes where the check is missing."""
    run(f"""
import pytest, torch
from nf4tensor.kernels import ops
from tests.kernels.test_product_calls import RECORD, SPEC, X, dense

arguments = dict(
    input=X.t().contiguous().t(),
    record=torch.cat([RECORD, RECORD], 1)[:, : SPEC.pitch],
    bias=dense(10)[::2],
)
arguments["{which}"].untyped_storage().resize_(0)
with pytest.raises(ValueError, match="{which} has .* bytes, its storage only 0"):
    ops.linear(spec=SPEC, **arguments)
""")
