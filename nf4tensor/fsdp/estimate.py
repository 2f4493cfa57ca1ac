"""What a rank needs in all to train: a plan's bytes, a step's bytes, and what neither sees.

Called by `nf4tensor plan`; docs/memory.md explains each part and compares it with measurements.
"""

from dataclasses import dataclass

from nf4tensor.fsdp.parameters import Decision
from nf4tensor.fsdp.plan import ShardingPlan
from nf4tensor.fsdp.step_memory import StepMemory

# What torch's caching allocator holds beyond what is used, and CUDA's context with NCCL's buffers:
# the lower ends of what published runs show (docs/memory.md). A CPU has neither.
FRAGMENTATION = 0.10
CONTEXT_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Estimate:
    """Bytes of a rank by part.

    Args:
        policy: "shard" or "replicate".
        parts: On the device, in the order of `estimate`.
        host: In the memory of the host, with CPU offload.
        wire: Sent or received in a step.
        problem: Why this policy cannot work, or "".
    """

    policy: Decision
    parts: dict[str, int]
    host: int
    wire: int
    problem: str

    @property
    def device(self) -> int:
        """Bytes in the memory of the device."""
        return sum(self.parts.values())


def estimate(
    plan: ShardingPlan, policy: Decision, step: StepMemory, *, reserve: bool = True
) -> Estimate:
    """Put together what a rank needs at the moment when it needs most.

    That is around the loss, when only what stays gathered is whole and no gradient is there yet, or
    while layers go backward.

    Args:
        plan: Of the model that trains; either of its choices may be asked for.
        policy: Which one.
        step: Of the same model, with the batch of one rank.
        reserve: Add what the allocator and the device's context take.

    Returns:
        Bytes by part. Sharded parts lie on the host where the plan offloads.
    """
    choice = plan.choices[policy]
    moments = [
        _parts(plan, policy, gathered=gathered, gradients=gradients, kept=kept, others=others)
        for gathered, gradients, kept, others in (
            (choice.costs.stays_gathered, 0, step.kept, step.loss - step.kept),
            (
                choice.costs.gathered,
                choice.costs.gradients,
                min(step.kept, step.layers),
                max(step.layers - step.kept, 0),
            ),
        )
    ]
    parts = max(moments, key=lambda parts: sum(parts.values()))
    if reserve:
        parts["reserve"] = round(FRAGMENTATION * sum(parts.values())) + CONTEXT_BYTES
    host = choice.costs.sharded if plan.options.offloads else 0
    problem = choice.problems[0] if choice.problems else ""
    return Estimate(policy, parts, host, choice.costs.wire, problem)


def _parts(
    plan: ShardingPlan, policy: Decision, *, gathered: int, gradients: int, kept: int, others: int
) -> dict[str, int]:
    costs = plan.choices[policy].costs
    frozen = [p for p in plan.choices[policy].parameters if p.role != "trainable"]
    offloads = plan.options.offloads
    on_device = [p for p in frozen if not (offloads and p.is_sharded)]
    return {
        "packed base": sum(p.bytes_per_rank for p in on_device if p.role == "quantized"),
        "other frozen": sum(p.bytes_per_rank for p in on_device if p.role == "frozen"),
        "adapters": 0 if offloads else costs.trainable,
        "gradients": 0 if offloads else gradients,
        "optimizer": 0 if offloads else costs.optimizer,
        "buffers": costs.buffers,
        "gathered layers": gathered,
        "decoded weight": costs.decoded,
        "activations": kept,
        "logits and others": others,
    }
