"""`apply`: carry a plan out with plain `fully_shard`, once every rank is found able and alike.

Nothing of FSDP2 is replaced: modules, hooks and state are what a user's own calls would give.
Called by users.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from nf4tensor.errors import ShardingError
from nf4tensor.fsdp.costs import Options, World
from nf4tensor.fsdp.plan import ShardingPlan, make
from nf4tensor.ranks import alike, first_difference
from nf4tensor.tensor.memory import checksum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


def apply(
    model: nn.Module,
    plan: ShardingPlan,
    *,
    mesh: "DeviceMesh | None" = None,
    reshard_after_forward: bool | None = None,
    mp_policy: "MixedPrecisionPolicy | None" = None,
    offload_policy: "OffloadPolicy | None" = None,
) -> nn.Module:
    """Shard a model as planned: `fully_shard` on each module of the plan, then on the model.

    Replicated parameters are passed in `ignored_params`; they stay where they are.

    Args:
        model: The model the plan was made for, or one alike, not sharded.
        plan: From `plan`.
        mesh: The ranks; by default the mesh of the plan, or all ranks.
        reshard_after_forward: Passed to `fully_shard` in place of the plan's.
        mp_policy: Likewise.
        offload_policy: Likewise.

    Returns:
        The model, sharded in place.

    Raises:
        ShardingError: The plan does not fit the model or the mesh, cannot work with these
            arguments, or ranks disagree about any of them or about the bytes of replicated
            parameters. The same on every rank, before anything is sharded.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or plan.mesh or _all_ranks()
    given = Options(reshard_after_forward, mp_policy, offload_policy).given()
    options = replace(plan.options, **given)

    def checked() -> tuple[ShardingPlan, list[str]]:
        now = make(
            model, World.of(mesh), plan.policy, plan.units, options=options, memory_budget=None
        )
        difference = first_difference(plan.structure(), now.structure())
        if difference is not None:
            raise ShardingError(
                f"the plan was made for `{difference[0]}`, found `{difference[1]}`: plan again for "
                "this model and mesh"
            )
        return now, [*now.facts(), *_replicated_facts(model, now, mesh.device_type)]

    parameters = dict(model.named_parameters())
    ready = alike(mesh, checked)
    ignored = {parameters[p.name] for p in ready.parameters if not p.is_sharded}
    for unit in ready.units:
        module = model.get_submodule(unit)
        fully_shard(module, mesh=mesh, ignored_params=ignored, **options.given())
    return model


def _all_ranks() -> "DeviceMesh":
    """Make the mesh that `fully_shard` would."""
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _replicated_facts(model: nn.Module, plan: ShardingPlan, device_type: str) -> list[str]:
    """Describe the bytes of replicated parameters, which must be the same on every rank.

    Raises:
        ShardingError: One is on another device, where FSDP2 leaves it.
    """
    parameters = dict(model.named_parameters())
    facts = []
    for p in plan.parameters:
        if p.is_sharded:
            continue
        parameter = parameters[p.name]
        if parameter.device.type not in (device_type, "meta"):
            raise ShardingError(
                f"{p.name} is replicated but on {parameter.device}, while the mesh is on "
                f"{device_type}: move the model there first"
            )
        facts.append(f"{p.name} on {parameter.device.type} with checksum {checksum(parameter):x}")
    return facts
