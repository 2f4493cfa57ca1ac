"""Calls of one operator with 4-bit arguments, each judged against the same call on decoded ones.

Right is the dense result, or an error of this package; nothing that was not to be written may have
changed. `op_table.py` goes through all operators with this.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from nf4tensor import to_nf4
from nf4tensor.tensor.decoded import decoded
from tests.tensor.op_verdicts import TOLERANCE, is_close, is_same, values, verdict_on

FORMS = ("function", "method", "alias", "gradient", "in place", "written view", "out", "4-bit out")


@dataclass(frozen=True)
class Trial:
    """What came of one form of call."""

    form: str
    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class Options:
    """How many calls to make: samples of an operator, logical dtypes, looks, and forms."""

    num_samples: int
    dtypes: tuple[torch.dtype, ...]
    looks: tuple[str, ...]
    forms: tuple[str, ...] = FORMS


def _slice(dense: Tensor) -> Tensor | None:
    if dense.dim() < 2:
        return None
    return to_nf4(torch.cat([dense, dense, dense]))[len(dense) : 2 * len(dense)]


def _transposed(dense: Tensor) -> Tensor | None:
    return to_nf4(dense.mT).mT if dense.dim() >= 2 and dense.shape[-2] > 0 else None


def _flat(dense: Tensor) -> Tensor | None:
    is_even = dense.dim() == 1 and len(dense) % 2 == 0
    return to_nf4(dense.view(2, -1)).view(-1) if is_even else None


# Ways to pass the values of a dense tensor; None where there is no such way.
LOOKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "rows": to_nf4,
    "slice": _slice,
    "transposed": _transposed,
    "flat": _flat,
    "decoded view": lambda dense: decoded(dense.clone()),
}
ALL = Options(6, (torch.float32, torch.bfloat16), tuple(LOOKS))
QUICK = Options(1, (torch.float32,), ("rows",))


@dataclass
class Call:
    """One call: a function, its arguments as a flat list, and which of them are 4-bit."""

    function: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    chosen: tuple[int, ...]
    look: str

    def arguments(self) -> tuple[list[Any], list[Any]] | None:
        """Return fresh arguments, 4-bit and dense, with the same values."""
        quantized, dense = (
            [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            for _ in range(2)
        )
        for i in self.chosen:
            quantized[i] = LOOKS[self.look](self.leaves[i].detach())
            if quantized[i] is None:
                return None
            dense[i] = values(quantized[i])
        return quantized, dense

    def run(self, leaves: list[Any], **options: Any) -> Any:
        """Call the function, with the same random numbers each time; return an error as such."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        torch.default_generator.manual_seed(0)  # the CPU's alone: seeding every device takes longer
        try:
            return self.function(*args, **kwargs, **options)
        except Exception as error:
            return error

    def __str__(self) -> str:
        sizes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in self.leaves]
        return f"{sizes}, arguments {self.chosen} as {self.look}"


def trials(operator: Any, options: Options) -> Iterator[Trial]:
    """Make every call of an operator that the options ask for."""
    for dtype in options.dtypes:
        if dtype not in operator.dtypes:
            continue
        samples = operator.sample_inputs("cpu", dtype, requires_grad=False)
        for sample in itertools.islice(samples, options.num_samples):
            leaves, structure = tree_flatten(([sample.input, *sample.args], sample.kwargs))
            for chosen, look in itertools.product(_choices(leaves), options.looks):
                for form, function in _forms(operator, options.forms):
                    call = Call(function, leaves, structure, chosen, look)
                    judged = _judge(form, call, operator)
                    if judged is not None:
                        yield Trial(form, *judged)


def _choices(leaves: list[Any]) -> Iterator[tuple[int, ...]]:
    """Yield each argument that can be 4-bit, then all of them."""
    places = tuple(i for i, leaf in enumerate(leaves) if _can_be_quantized(leaf))
    yield from ((place,) for place in places)
    if len(places) > 1:
        yield places


def _can_be_quantized(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and leaf.dtype in TOLERANCE
        and leaf.dim() >= 1
        and leaf.shape[-1] > 0
        and bool(leaf.isfinite().all())
    )


def _forms(operator: Any, forms: tuple[str, ...]) -> Iterator[tuple[str, Callable[..., Any]]]:
    functions = [
        ("function", operator.op),
        ("method", operator.method_variant),
        *(("alias", alias.op) for alias in operator.aliases),
        ("gradient", operator.op if operator.supports_autograd else None),
        ("in place", operator.inplace_variant),
        *(("in place", alias.inplace_variant) for alias in operator.aliases),
        ("written view", operator.op),
        ("out", operator.op if operator.supports_out else None),
        ("4-bit out", operator.op if operator.supports_out else None),
    ]
    for form, function in functions:
        if function is not None and form in forms:
            yield form, function


def _judge(form: str, call: Call, operator: Any) -> tuple[str, str] | None:
    """Return the verdict on one call and what it was about, or None where there is no such call."""
    arguments = call.arguments()
    if arguments is None:
        return None
    pair = _RESULTS.get(form, _results)(call, *arguments)
    if pair is None:
        return None
    found, expected = pair
    verdict = verdict_on(found, expected, operator.name)
    if verdict not in ("wrong", "unclear") and not _arguments_are_right(call, *arguments, verdict):
        verdict = "wrong"
    return verdict, f"{call}: {str(found)[:200] if isinstance(found, Exception) else ''}"


# What a form of call gives: the result with 4-bit arguments and with dense ones, errors included.


def _results(call: Call, quantized: list[Any], dense: list[Any]) -> tuple[Any, Any] | None:
    """Call the function; in place, a 4-bit argument is the result, rounded."""
    found, expected = call.run(quantized), call.run(dense)
    if any(found is quantized[i] and expected is dense[i] for i in call.chosen):
        expected = None if is_same(found, expected) else LOOKS[call.look](expected)
        return (found, found if expected is None else expected)
    return found, expected


def _gradients(call: Call, quantized: list[Any], dense: list[Any]) -> tuple[Any, Any] | None:
    """Differentiate with respect to the arguments that are not 4-bit."""
    others = [i for i, leaf in enumerate(dense) if i not in call.chosen and _is_float(leaf)]
    found, expected = (_gradients_of(call, leaves, others) for leaves in (quantized, dense))
    return None if expected is None else (found, expected)


def _gradients_of(call: Call, leaves: list[Any], others: list[int]) -> Any:
    inputs = [leaves[i].requires_grad_() for i in others]
    results = call.run(leaves)
    if isinstance(results, Exception):
        return results
    results = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    try:
        ones = [torch.ones_like(result) for result in results]
        return torch.autograd.grad(results, inputs, ones, allow_unused=True) if results else None
    except Exception as error:
        return error


def _written_views(call: Call, quantized: list[Any], dense: list[Any]) -> tuple[Any, Any] | None:
    """Write zeros into what torch returns as a view of the argument."""
    found, expected = call.run(quantized), call.run(dense)
    if isinstance(expected, Exception) or isinstance(found, Exception):
        return None  # as it is without writing
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor) and any(_share_memory(other, dense[i]) for i in call.chosen):
            return _attempt(one.zero_), _attempt(other.zero_)
    return None


def _written_outs(call: Call, quantized: list[Any], dense: list[Any]) -> tuple[Any, Any] | None:
    """Let the function write into given dense tensors."""
    result = _dense_result(call)
    if isinstance(result, Exception):
        return None
    outs = [tree_map_only(Tensor, torch.zeros_like, result) for _ in range(2)]
    return call.run(quantized, out=outs[0]), call.run(dense, out=outs[1])


def _quantized_outs(call: Call, quantized: list[Any], dense: list[Any]) -> tuple[Any, Any] | None:
    """Let the function write into a given 4-bit tensor: rounded, or nothing at all."""
    result = _dense_result(call)
    if not _can_be_quantized(result):
        return None
    before = torch.ones_like(result)
    out = LOOKS[call.look](before)
    if out is None:
        return None
    expected = call.run(dense, out=before.clone())
    found = call.run(quantized, out=out)
    if isinstance(found, Exception) and not is_same(out, before):
        return out, before
    return found, expected if isinstance(expected, Exception) else LOOKS[call.look](expected)


def _dense_result(call: Call) -> Any:
    return call.run(call.arguments()[1])


_RESULTS = {
    "gradient": _gradients,
    "written view": _written_views,
    "out": _written_outs,
    "4-bit out": _quantized_outs,
}


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return error


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if torch.strided not in {one.layout, other.layout} or one.layout != other.layout:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _arguments_are_right(call: Call, quantized: list, dense: list, verdict: str) -> bool:
    """Tell whether the call wrote what it does on dense tensors.

    Where it raised, no 4-bit argument may have changed; dense ones may, as where torch raises.
    """
    for i, (one, other) in enumerate(zip(quantized, dense, strict=True)):
        if not isinstance(other, Tensor):
            continue
        before = values(LOOKS[call.look](call.leaves[i])) if i in call.chosen else call.leaves[i]
        if verdict == "refused" and i not in call.chosen:
            continue
        if verdict == "refused" or is_same(other, before):
            is_right = is_same(one, before)
        elif i in call.chosen:  # rows that it did not touch have their bytes, others are rounded
            is_right = is_same(one, other) or is_close(one, LOOKS[call.look](other.detach()))
        else:
            is_right = is_close(one, other)
        if not is_right and verdict not in ("both raise", "listed"):
            return False
    return True
