"""Every parameter of a model with its role, its group, and the rows that each rank gets.

Facts only: `costs.py` counts with them and `checks.py` judges them. FSDP2 cuts dimension 0 into
`torch.chunk`'s pieces and pads each to the first one's rows (`FSDPParam._init_sharded_param`).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from nf4tensor.errors import ShardingError
from nf4tensor.format.spec import NF4Spec, ceil_div
from nf4tensor.tensor import NF4Tensor

Role = Literal["quantized", "trainable", "frozen"]
Decision = Literal["shard", "replicate"]


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter and what becomes of it.

    Args:
        name: Its first name in the model.
        tied: Its other names.
        role: "quantized" (4-bit), "trainable", or "frozen" (dense).
        shape: `[rows, *]`, decoded.
        dtype: What it is stored in; the logical dtype of a 4-bit weight.
        spec: Geometry of a 4-bit weight, else None.
        nbytes: Bytes of the whole parameter, records for a 4-bit one.
        units: Names of the modules it is gathered with, one unless it is tied; "" is the model.
        num_shards: Ranks that share it if it is sharded.
        decision: "shard", or "replicate": whole on every rank, passed in `ignored_params`.
    """

    name: str
    tied: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: NF4Spec | None
    nbytes: int
    units: tuple[str, ...]
    num_shards: int
    decision: Decision = "shard"

    @property
    def is_sharded(self) -> bool:
        """Tell whether each rank holds its rows only."""
        return self.decision == "shard"

    @property
    def unit(self) -> str:
        """Name of the module it is gathered with."""
        return self.units[0]

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that every rank holds: FSDP2 pads each shard to `ceil(rows / num_shards)` rows."""
        return self._chunk_rows * self._row_bytes if self.is_sharded else self.nbytes

    def bytes_of_rows(self, rank: int) -> int:
        """Return the bytes of the rows that are a rank's own, without padding.

        Args:
            rank: Position in the shard dimension of the mesh.
        """
        if not self.is_sharded:
            return self.nbytes
        rows_left = self.shape[0] - rank * self._chunk_rows
        return min(max(rows_left, 0), self._chunk_rows) * self._row_bytes

    @property
    def _chunk_rows(self) -> int:
        return ceil_div(self.shape[0], self.num_shards) if self.shape else 1

    @property
    def _row_bytes(self) -> int:
        rows = self.shape[0] if self.shape else 1
        return self.nbytes // rows if rows else 0


def inventory(model: nn.Module, units: Sequence[str], num_shards: int) -> tuple[ParameterPlan, ...]:
    """List the parameters of a model, each once, for now all sharded.

    Args:
        model: Any module, not sharded; its parameters may be on the meta device.
        units: Names of the modules that are gathered one by one, with "" for the model.
        num_shards: Ranks that share each sharded parameter.

    Returns:
        One entry for each parameter, in the order of the model.

    Raises:
        ShardingError: A unit is not in the model, or a parameter is sharded already.
    """
    unit_of = _units_by_module(model, units)
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    found = []
    for parameter in model.parameters():
        name, *tied = places[id(parameter)]
        if _is_dtensor(parameter):
            raise ShardingError(
                f"{name} is a DTensor already: plan and apply take a model that is not sharded; "
                "beside tensor parallelism, call fully_shard yourself"
            )
        found.append(
            ParameterPlan(
                name=name,
                tied=tuple(tied),
                role=_role(parameter),
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                spec=parameter.spec if isinstance(parameter, NF4Tensor) else None,
                nbytes=parameter.nbytes,
                units=tuple(dict.fromkeys(unit_of[place] for place in (name, *tied))),
                num_shards=num_shards,
            )
        )
    return tuple(found)


def decide(parameters: Sequence[ParameterPlan], policy: Decision) -> tuple[ParameterPlan, ...]:
    """Shard every parameter, or replicate the frozen ones and shard the trainable ones only."""
    return tuple(
        replace(p, decision="shard" if p.role == "trainable" else policy) for p in parameters
    )


def _role(parameter: nn.Parameter) -> Role:
    if isinstance(parameter, NF4Tensor):
        return "quantized"
    return "trainable" if parameter.requires_grad else "frozen"


def _units_by_module(model: nn.Module, units: Sequence[str]) -> dict[str, str]:
    """Return the unit of every place of a parameter: the innermost module around it that is one.

    By identity, not by name: a module that a model uses twice has two names, and is one unit.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [unit for unit in units if unit not in modules]
    if missing:
        raise ShardingError(f"the model has no module {', '.join(missing)}: plan again for it")
    names = {id(modules[unit]): unit for unit in units}
    found = {}
    for place, _ in model.named_parameters(remove_duplicate=False):
        around = place.rpartition(".")[0]
        while id(modules[around]) not in names:
            around = around.rpartition(".")[0]
        found[place] = names[id(modules[around])]
    return found


def _is_dtensor(parameter: nn.Parameter) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(parameter, distributed.DTensor)
