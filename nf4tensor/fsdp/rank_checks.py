"""Where ranks disagree about a model, found with one exchange of small objects.

Ranks may differ in anything, the number of parameters too, so they exchange everything at once and
compare afterwards: nothing waits for what another rank does not have. Called by `doctor`.
"""

from collections.abc import Callable, Iterator

import torch.distributed as dist

from nf4tensor.errors import ShardingError
from nf4tensor.fsdp.report import Finding
from nf4tensor.fsdp.survey import Entry, Survey, world_size
from nf4tensor.ranks import common_failure, describe
from nf4tensor.tensor.memory import checksum

# (name of a parameter, module or "the optimizer", what about it) -> value
Facts = dict[tuple[str, str], str]

_SAME_BYTES = (
    "`torch.distributed.broadcast(model.get_parameter(name).detach(), 0)`, or load the same "
    "checkpoint on every rank"
)
_SAME_MODEL = "give every rank the same model, options and order of calls"


def disagreements(make_survey: Callable[[], Survey]) -> tuple[Survey, list[Finding]]:
    """Return this rank's survey, and what ranks disagree about, the same on every rank.

    Args:
        make_survey: Called once; if it or reading its facts fails, every rank hears of it.

    Raises:
        ShardingError: It failed on some rank. The same on every rank.
    """
    survey, facts, failure = None, {}, None
    try:
        survey = make_survey()
        facts = _facts(survey)
    except Exception as error:  # any: the other ranks must hear of it
        failure = error
    told = None if failure is None else describe(failure)
    found: list[tuple[Facts, str | None]] = [(facts, told)] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, (facts, told))
    failures = {rank: told for rank, (_, told) in enumerate(found) if told is not None}
    if failures:
        raise ShardingError(common_failure(failures, world_size())) from failure
    assert survey is not None
    return survey, list(_compare([facts for facts, _ in found]))


def _facts(survey: Survey) -> Facts:
    """Describe everything that ranks must agree about."""
    facts: Facts = {}
    for entry in survey.entries:
        for what, value in _of_parameter(entry).items():
            facts[entry.name, what] = value
    for name, group in survey.groups:
        mesh = group.post_forward_mesh_info
        facts[name, "options of fully_shard"] = f"{group.mp_policy}, {group.offload_policy}, " + (
            f"reshard_after_forward to {'nothing' if mesh is None else tuple(mesh.mesh.shape)}"
        )
    if survey.optimizer is not None:
        facts["the optimizer", "class"] = type(survey.optimizer).__name__
        for number, group in enumerate(survey.optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            facts["the optimizer", f"options of group {number}"] = (
                f"{len(group['params'])} parameters, {options}"
            )
    return facts


def _of_parameter(entry: Entry) -> dict[str, str]:
    weight, parameter = entry.quantized, entry.parameter
    facts = {
        "names": ", ".join(entry.names),
        "class": type(entry.local).__name__,
        "shape": str(tuple(parameter.shape)),
        "dtype": str(parameter.dtype),
        "requires_grad": str(parameter.requires_grad),
        "placement": "none",
    }
    if entry.local is not parameter:
        mesh = tuple(parameter.device_mesh.shape)  # type: ignore[attr-defined]
        facts["placement"] = f"{parameter.placements} of {mesh}"  # type: ignore[attr-defined]
    if weight is not None:
        facts["spec"] = str(weight.spec)
        if weight.padded is not None:
            facts["padded record"] = str(tuple(weight.padded.shape))
    if entry.num_shards == 1 and not entry.local.is_meta:
        facts["bytes"] = f"checksum {checksum(entry.local):x}"
    return facts


def _compare(facts: list[Facts]) -> Iterator[Finding]:
    """Yield one finding for each thing that ranks disagree about, with every name concerned.

    Of each name only the first thing counts: what follows from it is no news.
    """
    differing: dict[str, list[tuple[str, int]]] = {}
    seen = set()
    for key in dict.fromkeys(key for of_rank in facts for key in of_rank):
        name, what = key
        values = [of_rank.get(key) for of_rank in facts]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None and name not in seen:
            seen.add(name)
            differing.setdefault(what, []).append((name, other))
    for what, places in differing.items():
        first, other = places[0]
        mine, theirs = (facts[rank].get((first, what), "nothing") for rank in (0, other))
        yield Finding(
            "error",
            "ranks-disagree",
            tuple(name for name, _ in places),
            0,
            f"ranks disagree about {what}: {first or 'the model'} has `{mine}` on rank 0 and "
            f"`{theirs}` on rank {other}",
            _SAME_BYTES if what == "bytes" else _SAME_MODEL,
        )
