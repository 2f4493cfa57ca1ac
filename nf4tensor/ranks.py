"""Ranks that agree: a fault of one of them is the same error on all.

Its only collectives gather small objects over every dimension of a mesh. Whoever uses it lets no
rank leave before, or the others would wait. Called by the rooms that work on whole models.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from nf4tensor.errors import NF4TensorError, ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Made = TypeVar("Made")


def alike(
    mesh: "DeviceMesh",
    make: Callable[[], tuple[Made, Sequence[str]]],
    error: type[NF4TensorError] = ShardingError,
) -> Made:
    """Make something on every rank, and return it if every rank could and made the same.

    Args:
        mesh: The ranks; each must call this.
        make: Makes the object and the facts that must be the same on every rank.
        error: What to raise.

    Raises:
        NF4TensorError: `make` raised on some rank, or facts differ. The same on every rank.
    """
    made, failure = None, None
    facts: Sequence[str] = ()
    try:
        made, facts = make()
    except Exception as raised:  # any: the other ranks must hear of it
        failure = raised
    told = None if failure is None else describe(failure)
    found = _gather(mesh, (hashlib.sha256("\n".join(facts).encode()).hexdigest(), told))
    ranks = mesh.mesh.flatten().tolist()
    failures = {
        rank: told for rank, (_, told) in zip(ranks, found, strict=True) if told is not None
    }
    if failures:
        raise error(common_failure(failures, len(ranks))) from failure
    if len(set(found)) > 1:
        raise error(_disagreement(dict(zip(ranks, _gather(mesh, facts), strict=True))))
    assert made is not None
    return made


def first_difference(left: Sequence[str], right: Sequence[str]) -> tuple[str, str] | None:
    """Return the first pair of facts that differ, None if all are the same."""
    pairs = zip_longest(left, right, fillvalue="nothing")
    return next(((mine, theirs) for mine, theirs in pairs if mine != theirs), None)


def _disagreement(facts: dict[int, Sequence[str]]) -> str:
    (first, expected), *others = facts.items()
    for rank, found in others:
        difference = first_difference(expected, found)
        if difference is not None:
            return (
                f"ranks disagree: rank {first} has `{difference[0]}`, rank {rank} has "
                f"`{difference[1]}`; give every rank the same model, weights, plan and options"
            )
    raise AssertionError(facts)


def describe(failure: Exception) -> str:
    """Return an error as other ranks are told of it."""
    is_ours = isinstance(failure, NF4TensorError)
    return str(failure) if is_ours else f"{type(failure).__name__}: {failure}"


def common_failure(failures: dict[int, str], num_ranks: int) -> str:
    """Say what failed, and where, unless it failed everywhere in the same way."""
    told = list(failures.values())
    if len(failures) == num_ranks and len(set(told)) == 1:
        return told[0]
    return "\n".join(f"rank {rank}: {message}" for rank, message in failures.items())


def _gather(mesh: "DeviceMesh", value: Made) -> list[Made]:
    """Return the values of all ranks, in the order of the flattened mesh."""
    values = [value]
    for group in reversed(mesh.get_all_groups()):
        parts: list[list[Made]] = [[] for _ in range(group.size())]
        dist.all_gather_object(parts, values, group=group)
        values = [value for part in parts for value in part]
    return values
