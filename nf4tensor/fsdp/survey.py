"""What a model holds on this rank: each parameter, how it is stored, and who else has it.

Facts only, read without a collective and without changing anything; `doctor.py` has them judged. A
parameter that FSDP2 has gathered is surveyed as the shard behind it, which is what stays.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nf4tensor import _versions
from nf4tensor.tensor import NF4Tensor
from nf4tensor.tensor.memory import storage_bytes

# Names of what PEFT and others train; see `Entry.is_adapter`.
_ADAPTER_MARKS = ("lora", "adapter", "modules_to_save")
# Smaller than this, a parameter is not worth a word about its memory.
LARGE_BYTES = 2**20

_ROLES = (
    "4-bit weights",
    "adapters",
    "other trainable",
    "other frozen",
    "buffers",
    "gradients",
    "optimizer state",
    "gathered now",
)


@dataclass(frozen=True)
class Entry:
    """A parameter and where it is.

    Args:
        names: Its names in the model, more than one if it is tied.
        module: The module of its first name.
        parameter: A DTensor if it is sharded.
        local: What this rank holds of it, an NF4Tensor for a 4-bit weight.
        num_shards: Ranks that share it; 1 if each has all of it.
        is_beside_base: It belongs to a module that was put around a single 4-bit matrix.
    """

    names: tuple[str, ...]
    module: nn.Module
    parameter: nn.Parameter
    local: Tensor
    num_shards: int
    is_beside_base: bool

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def quantized(self) -> NF4Tensor | None:
        """The 4-bit tensor of this rank, None for a dense parameter."""
        return self.local if isinstance(self.local, NF4Tensor) else None

    @property
    def is_trainable(self) -> bool:
        """Tell whether it requires a gradient."""
        return self.parameter.requires_grad

    @property
    def is_adapter(self) -> bool:
        """Tell whether it is what one trains beside a 4-bit base.

        Either its name says so, or it has two dimensions or more and belongs to a module that was
        put around a single 4-bit matrix. Biases of the base, norms and embeddings are none.
        """
        says_so = any(mark in self.name.lower() for mark in _ADAPTER_MARKS)
        return self.quantized is None and (
            says_so or (self.is_beside_base and self.parameter.dim() >= 2)
        )

    @property
    def role(self) -> str:
        """What it counts as in the bytes of the report."""
        if self.quantized is not None:
            return "4-bit weights"
        if not self.is_trainable:
            return "other frozen"
        return "adapters" if self.is_adapter else "other trainable"


@dataclass(frozen=True)
class Survey:
    """A model on this rank.

    Args:
        model: The model.
        optimizer: What trains it, or None.
        entries: Its parameters, each once, in the order of the model.
        groups: What FSDP2 gathers at once (`FSDPParamGroup`), with the names of its modules.
        gathered: Whole parameters that FSDP2 holds gathered now.
    """

    model: nn.Module
    optimizer: Any
    entries: tuple[Entry, ...]
    groups: tuple[tuple[str, Any], ...]
    gathered: tuple[Tensor, ...]

    @property
    def quantized(self) -> list[Entry]:
        """The 4-bit weights."""
        return [entry for entry in self.entries if entry.quantized is not None]

    @property
    def is_sharded(self) -> bool:
        """Tell whether FSDP2 shards any of it."""
        return bool(self.groups)

    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer holds."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def bytes_by_role(self) -> dict[str, int]:
        """Count bytes on this rank; memory that several tensors share counts where it is first."""
        tensors: list[tuple[str, Tensor]] = [(e.role, e.local) for e in self.entries]
        tensors += [("buffers", buffer) for buffer in self.model.buffers()]
        tensors += [
            ("gradients", e.parameter.grad) for e in self.entries if e.parameter.grad is not None
        ]
        for parameter in self.optimized():
            state = self.optimizer.state.get(parameter, {})
            tensors += [("optimizer state", v) for v in state.values() if isinstance(v, Tensor)]
        tensors += [("gathered now", tensor) for tensor in self.gathered]
        counted: set[int] = set()
        totals = dict.fromkeys(_ROLES, 0)
        for role, tensor in tensors:
            for storage, nbytes in storage_bytes([tensor]).items():
                totals[role] += nbytes if storage not in counted else 0
                counted.add(storage)
        return {role: nbytes for role, nbytes in totals.items() if nbytes}


def survey(model: nn.Module, optimizer: Any = None) -> Survey:
    """Look at a model, and at what trains it, on this rank."""
    groups = tuple(_groups(model))
    shards = {
        id(whole): param.sharded_param
        for _, group in groups
        for param in group.fsdp_params
        if (whole := getattr(param, "_unsharded_param", None)) is not None
    }
    names: dict[int, list[str]] = {}
    places: list[tuple[nn.Module, nn.Parameter]] = []
    gathered = []
    for prefix, module in model.named_modules():
        for key, found in module._parameters.items():
            if found is None:
                continue
            parameter = shards.get(id(found), found)
            if id(parameter) not in names:
                places.append((module, parameter))
                if parameter is not found:
                    gathered.append(found)
            names.setdefault(id(parameter), []).append(f"{prefix}.{key}" if prefix else key)
    is_beside_base = _beside_base(model)
    entries = tuple(
        Entry(
            names=tuple(names[id(parameter)]),
            module=module,
            parameter=parameter,
            local=local_part(parameter),
            num_shards=_num_shards(parameter),
            is_beside_base=is_beside_base(names[id(parameter)][0]),
        )
        for module, parameter in places
    )
    return Survey(model, optimizer, entries, groups, tuple(gathered))


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: all of it, unless it is a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes that this rank's part of a tensor takes, without padding."""
    return local_part(tensor).nbytes


def world_size() -> int:
    """Return the number of ranks, 1 where none were started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, module in model.named_modules():
        for group in _versions.fsdp_groups(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield name, group


def _num_shards(parameter: Tensor) -> int:
    if not hasattr(parameter, "_local_tensor"):
        return 1
    number = 1
    for dim, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            number *= parameter.device_mesh.size(dim)  # type: ignore[attr-defined]
    return number


def _beside_base(model: nn.Module) -> Callable[[str], bool]:
    """Return whether a name belongs to a module that holds a single 4-bit matrix.

    The smallest module around the parameter that holds any decides: around an adapter that is its
    base's wrapper, around a norm a whole layer, around a router all experts.
    """
    num_matrices: dict[str, int] = {}
    holders: set[str] = set()
    for prefix, module in model.named_modules():
        for weight in module._parameters.values():
            if weight is not None and isinstance(local_part(weight), NF4Tensor):
                holders.add(prefix)
                for around in _around(prefix):
                    stacked = math.prod(weight.shape[:-2])
                    num_matrices[around] = num_matrices.get(around, 0) + stacked

    def is_beside(name: str) -> bool:
        holder, _, key = name.rpartition(".")
        around = next((prefix for prefix in _around(holder) if prefix in num_matrices), None)
        if around is None or num_matrices[around] != 1:
            return False
        return holder not in holders or "bias" not in key

    return is_beside


def _around(name: str) -> Iterable[str]:
    """Return the names of a module and of every module around it, the model's last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
