"""`prepare`: a model's weights made 4-bit where a checkpoint's are, before sharding and loading.

No weight is read. Called by users.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.checkpoint.locate import located
from nf4tensor.checkpoint.match import check_shape, match
from nf4tensor.checkpoint.model import on_all, places, ranks_of, slots
from nf4tensor.errors import UnsupportedError
from nf4tensor.kernels import ops
from nf4tensor.tensor import NF4Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def prepare(model: nn.Module, path: str | Path, mesh: "DeviceMesh | None" = None) -> nn.Module:
    """Give a model the 4-bit weights of a checkpoint, without their values yet.

    Afterwards `load` finds the geometry that it asks for, whichever options or package quantized
    the checkpoint, and `fully_shard` may come in between:

        with torch.device("meta"):
            model = build()
        prepare(model, path)
        fully_shard(model)
        load(model, path)

    Args:
        model: Not sharded. Values of the weights that become 4-bit are dropped; what was on meta
            stays there, and elsewhere the new weights are zero.
        path: As of `load`.
        mesh: The ranks that load together; by default all. Each must call this.

    Returns:
        The model, its 4-bit weights frozen and of the dtypes that the checkpoint says.

    Raises:
        CheckpointError: The checkpoint is damaged, or has a weight of another shape than the model.
            With ranks, whatever fails on one of them is this error on all.
        UnsupportedError: A weight is sharded already; or it is another package's, and no record
            holds it exactly.
    """

    def examine() -> tuple[list[tuple[torch.Tensor, NF4Tensor]], list[str]]:
        made, facts = [], []
        for slot, entry in match(slots(model), Checkpoint(located(path)))[0]:
            if entry.weight is None:
                continue
            check_shape(slot, entry)
            if hasattr(slot.tensor, "_local_tensor"):
                raise UnsupportedError(
                    f"{slot.name} is sharded already: call prepare first, then fully_shard"
                )
            spec = entry.weight.spec
            record = ops.zero_record(entry.shape[:-1], spec, slot.tensor.device)
            made.append((slot.tensor, NF4Tensor(record, spec, entry.weight.dtype)))
            facts.append(f"{slot.name}: {spec}")
        return made, facts

    mesh = ranks_of(model, mesh)
    where = places(model)
    for tensor, weight in on_all(mesh, examine):
        parameter = nn.Parameter(weight, requires_grad=False)
        for module, key in where[id(tensor)]:
            setattr(module, key, parameter)
    return model
