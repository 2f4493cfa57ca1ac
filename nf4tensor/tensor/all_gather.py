"""What FSDP2 gathers for an NF4Tensor, and the checks that must come before the first collective.

One uint8 record per shard, padded to the same number of rows on every rank: codes and scales move
together, and any number of ranks works. The hooks on the class call these functions.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nf4tensor import _versions
from nf4tensor.errors import ShardingError

if TYPE_CHECKING:
    from nf4tensor.format.spec import NF4Spec
    from nf4tensor.tensor.nf4_tensor import NF4Tensor


class Shard(NamedTuple):
    """What is known of a tensor beside its gathered record."""

    spec: "NF4Spec"
    view: str
    shape: torch.Size  # of the shard's record
    dim: int  # that was sharded


def pre_all_gather(shard: "NF4Tensor", mesh: Any) -> tuple[tuple[Tensor], Shard]:
    """Return the record to gather and what the other side must know.

    Raises:
        ShardingError: `fully_shard` was given an integer `reshard_after_forward`.
    """
    assert _versions.FSDP_HOOK_TAKES_MESH_ONLY
    param = _versions.caller_of_type("FSDPParam")
    _refuse_integer_reshard()
    record = shard.record if shard.padded is None else shard.padded
    dim = _versions.fsdp_shard_dim(param)
    if dim != 0:
        _versions.set_fsdp_shard_size(param, record.shape)
    return (record,), Shard(shard.spec, shard.view_kind, record.shape, dim)


def post_all_gather(gathered: Tensor, shard: Shard) -> Tensor:
    """Return the record of all shards, `[*lead, pitch]`, over what was gathered."""
    if shard.dim != 0:
        param = _versions.caller_of_type("FSDPParam")
        _versions.set_fsdp_shard_size(
            param, torch.Size((*shard.shape[:-1], shard.spec.in_features))
        )
    whole = list(shard.shape)
    whole[shard.dim] = -1
    return gathered.view(whole)


def check_aliases(out: Tensor, record: Tensor) -> None:
    """Check that the unsharded parameter of the first gather sees what was gathered now.

    FSDP2 frees and refills the storage of the gathered record, so nothing has to be copied.
    """
    out = getattr(out, "_local_tensor", out)
    assert out.record.untyped_storage()._cdata == record.untyped_storage()._cdata


def _refuse_integer_reshard() -> None:
    # torch gathers such a parameter again from a smaller mesh, a path that raises
    # NotImplementedError for every tensor with hooks, after the first forward. Remove when it
    # calls them.
    if not _versions.reshards_to_smaller_mesh(_versions.caller_of_type("FSDPParamGroup")):
        return
    raise ShardingError(
        "reshard_after_forward is an integer (a smaller mesh after the forward), which torch does "
        "not support for 4-bit weights: pass reshard_after_forward=True, or False to keep them "
        "gathered; module.set_reshard_after_forward(True) does it now"
    )


def refuse_column_shard(weight: "NF4Tensor") -> None:
    """Stop `fully_shard` before it makes dense shards of columns.

    Raises:
        ShardingError: torch's FSDP2 is the caller.
    """
    if _versions.caller_of_type("FSDPParam") is None:
        return
    way_out = (
        "give it a second dimension, or pass it in ignored_params"
        if weight.dim() == 1
        else "shard dim 0"
    )
    raise ShardingError(
        f"fully_shard would cut the columns of a 4-bit weight of shape {tuple(weight.shape)}, and "
        "a row is never "
        f"cut over ranks: {way_out}"
    )


def refuse_cut_shard(weight: "NF4Tensor", sizes: list[int]) -> None:
    """Stop DTensor before it makes shards of columns that are not records of one geometry.

    Raises:
        ShardingError: A placement of DTensor is the caller.
    """
    if _versions.caller_of_type("Shard", "_StridedShard") is None:
        return
    raise ShardingError(
        f"cannot shard the columns of a 4-bit weight of shape {tuple(weight.shape)} into {sizes}: "
        f"every rank needs as many, a multiple of the block size {weight.spec.block_size}; choose "
        "another number of ranks, a smaller block_size, or shard dim 0"
    )
