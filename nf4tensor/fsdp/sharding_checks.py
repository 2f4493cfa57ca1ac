"""What is wrong with how a model is sharded: what is not, and settings that cannot work.

Each check takes a survey and yields a finding for each fault; none runs a collective. Called by
`doctor`.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from nf4tensor import _versions
from nf4tensor.fsdp.report import Finding
from nf4tensor.fsdp.survey import LARGE_BYTES, Survey, world_size
from nf4tensor.kernels.schema import WEIGHT_DTYPES

_SHARD_ALL = "`fully_shard(model)`, after its layers, with none of these in ignored_params"


def replicated(survey: Survey) -> Iterator[Finding]:
    """Find 4-bit weights, and large others, of which every rank holds all."""
    ranks = world_size()
    if ranks == 1:
        return
    modules = survey.model.modules()
    is_meant = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in modules)
    for entry in survey.entries:
        nbytes = entry.local.nbytes
        is_large = entry.quantized is not None or nbytes >= LARGE_BYTES
        if entry.num_shards == 1 and is_large:
            yield Finding(
                "note" if is_meant else "warning",
                "replicated",
                (entry.name,),
                nbytes - nbytes // ranks,
                f"whole on each of {ranks} ranks",
                _SHARD_ALL,
            )


def unsynchronized(survey: Survey) -> Iterator[Finding]:
    """Find trainable parameters that FSDP2 left out, beside others that it shards."""
    if world_size() == 1 or not survey.is_sharded:
        return
    for entry in survey.entries:
        is_dtensor = entry.local is not entry.parameter
        if entry.is_trainable and entry.quantized is None and not is_dtensor:
            yield Finding(
                "error",
                "unsynchronized",
                (entry.name,),
                0,
                "trains on each rank alone: nothing averages its gradient",
                _SHARD_ALL,
            )


def integer_reshard(survey: Survey) -> Iterator[Finding]:
    """Find an integer `reshard_after_forward`, for which torch has no path for 4-bit weights."""
    for name, group in survey.groups:
        if _holds_quantized(survey, group) and _versions.reshards_to_smaller_mesh(group):
            yield Finding(
                "error",
                "integer-reshard",
                (name,),
                0,
                "has an integer reshard_after_forward, which torch does not support for 4-bit "
                "weights",
                "`model.get_submodule(name).set_reshard_after_forward(True, recurse=False)`, or "
                "pass True to fully_shard",
            )


def gathered_dtype(survey: Survey) -> Iterator[Finding]:
    """Find a mixed precision that 4-bit weights do not decode to."""
    for name, group in survey.groups:
        dtype = group.mp_policy.param_dtype
        if dtype not in (None, *WEIGHT_DTYPES) and _holds_quantized(survey, group):
            yield Finding(
                "error",
                "gathered-dtype",
                (name,),
                0,
                f"computes in {dtype}, to which 4-bit weights do not decode",
                "pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) to fully_shard",
            )


def mixed_trainable(survey: Survey) -> Iterator[Finding]:
    """Find trainable parameters that FSDP2 cannot reduce together, for their different dtypes."""
    names = {id(entry.parameter): entry.name for entry in survey.entries}
    for _, group in survey.groups:
        trained = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        dtypes: Counter[torch.dtype] = Counter()
        for parameter in trained:
            dtypes[parameter.dtype] += parameter.numel()
        for parameter in trained:
            most = dtypes.most_common(1)[0][0]
            if parameter.dtype != most:
                yield Finding(
                    "error",
                    "mixed-trainable",
                    (names[id(parameter)],),
                    0,
                    f"trains in {parameter.dtype}, and most of what FSDP2 gathers with it in "
                    f"{most}: the first forward raises",
                    "before fully_shard: `parameter = model.get_parameter(name); "
                    f"parameter.data = parameter.data.to({most})`",
                )


def wrapped_by_fsdp1(survey: Survey) -> Iterator[Finding]:
    """Find `FullyShardedDataParallel`, which takes 4-bit weights only if it ignores them."""
    for name, module in survey.model.named_modules():
        classes = {base.__name__ for base in type(module).__mro__}
        held = {id(parameter) for parameter in module.parameters()}
        weights = [entry for entry in survey.quantized if id(entry.parameter) in held]
        if weights and "FullyShardedDataParallel" in classes:
            yield Finding(
                "warning",
                "fsdp1",
                (name,),
                sum(entry.local.nbytes for entry in weights),
                "is a FullyShardedDataParallel (FSDP1), which cannot shard 4-bit weights",
                "leave that wrapper out, and call `fully_shard(model)`",
            )


def _holds_quantized(survey: Survey, group: object) -> bool:
    weights = {id(entry.parameter) for entry in survey.quantized}
    return any(id(p.sharded_param) in weights for p in group.fsdp_params)  # type: ignore[attr-defined]
