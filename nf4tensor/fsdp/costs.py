"""What a way of sharding costs: bytes on each rank and bytes on the wire.

Formulas only, no tensor; each names the lines of torch's FSDP2 it was read from
(torch/distributed/fsdp/_fully_shard). Activations are not here: they do not depend on the choice.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nf4tensor.errors import ShardingError
from nf4tensor.format.spec import ceil_div
from nf4tensor.fsdp.parameters import ParameterPlan

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

ADAMW_STATES = 2  # exp_avg and exp_avg_sq, of the parameter's dtype (torch/optim/adamw.py)


@dataclass(frozen=True)
class World:
    """How many ranks share a parameter, and how many such groups hold the same.

    Args:
        num_shards: Ranks that share each sharded parameter.
        num_replicas: Groups of them, more than 1 under HSDP.
    """

    num_shards: int
    num_replicas: int = 1

    @classmethod
    def of(cls, mesh_or_world_size: "DeviceMesh | int") -> "World":
        """Read a number of ranks, or a mesh `[shard]` or `[replicate, shard]`.

        Raises:
            ShardingError: There is no rank, or FSDP2 does not take such a mesh.
        """
        if isinstance(mesh_or_world_size, int):
            if mesh_or_world_size < 1:
                raise ShardingError(f"the world size is {mesh_or_world_size}, expected at least 1")
            return cls(mesh_or_world_size)
        mesh = mesh_or_world_size
        if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
            raise ShardingError(
                f"expected a mesh of one dimension, or of two with names (replicate, shard), got "
                f"shape {tuple(mesh.shape)} and names {mesh.mesh_dim_names}: see init_device_mesh"
            )
        return cls(mesh.size(mesh.ndim - 1), mesh.size(0) if mesh.ndim == 2 else 1)


@dataclass(frozen=True)
class Options:
    """The arguments of `fully_shard` that change costs; None is its own default."""

    reshard_after_forward: bool | None = None
    mp_policy: "MixedPrecisionPolicy | None" = None
    offload_policy: "OffloadPolicy | None" = None

    def given(self) -> dict[str, Any]:
        """Return those that are not None."""
        pairs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in pairs.items() if value is not None}

    @property
    def param_dtype(self) -> "torch.dtype | None":
        """What floating parameters are gathered and used in, None: their own dtype."""
        return self.mp_policy.param_dtype if self.mp_policy else None

    @property
    def pins_memory(self) -> bool:
        """Tell whether sharded parameters live in pinned host memory."""
        return bool(getattr(self.offload_policy, "pin_memory", False))

    @property
    def offloads(self) -> bool:
        """Tell whether sharded parameters live in host memory."""
        return hasattr(self.offload_policy, "pin_memory")  # CPUOffloadPolicy, not its base

    def keeps_gathered(self, unit: str) -> bool:
        """Tell whether a unit stays gathered between forward and backward.

        By default the root does (`FSDPState._lazy_init`).
        """
        return not unit if self.reshard_after_forward is None else not self.reshard_after_forward


@dataclass(frozen=True)
class Costs:
    """Bytes of one choice, the same for every rank.

    With N shards and R replicas, and the chunk of a parameter `ceil(rows / N)` of its rows:

    Args:
        frozen: Chunks of frozen parameters, or all of them where they are replicated.
        trainable: Chunks of trainable parameters.
        gradients: As many again.
        optimizer: Twice as many again: AdamW's two states in the parameter's dtype (its step
            counters, 4 bytes a parameter, are left out).
        buffers: Buffers of the model, which FSDP2 leaves whole.
        gathered: What is whole for a while: units that stay gathered, and twice the largest of the
            others, as one is in use while the next arrives in the buffer that it is copied out of
            (`foreach_all_gather_copy_out`); and the gradients of the largest unit, as autograd made
            them and in the buffer that is reduced.
        stays_gathered: Of `gathered`, what is whole all through a step, such as the root.
        decoded: The largest 4-bit weight in the dtype it is used in, once.
        sharded: Of all these, chunks of parameters with their gradients and states.
        device: What is in the memory of the device: all, or with `CPUOffloadPolicy` all that is not
            sharded.
        all_gather: Received by a rank in a step of one forward and backward: N - 1 chunks of each
            sharded parameter, and again in backward for units that reshard, if anything trains.
            Units before the first trainable parameter need no backward and take less.
        reduce_scatter: Sent by a rank in a step: N - 1 chunks of each gradient.
        all_reduce: Sent by a rank in a step under HSDP: `2 (R - 1) / R` of its chunks of gradients
            (a ring).
    """

    frozen: int
    trainable: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    stays_gathered: int
    decoded: int
    sharded: int
    device: int
    all_gather: int
    reduce_scatter: int
    all_reduce: int

    @property
    def wire(self) -> int:
        """Bytes of a step on the wire, for each rank."""
        return self.all_gather + self.reduce_scatter + self.all_reduce


def count(
    parameters: Sequence[ParameterPlan], buffers: int, world: World, options: Options
) -> Costs:
    """Count what parameters with their decisions cost.

    Args:
        parameters: From `decide`.
        buffers: Bytes of the model's buffers.
        world: Ranks.
        options: Arguments of `fully_shard`.
    """
    held = {
        is_sharded: sum(
            p.bytes_per_rank
            for p in parameters
            if p.role != "trainable" and p.is_sharded == is_sharded
        )
        for is_sharded in (True, False)
    }
    trainable = sum(p.bytes_per_rank for p in parameters if p.role == "trainable")
    states = (2 + ADAMW_STATES) * trainable
    gather, reduce = _chunks_by_unit(parameters, options)
    stays_gathered, in_flight = _gathered(gather, world, options)
    gathered = stays_gathered + in_flight
    gathered += 2 * world.num_shards * max(reduce.values(), default=0)
    decoded = max((_decoded(p, options) for p in parameters if p.spec), default=0)
    sharded = held[True] + states
    rest = held[False] + buffers + gathered + decoded
    repeats = {u: 1 + bool(trainable and not options.keeps_gathered(u)) for u in gather}
    num_others, num_others_in_ring = world.num_shards - 1, 2 * (world.num_replicas - 1)
    return Costs(
        frozen=held[True] + held[False],
        trainable=trainable,
        gradients=trainable,
        optimizer=ADAMW_STATES * trainable,
        buffers=buffers,
        gathered=gathered,
        stays_gathered=stays_gathered,
        decoded=decoded,
        sharded=sharded,
        device=rest if options.offloads else rest + sharded,
        all_gather=num_others * sum(repeats[u] * gather[u] for u in gather),
        reduce_scatter=num_others * sum(reduce.values()),
        all_reduce=sum(
            ceil_div(num_others_in_ring * n, world.num_replicas) for n in reduce.values()
        ),
    )


def _chunks_by_unit(
    parameters: Sequence[ParameterPlan], options: Options
) -> tuple[dict[str, int], dict[str, int]]:
    """Add up what a rank sends into a unit's all-gather, and gets from its reduce-scatter.

    `FSDPParam.all_gather_inputs` casts dense floating parameters to `param_dtype`, records never;
    `foreach_reduce` casts gradients, which come in `param_dtype`, to `reduce_dtype`.
    """
    gather: dict[str, int] = defaultdict(int)
    reduce: dict[str, int] = defaultdict(int)
    reduce_dtype = options.mp_policy.reduce_dtype if options.mp_policy else None
    for p in parameters:
        if not p.is_sharded:
            continue
        gather_dtype = _used_dtype(p, options)
        if p.spec:
            gather[p.unit] += p.bytes_per_rank
            continue
        num_elements = p.bytes_per_rank // p.dtype.itemsize
        gather[p.unit] += num_elements * gather_dtype.itemsize
        if p.role == "trainable":
            reduce[p.unit] += num_elements * (reduce_dtype or gather_dtype).itemsize
    return gather, reduce


def _used_dtype(parameter: ParameterPlan, options: Options) -> "torch.dtype":
    own = parameter.dtype
    return options.param_dtype or own if own.is_floating_point else own


def _gathered(gather: dict[str, int], world: World, options: Options) -> tuple[int, int]:
    """Return what stays whole during a step, and what is for a while."""
    whole = {unit: world.num_shards * chunks for unit, chunks in gather.items()}
    kept = [n for unit, n in whole.items() if options.keeps_gathered(unit)]
    others = [n for unit, n in whole.items() if not options.keeps_gathered(unit)]
    # A single rank copies its shard without a buffer in between (`wait_for_unshard`).
    num_buffers = 0 if world.num_shards == 1 else 1
    in_flight = (num_buffers * max(kept, default=0), (1 + num_buffers) * max(others, default=0))
    return sum(kept), max(in_flight)


def _decoded(parameter: ParameterPlan, options: Options) -> int:
    return math.prod(parameter.shape) * _used_dtype(parameter, options).itemsize
