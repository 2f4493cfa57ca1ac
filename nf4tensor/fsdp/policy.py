"""The choice between sharding and replicating the frozen weights, by what works and what fits.

Given both choices with their costs and problems; counting is `costs.py`. Called by `plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from nf4tensor.errors import ShardingError
from nf4tensor.fsdp.costs import Costs, Options, World, count
from nf4tensor.fsdp.parameters import Decision, ParameterPlan
from nf4tensor.fsdp.table import amount

Policy = Literal["shard", "replicate", "auto"]
# Replicated weights never travel, so `auto` replicates where that fits.
PREFERRED: tuple[Decision, ...] = ("replicate", "shard")
# What `auto` takes of a CUDA device without being told; activations get the rest.
_SHARE_OF_DEVICE = 0.75
_MOST_RANKS_TRIED = 4096


@dataclass(frozen=True)
class Choice:
    """What one policy does with each parameter, what it costs, and why it cannot work."""

    parameters: tuple[ParameterPlan, ...]
    costs: Costs
    problems: tuple[str, ...]


def budget_of_device() -> int:
    """Return the bytes that `auto` may use of a CUDA device where nobody said.

    Raises:
        ShardingError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ShardingError(
            "policy='auto' needs to know the memory of a rank, and here is no CUDA device to ask: "
            "pass memory_budget=, in bytes"
        )
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(_SHARE_OF_DEVICE * device.total_memory)


def choose_policy(
    policy: Policy,
    choices: dict[Decision, Choice],
    budget: int | None,
    world: World,
    options: Options,
) -> tuple[Decision, str]:
    """Choose the first policy that works and fits, and say why.

    Args:
        policy: As asked.
        choices: Both policies.
        budget: Bytes on the device of each rank, None without limit.
        world: Ranks the choices are for.
        options: Arguments of `fully_shard` they are for.

    Raises:
        ShardingError: None works, or none that works fits.
    """
    wanted = PREFERRED if policy == "auto" else (policy,)
    working = [name for name in wanted if not choices[name].problems]
    if not working:
        problems = dict.fromkeys(text for name in wanted for text in choices[name].problems)
        raise ShardingError("\n".join(problems))
    if budget is None:
        return working[0], "as asked"
    fitting = [name for name in working if choices[name].costs.device <= budget]
    if not fitting:
        raise ShardingError(_over_budget(choices, working[-1], budget, world, options))
    return fitting[0], _reason(policy, choices, fitting[0], budget)


def _reason(policy: Policy, choices: dict[Decision, Choice], chosen: Decision, budget: int) -> str:
    fits = f"{amount(choices[chosen].costs.device)} fit the budget of {amount(budget)} a rank"
    if policy != "auto":
        return f"as asked; {fits}"
    if chosen == "replicate":
        return f"{fits}, and no frozen weight has to travel"
    replicate = choices["replicate"]
    if replicate.problems:
        return f"{fits}; replicating cannot work: {replicate.problems[0]}"
    return f"{fits}; replicating the frozen weights takes {amount(replicate.costs.device)}"


def _over_budget(
    choices: dict[Decision, Choice],
    chosen: Decision,
    budget: int,
    world: World,
    options: Options,
) -> str:
    """Say by how much a choice is over the budget, where its bytes are, and what would help."""
    costs = choices[chosen].costs
    states = costs.trainable + costs.gradients + costs.optimizer
    ways = list(_ways_out(choices, chosen, budget, world, options))
    return (
        f"to {chosen} over {world.num_shards} ranks takes {amount(costs.device)} on each, "
        f"{amount(costs.device - budget)} more than the budget of {amount(budget)}: "
        f"{amount(costs.frozen)} are frozen parameters, {amount(states)} trainable ones with "
        f"gradients and AdamW states, {amount(costs.gathered + costs.decoded)} gathered or decoded "
        f"for a while; {', or '.join(ways) or 'choose smaller modules=, fewer trainable weights'}"
    )


def _ways_out(
    choices: dict[Decision, Choice],
    chosen: Decision,
    budget: int,
    world: World,
    options: Options,
) -> Iterator[str]:
    costs = choices[chosen].costs
    shard = choices["shard"]
    if chosen == "replicate" and not shard.problems and shard.costs.device <= budget:
        yield f"policy='shard' takes {amount(shard.costs.device)}"
    num_shards = 2 * world.num_shards
    while num_shards <= _MOST_RANKS_TRIED:
        parameters = [replace(p, num_shards=num_shards) for p in choices[chosen].parameters]
        larger = replace(world, num_shards=num_shards)
        device = count(parameters, costs.buffers, larger, options).device
        if device <= budget:
            yield f"{num_shards} ranks take {amount(device)}"
            break
        num_shards *= 2
    left = costs.device - costs.sharded
    if not options.offloads and left <= budget:
        yield f"offload_policy=CPUOffloadPolicy() leaves {amount(left)} on the device"
