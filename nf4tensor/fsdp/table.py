"""A plan as text: one line for each choice, and one for each kind of parameter.

Layers repeat, so parameters alike but for the numbers in their names share a line. Called by
`ShardingPlan.__str__`; reports of `doctor` write bytes and names alike.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nf4tensor.fsdp.parameters import Decision, ParameterPlan

if TYPE_CHECKING:
    from nf4tensor.fsdp.plan import ShardingPlan

CHOICE_HEAD = (
    "policy",
    "frozen",
    "trainable",
    "gradients",
    "optimizer",
    "gathered",
    "decoded",
    "device",
    "wire a step",
)
PARAMETER_HEAD = ("parameter", "count", "role", "shape", "dtype", "bytes", "decision", "per rank")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def amount(num_bytes: float) -> str:
    """Write a number of bytes with a unit, to three digits or more."""
    unit = 0
    while num_bytes >= 1024 and unit < len(UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    digits = 0 if unit == 0 or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:.{digits}f} {UNITS[unit]}"


def without_numbers(name: str) -> str:
    """Write the numbers of layers in the name of a parameter as stars."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def render(plan: "ShardingPlan") -> str:
    """Write a plan as two tables under a line with the decision and its reason."""
    replicas = f" in {plan.world.num_replicas} replicas" if plan.world.num_replicas > 1 else ""
    return "\n".join(
        [
            f"{plan.policy} over {plan.world.num_shards} ranks{replicas}: {plan.reason}",
            "",
            *_align([CHOICE_HEAD, *(_choice(name, plan) for name in plan.choices)]),
            "A rank's bytes; optimizer: AdamW; sent or received in a step of one forward and "
            "backward; without activations.",
            *(
                f"{name} cannot work: {problem}"
                for name, choice in plan.choices.items()
                for problem in choice.problems
            ),
            "",
            *_align([PARAMETER_HEAD, *_kinds(plan.parameters)]),
        ]
    )


def _choice(name: Decision, plan: "ShardingPlan") -> tuple[str, ...]:
    costs = plan.choices[name].costs
    numbers = (
        costs.frozen,
        costs.trainable,
        costs.gradients,
        costs.optimizer,
        costs.gathered,
        costs.decoded,
        costs.device,
        costs.wire,
    )
    mark = " *" if name == plan.policy else ""
    return (name + mark, *map(amount, numbers))


def _kinds(parameters: Sequence[ParameterPlan]) -> list[tuple[str, ...]]:
    """Put parameters that are alike but for the numbers in their names on one line."""
    kinds: dict[tuple[str, ...], list[ParameterPlan]] = {}
    for p in parameters:
        name = without_numbers(p.name)
        shape = " x ".join(map(str, p.shape)) or "scalar"
        dtype = str(p.dtype).removeprefix("torch.")
        kinds.setdefault((name, p.role, shape, dtype, p.decision), []).append(p)
    return [
        (
            name if len(alike) > 1 else alike[0].name,
            str(len(alike)),
            role,
            shape,
            dtype,
            amount(sum(p.nbytes for p in alike)),
            decision,
            amount(sum(p.bytes_per_rank for p in alike)),
        )
        for (name, role, shape, dtype, decision), alike in kinds.items()
    ]


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
