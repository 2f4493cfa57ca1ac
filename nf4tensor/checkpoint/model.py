"""What of a model is saved and loaded, and which part of each tensor a rank has.

Called by `save.py`, `load.py` and `prepare.py`, and by integrations for the layouts.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from nf4tensor.errors import CheckpointError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.ranks import alike
from nf4tensor.tensor import NF4Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Made = TypeVar("Made")
Places = dict[int, list[tuple[nn.Module, str]]]
# A module's attribute: by parameter, the spec it was loaded with and what another package's file
# had beside it. Not the parameter's own, of which casts and moves make new ones.
_LAYOUTS = "_nf4tensor_layouts"


@dataclass(frozen=True)
class Slot:
    """A parameter or persistent buffer and all names that it has in the state dict."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The first name, under which it is stored."""
        return self.names[0]


def slots(model: nn.Module) -> list[Slot]:
    """List what `model.state_dict()` holds, shared tensors once.

    Raises:
        CheckpointError: A module adds state that is no tensor.
    """
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name} of the state dict is {type(tensor).__name__}, no tensor: safetensors "
                "files cannot hold it"
            )
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [Slot(tuple(names), tensor) for names, tensor in found.values()]


def places(model: nn.Module) -> Places:
    """Return the modules that have each parameter and buffer, and under which name, by its id."""
    found: Places = {}
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append((module, key))
    return found


def keep_layout(where: Places, tensor: Tensor, layout: dict[str, Any] | None) -> None:
    """Remember what another package's file had beside a weight, or forget it."""
    for module, key in where.get(id(tensor), ()):
        kept = module.__dict__.setdefault(_LAYOUTS, {})
        kept.pop(key, None)
        if layout is not None:
            kept[key] = (whole_spec(tensor), layout)


def kept_layout(where: Places, tensor: Tensor) -> dict[str, Any] | None:
    """Return what `keep_layout` was given, if the weight is still of the spec it had then."""
    if not isinstance(getattr(tensor, "_local_tensor", tensor), NF4Tensor):
        return None
    for module, key in where.get(id(tensor), ()):
        spec, layout = module.__dict__.get(_LAYOUTS, {}).get(key, (None, None))
        if spec == whole_spec(tensor):
            return layout
    return None


def ranks_of(model: nn.Module, mesh: "DeviceMesh | None") -> "DeviceMesh | None":
    """Return the ranks that save or load together: those given, or all; None for one process."""
    if mesh is not None or not (dist.is_available() and dist.is_initialized()):
        return mesh
    from torch.distributed.device_mesh import init_device_mesh

    first = next(iter(model.parameters()), None)
    device = "cpu" if first is None or first.is_meta else first.device.type
    return init_device_mesh(device, (dist.get_world_size(),))


def on_all(mesh: "DeviceMesh | None", make: Callable[[], tuple[Made, list[str]]]) -> Made:
    """Make something here, or on every rank or none (`ranks.alike`)."""
    return make()[0] if mesh is None else alike(mesh, make, CheckpointError)


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and where in the whole it starts.

    Raises:
        CheckpointError: It is a sum that is not added up yet.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return tensor, (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("a partial DTensor is no state: redistribute it first")
    local = tensor._local_tensor
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    assert tuple(local.shape) == tuple(shape) or not local.numel(), (local.shape, shape)
    return local, tuple(start)


def whole_spec(tensor: Tensor) -> NF4Spec:
    """Return the spec of whole rows of a 4-bit weight of which this rank may have some columns.

    Cuts for ranks are on whole blocks, which keeps all but the width (`columns.py`).
    """
    local = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(local, NF4Tensor)
    return replace(local.spec, in_features=tensor.shape[-1])
