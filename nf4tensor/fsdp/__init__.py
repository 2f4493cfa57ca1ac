"""Sharding a whole model with FSDP2: what it will cost, whether it can work, and doing it.

A plain `fully_shard` needs nothing from here. `plan.py` decides and explains, `apply.py` carries a
plan out; `parameters.py` and `units.py` say what is there and how it is grouped, `costs.py` counts
bytes, `checks.py` finds what cannot work, `table.py` prints. `doctor.py` examines a model as it is:
`survey.py` says what is there, each `*_checks.py` what is wrong with it, `report.py` holds the
findings. `estimate.py` adds to a plan what `step_memory.py` counts of a step; `weights.py` takes
dense weights out of a sharded model. torch's FSDP is imported only where it is called, as it takes
a second to load.
"""

from nf4tensor.fsdp.apply import apply
from nf4tensor.fsdp.plan import ShardingPlan, plan
from nf4tensor.fsdp.weights import full_weights

__all__ = ["ShardingPlan", "apply", "full_weights", "plan"]
