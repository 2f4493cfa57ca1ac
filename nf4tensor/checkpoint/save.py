"""`save`: a model's parameters and buffers into safetensors files, 4-bit weights as their records.

A sharded model is gathered one tensor at a time and written by the first rank, so files are the
same whoever saves. Called by users and integrations.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nf4tensor.checkpoint.entries import Weight
from nf4tensor.checkpoint.model import (
    Places,
    kept_layout,
    local_part,
    on_all,
    places,
    ranks_of,
    slots,
    whole_spec,
)
from nf4tensor.checkpoint.write import Plan, WriteOptions, write_all
from nf4tensor.errors import CheckpointError
from nf4tensor.tensor import NF4Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def save(
    model: nn.Module,
    path: str | Path,
    mesh: "DeviceMesh | None" = None,
    *,
    max_file_bytes: int = WriteOptions.max_file_bytes,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Save a model into a folder of safetensors files.

    Args:
        model: Any module, sharded or not; every rank must call this with its part. What its
            `state_dict()` has is saved, shared tensors once.
        path: Folder, shared by all ranks or of the first. It appears when all is written.
        mesh: The ranks that save together; by default all.
        max_file_bytes: A file gets no more tensors beyond this many bytes.
        overwrite: Replace the checkpoint that is there; until it is replaced it stays whole.
        progress: Show a bar on the first rank.

    Raises:
        CheckpointError: The folder exists, or cannot be written. The same on every rank.
        DTypeError: A tensor's dtype has no name in safetensors files.
    """
    mesh = ranks_of(model, mesh)
    jobs, aliases, config = on_all(mesh, partial(_examine, model))
    options = WriteOptions(max_file_bytes, overwrite, progress)

    def write(gather: Callable[[Tensor], Tensor]) -> None:
        made = [(plan, partial(_stored, tensor, gather)) for plan, tensor in jobs]
        write_all(Path(path), made, aliases, config, options)

    if mesh is None:
        write(lambda tensor: tensor)
    else:
        _save_together(mesh, [tensor for _, tensor in jobs], write)


def _examine(
    model: nn.Module,
) -> tuple[tuple[list[tuple[Plan, Tensor]], dict[str, str], dict[str, Any]], list[str]]:
    """Return what is written of each tensor, other names, and the model's own configuration."""
    found, where = slots(model), places(model)
    jobs = []
    for slot in found:
        if slot.tensor.is_meta:
            raise CheckpointError(f"{slot.name} is on meta: load the model before it is saved")
        local_part(slot.tensor)  # or it is no state
        jobs.append((_plan(slot.name, slot.tensor, where), slot.tensor))
    aliases = {alias: slot.name for slot in found for alias in slot.names[1:]}
    own = getattr(model, "config", None)
    config = own.to_diff_dict() if hasattr(own, "to_diff_dict") else {}
    config.pop("quantization_config", None)
    return (jobs, aliases, config), [str(plan) for plan, _ in jobs]


def _save_together(
    mesh: "DeviceMesh", tensors: list[Tensor], write: Callable[[Callable[[Tensor], Tensor]], None]
) -> None:
    """Let every rank take part in gathering, whatever becomes of the writing."""
    waiting = iter(tensors)

    def gather(tensor: Tensor) -> Tensor:
        following = next(waiting)
        assert following is tensor
        return _whole(tensor)

    def run() -> tuple[bool, list[str]]:
        try:
            if mesh.get_rank() == int(mesh.mesh.flatten()[0]):
                write(gather)
        finally:
            for tensor in waiting:
                _whole(tensor)
        return True, []

    on_all(mesh, run)


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _plan(name: str, tensor: Tensor, where: Places) -> Plan:
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, NF4Tensor):
        return Plan(name, tuple(tensor.shape), tensor.dtype)
    spec = whole_spec(tensor)
    shape = (*tensor.shape[:-1], spec.pitch)
    return Plan(name, shape, torch.uint8, Weight(spec, tensor.dtype, kept_layout(where, tensor)))


def _stored(tensor: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    whole = gather(tensor)
    return whole.record if isinstance(whole, NF4Tensor) else whole
