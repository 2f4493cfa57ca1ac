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

ON_HOST = ("packed base", "other frozen", "adapters", "gradients", "optimizer")


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
    """Put together what a rank needs.

    Args:
        plan: Of the model that trains; either of its choices may be asked for.
        policy: Which one.
        step: Of the same model, with the batch of one rank.
        reserve: Add what the allocator and the device's context take.

    Returns:
        Bytes by part. Sharded parts lie on the host where the plan offloads.
    """
    choice = plan.choices[policy]
    costs = choice.costs
    packed = sum(p.bytes_per_rank for p in choice.parameters if p.role == "quantized")
    parts = {
        "packed base": packed,
        "other frozen": costs.frozen - packed,
        "adapters": costs.trainable,
        "gradients": costs.gradients,
        "optimizer": costs.optimizer,
        "buffers": costs.buffers,
        "gathered layers": costs.gathered,
        "decoded weight": costs.decoded,
        "activations": step.kept,
        "logits and others": step.peak - step.kept,
    }
    host = 0
    if plan.options.offloads:
        host = costs.sharded
        for name in ON_HOST:
            parts[name] = 0
        parts["packed base"] = sum(
            p.bytes_per_rank
            for p in choice.parameters
            if p.role == "quantized" and not p.is_sharded
        )
        parts["other frozen"] = (
            costs.frozen
            - parts["packed base"]
            - sum(
                p.bytes_per_rank
                for p in choice.parameters
                if p.role != "trainable" and p.is_sharded
            )
        )
    if reserve:
        parts["reserve"] = round(FRAGMENTATION * sum(parts.values())) + CONTEXT_BYTES
    problem = choice.problems[0] if choice.problems else ""
    return Estimate(policy, parts, host, costs.wire, problem)
