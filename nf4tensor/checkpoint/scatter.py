"""State that only the first rank has, sent to all: each rank its rows, of 4-bit weights as records.

One tensor is under way at a time, and no rank but the first ever has more than its part of one.
Called by integrations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nf4tensor.checkpoint.model import on_all, ranks_of
from nf4tensor.errors import CheckpointError
from nf4tensor.format.spec import NF4Spec, ceil_div
from nf4tensor.tensor import NF4Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FIRST = 0


@dataclass(frozen=True)
class _Sent:
    """What the first rank says of a tensor before it sends it; shape and dtype are decoded ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: NF4Spec | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Sent":
        spec = tensor.spec if isinstance(tensor, NF4Tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, spec)

    def empty(self, num_rows: int | None, device: torch.device | str) -> Tensor:
        """Make room for some rows, or for all of it."""
        lead = self.shape if num_rows is None else (num_rows, *self.shape[1:])
        if self.spec is None:
            return torch.empty(lead, dtype=self.dtype, device=device)
        return torch.empty((*lead[:-1], self.spec.pitch), dtype=torch.uint8, device=device)


def load_from_first_rank(
    model: nn.Module, state: Mapping[str, Tensor], *, offload: bool = False
) -> None:
    """Load a whole state dict that only the first rank has into a model that is sharded.

    Args:
        model: Sharded by `fully_shard` over all ranks, on meta or not; every rank calls this. What
            is on meta becomes what the first rank has: a parameter that was dense here may become
            4-bit. What is not gets its values in place.
        state: Whole tensors on the first rank; not looked at on others.
        offload: Leave the shards in the memory of the host.

    Raises:
        CheckpointError: Names, shapes or formats do not fit the model, or it is sharded in
            another way. The same on every rank, before anything is sent.
    """
    targets = model.state_dict()
    state = state if dist.get_rank() == FIRST else {}
    sent = [{name: _Sent.of(tensor) for name, tensor in state.items()}]
    dist.broadcast_object_list(sent, src=FIRST)
    described = sent[0]

    def checked() -> tuple[bool, list[str]]:
        _check(targets, described)
        return True, [f"{name}: {tuple(t.shape)}" for name, t in targets.items()]

    on_all(ranks_of(model, None), checked)
    parts = {
        name: _receive(targets[name], described[name], state.get(name), offload) for name in targets
    }
    if any(tensor.is_meta for tensor in targets.values()):
        model.load_state_dict(parts, assign=True)
        return
    with torch.no_grad():
        for name, target in targets.items():
            _local(target).copy_(_local(parts[name]))


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _check(targets: Mapping[str, Tensor], described: Mapping[str, _Sent]) -> None:
    if missing := [name for name in targets if name not in described]:
        raise CheckpointError(
            f"the first rank has no {', '.join(missing[:5])} ({len(missing)} in all): build the "
            "same model on every rank"
        )
    for name, target in targets.items():
        sent, local = described[name], _local(target)
        if sent.shape != tuple(target.shape):
            raise CheckpointError(
                f"{name} has shape {list(sent.shape)} on the first rank, here {list(target.shape)}"
            )
        if not local.is_meta and getattr(local, "spec", None) != sent.spec:
            raise CheckpointError(
                f"{name} is {sent.spec or sent.dtype} on the first rank, here "
                f"{getattr(local, 'spec', local.dtype)}: quantize every rank's model alike"
            )
        if _is_sharded(target) and _shard_dim(target) is None:
            raise CheckpointError(
                f"{name} is sharded as {target.placements} over {target.device_mesh.size()} of "
                f"{dist.get_world_size()} ranks: expected rows over all ranks"
            )


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and any(p.is_shard() for p in tensor.placements)


def _shard_dim(tensor: "DTensor") -> int | None:
    """Return the dimension of the mesh that rows are shared over, None if that is not all."""
    dims = [i for i, p in enumerate(tensor.placements) if p.is_shard()]
    by_rows = len(dims) == 1 and tensor.placements[dims[0]].dim == 0
    return dims[0] if by_rows and tensor.device_mesh.size() == dist.get_world_size() else None


def _receive(target: Tensor, sent: _Sent, whole: Tensor | None, offload: bool) -> Tensor:
    """Return this rank's part of what the first rank has; there, send the others theirs."""
    mesh = getattr(target, "device_mesh", None)
    device = mesh.device_type if mesh is not None else _device_of(target)
    if whole is not None:
        whole = whole.detach()
        whole = (whole.record if isinstance(whole, NF4Tensor) else whole).to(device)
    if not _is_sharded(target):
        part = whole.contiguous() if whole is not None else sent.empty(None, device)
        dist.broadcast(part, src=FIRST)
    else:
        part = _scatter(target, sent, whole, device)
    if offload:
        part = part.cpu()
    if sent.spec is not None:
        part = NF4Tensor(part, sent.spec, sent.dtype)
    elif part.is_floating_point():
        part = part.to(target.dtype)
    if mesh is None:
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": target.size(), "stride": target.stride(), "run_check": False}
    return DTensor.from_local(part, mesh, target.placements, **layout)


def _device_of(target: Tensor) -> str:
    if not target.is_meta:
        return target.device.type
    accelerator = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    return accelerator.type if accelerator is not None else "cpu"


def _scatter(target: "DTensor", sent: _Sent, whole: Tensor | None, device: str) -> Tensor:
    """Send each rank its rows, all as many: those behind the last one are left away on arrival."""
    mesh, dim = target.device_mesh, _shard_dim(target)
    assert dim is not None
    chunk = ceil_div(sent.shape[0], mesh.size(dim))
    places = [int((mesh.mesh == rank).nonzero()[0][dim]) for rank in range(dist.get_world_size())]
    part, chunks = sent.empty(chunk, device), None
    if whole is not None:
        chunks = [sent.empty(chunk, device) for _ in places]
        for place, filled in zip(places, chunks, strict=True):
            rows = whole[place * chunk : (place + 1) * chunk]
            filled[: len(rows)].copy_(rows)
    dist.scatter(part, chunks, src=FIRST)
    first = places[dist.get_rank()] * chunk
    return part[: max(0, min(chunk, sent.shape[0] - first))]
