"""`plan`: how to shard a model, why, and what each choice costs; nothing is changed or moved.

The plan is data, for people (`print`), for machines (`to_json`) and for `apply`. Formulas are in
`costs.py`, faults in `checks.py`. Called by users and by `apply`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from torch import nn

from nf4tensor.errors import ShardingError
from nf4tensor.fsdp import table
from nf4tensor.fsdp.checks import problems
from nf4tensor.fsdp.costs import Costs, Options, World, count
from nf4tensor.fsdp.parameters import Decision, ParameterPlan, decide, inventory
from nf4tensor.fsdp.policy import PREFERRED, Choice, Policy, budget_of_device, choose_policy
from nf4tensor.fsdp.units import Modules, choose
from nf4tensor.ranks import alike

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class ShardingPlan:
    """A decision for every parameter of a model, with its reason and its costs.

    Args:
        policy: "shard", or "replicate": frozen parameters whole on every rank.
        reason: Why this one.
        world: Ranks it is for.
        units: Modules that are sharded one by one, inner ones first; "" is the model.
        choices: Both policies, the other one too.
        options: Arguments of `fully_shard` that the costs are for.
        memory_budget: Bytes on the device of each rank, None where nobody set any.
        mesh: Where it was made, None if for a number of ranks.
    """

    policy: Decision
    reason: str
    world: World
    units: tuple[str, ...]
    choices: dict[Decision, Choice]
    options: Options
    memory_budget: int | None
    mesh: "DeviceMesh | None" = field(default=None, compare=False, repr=False)

    @property
    def parameters(self) -> tuple[ParameterPlan, ...]:
        """Every parameter with its decision, in the order of the model."""
        return self.choices[self.policy].parameters

    @property
    def costs(self) -> Costs:
        """Bytes of the chosen policy."""
        return self.choices[self.policy].costs

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as numbers, strings, lists and dictionaries."""
        return {
            "policy": self.policy,
            "reason": self.reason,
            **asdict(self.world),
            "memory_budget": self.memory_budget,
            "options": {name: str(value) for name, value in self.options.given().items()},
            "units": list(self.units),
            "choices": {
                name: {
                    **asdict(choice.costs),
                    "wire": choice.costs.wire,
                    "problems": list(choice.problems),
                }
                for name, choice in self.choices.items()
            },
            "parameters": [
                {
                    **asdict(p),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "bytes_per_rank": p.bytes_per_rank,
                }
                for p in self.parameters
            ],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return table.render(self)

    def structure(self) -> list[str]:
        """Describe, a line each, what a model and a mesh must have for this plan to fit them."""
        return [
            f"{self.world.num_replicas} x {self.world.num_shards} ranks",
            f"policy {self.policy}",
            f"modules {', '.join(unit or 'the model' for unit in self.units)}",
            *(
                f"{p.decision} {p.name}: {p.role} {p.dtype} {list(p.shape)} {p.spec or ''}"
                f"{' tied to ' + ', '.join(p.tied) if p.tied else ''}"
                for p in self.parameters
            ),
        ]

    def facts(self) -> list[str]:
        """Describe what must be the same on every rank."""
        options = [f"{name}={value}" for name, value in self.options.given().items()]
        return [*self.structure(), *options, f"memory_budget={self.memory_budget}"]


def plan(
    model: nn.Module,
    mesh_or_world_size: "DeviceMesh | int",
    policy: Policy = "shard",
    *,
    modules: Modules = None,
    memory_budget: int | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: "MixedPrecisionPolicy | None" = None,
    offload_policy: "OffloadPolicy | None" = None,
) -> ShardingPlan:
    """Plan how to shard a model over ranks with FSDP2, and what that costs.

    Nothing is allocated: the model may be on the meta device, the ranks need not exist.

    Args:
        model: Any module, not sharded yet: its 4-bit weights, adapters and all.
        mesh_or_world_size: A number of ranks, then nothing is sent; or a mesh `[shard]` or
            `[replicate, shard]`, then every rank of it must call this.
        policy: "shard" everything; "replicate" the frozen parameters on every rank and shard the
            trainable ones only; or "auto": replicate if that fits the budget, since then no frozen
            byte travels, else shard.
        modules: What is gathered one by one beside the model itself: modules of it, or
            `(module, name) -> bool`; by default its layers (`units.choose`).
        memory_budget: Bytes on the device of each rank for all that `Costs.device` counts, which
            activations are not in. By default nothing limits "shard" and "replicate", and "auto"
            takes three quarters of a CUDA device.
        reshard_after_forward: Passed to `fully_shard`, and counted with.
        mp_policy: Likewise.
        offload_policy: Likewise.

    Returns:
        The plan: print it, or give it to `apply`.

    Raises:
        ShardingError: The policy cannot work, is over the budget, or ranks disagree about the
            model or the arguments. With a mesh, the same on every rank.
    """
    options = Options(reshard_after_forward, mp_policy, offload_policy)

    def planned() -> tuple[ShardingPlan, list[str]]:
        budget = memory_budget
        if policy == "auto" and budget is None:
            budget = budget_of_device()
        units, world = choose(model, modules), World.of(mesh_or_world_size)
        made = make(model, world, policy, units, options=options, memory_budget=budget)
        return made, made.facts()

    if isinstance(mesh_or_world_size, int):
        return planned()[0]
    return replace(alike(mesh_or_world_size, planned), mesh=mesh_or_world_size)


def make(
    model: nn.Module,
    world: World,
    policy: Policy,
    units: Sequence[str],
    *,
    options: Options,
    memory_budget: int | None,
) -> ShardingPlan:
    """Do what `plan` does once modules and budget are known, on this rank alone."""
    if policy not in get_args(Policy):
        raise ShardingError(f"policy is {policy!r}, expected one of {', '.join(get_args(Policy))}")
    found = inventory(model, units, world.num_shards)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    choices = {}
    for name in PREFERRED:
        decided = decide(found, name)
        costs = count(decided, buffers, world, options)
        choices[name] = Choice(decided, costs, problems(model, decided, options))
    decision, reason = choose_policy(policy, choices, memory_budget, world, options)
    return ShardingPlan(decision, reason, world, tuple(units), choices, options, memory_budget)
