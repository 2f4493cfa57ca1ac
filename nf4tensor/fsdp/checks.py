"""What cannot work, found without a collective: each fault with the parameter and the way out.

torch would find the same later: with another message, after the first gather, on some ranks only,
or never. Called by `plan`, and by `apply` again with its own options.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nf4tensor.fsdp.costs import Options
from nf4tensor.fsdp.parameters import ParameterPlan
from nf4tensor.kernels.schema import WEIGHT_DTYPES


def problems(
    model: nn.Module, parameters: Sequence[ParameterPlan], options: Options
) -> tuple[str, ...]:
    """List why these parameters with their decisions cannot be sharded and trained.

    Args:
        model: The model that the parameters are of.
        parameters: From `decide`.
        options: Arguments of `fully_shard`.

    Returns:
        A sentence for each fault.
    """
    tensors = dict(model.named_parameters())
    sharded = [p for p in parameters if p.is_sharded]
    return (
        *_of_options(parameters, options),
        *(
            f"{p.name} is 4-bit and requires a gradient: call requires_grad_(False) on it and "
            "train adapters beside it"
            for p in parameters
            if p.spec and tensors[p.name].requires_grad
        ),
        *_of_shapes(sharded, tensors),
        *_of_groups(sharded),
        *_of_replicated_dtypes(parameters, options),
    )


def _of_options(parameters: Sequence[ParameterPlan], options: Options) -> Iterator[str]:
    if type(options.reshard_after_forward) not in (bool, type(None)):
        yield (
            f"reshard_after_forward={options.reshard_after_forward!r} is no bool: torch cannot "
            "gather 4-bit weights from a smaller mesh; pass True, or False to keep them gathered"
        )
    if options.pins_memory and not torch.accelerator.is_available():
        yield (
            "CPUOffloadPolicy pins memory, which needs an accelerator: pass "
            "CPUOffloadPolicy(pin_memory=False)"
        )
    if options.param_dtype not in (*WEIGHT_DTYPES, None) and any(p.spec for p in parameters):
        yield (
            f"mp_policy.param_dtype is {options.param_dtype}, which 4-bit weights do not decode "
            "to: choose float32, bfloat16 or float16"
        )


def _of_shapes(sharded: Sequence[ParameterPlan], tensors: dict[str, nn.Parameter]) -> Iterator[str]:
    for p in sharded:
        if not p.shape:
            yield f"{p.name} is a scalar, which FSDP2 cannot shard: give it one dimension"
        elif p.spec and len(p.shape) == 1 and p.num_shards > 1:
            yield (
                f"{p.name} is a 4-bit weight of one dimension, a single row, which is never cut "
                f"over {p.num_shards} ranks: give it a second dimension, or replicate"
            )
        elif not tensors[p.name].is_contiguous():
            yield f"{p.name} is not contiguous: assign a contiguous copy, or replicate"


def _of_groups(sharded: Sequence[ParameterPlan]) -> Iterator[str]:
    """Find what FSDP2 asks of a group: parameters shared inside it, trainable ones of one dtype.

    It would shard a parameter of two groups twice and untie it, and checks dtypes at the first
    forward (`FSDPParamGroup._init_mp_dtypes`).
    """
    for p in sharded:
        if len(p.units) > 1:
            units = " and ".join(unit or "the model" for unit in p.units)
            yield (
                f"{p.name} is one parameter with {', '.join(p.tied)}, but {units} are sharded "
                "apart: choose modules= so that one holds both, or untie them"
            )
    dtypes: dict[str, dict[torch.dtype, str]] = defaultdict(dict)
    for p in sharded:
        if p.role == "trainable":
            dtypes[p.unit].setdefault(p.dtype, p.name)
    for unit, names in dtypes.items():
        if len(names) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in names.items())
            yield (
                f"trainable parameters of {unit or 'the model'} have different dtypes ({listed}): "
                "cast them to one, or freeze those that need not train"
            )


def _of_replicated_dtypes(parameters: Sequence[ParameterPlan], options: Options) -> Iterator[str]:
    """Find dense parameters that mixed precision, which casts what it gathers, would leave out."""
    if options.param_dtype is None:
        return
    for p in parameters:
        is_dense = not p.is_sharded and p.role == "frozen" and p.dtype.is_floating_point
        if is_dense and p.dtype != options.param_dtype:
            yield (
                f"{p.name} would be replicated in {p.dtype}, while mp_policy computes in "
                f"{options.param_dtype}: cast the frozen parameters first, or shard"
            )
            return
