"""What is wrong with the weights themselves: dense or trainable ones, and their dtypes.

Each check takes a survey and yields a finding for each fault; none runs a collective. Called by
`doctor`.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from nf4tensor.format.spec import NF4Spec
from nf4tensor.fsdp.report import Finding
from nf4tensor.fsdp.survey import LARGE_BYTES, Entry, Survey
from nf4tensor.fsdp.table import without_numbers

_OF_OTHERS = ("bitsandbytes", "torchao")


def nothing_quantized(survey: Survey) -> Iterator[Finding]:
    """Find a model without any 4-bit weight."""
    if not survey.quantized:
        linears = [e for e in survey.entries if isinstance(e.module, nn.Linear)]
        yield Finding(
            "warning",
            "no-4-bit",
            ("",),
            sum(_saved_bytes(entry) for entry in linears if _may_be_quantized(entry)),
            "no weight is 4-bit",
            "before fully_shard: `nf4tensor.quantize_(model)`",
        )


def quantized_by_others(survey: Survey) -> Iterator[Finding]:
    """Find weights in the formats of other libraries, which FSDP2 cannot shard by rows."""
    for entry in survey.entries:
        library = type(entry.local).__module__.partition(".")[0]
        if library in _OF_OTHERS:
            yield Finding(
                "warning",
                "other-format",
                (entry.name,),
                entry.local.nbytes,
                f"quantized by {library}: its scales are not in its rows, so what is said here "
                "of sharding and memory does not hold for it",
                "load the model without a quantization_config, then `nf4tensor.quantize_(model)`",
            )


def trainable_base(survey: Survey) -> Iterator[Finding]:
    """Find 4-bit weights that require a gradient."""
    for entry in survey.quantized:
        if entry.is_trainable:
            yield Finding(
                "error",
                "trainable-base",
                (entry.name,),
                0,
                "4-bit and requires a gradient: a backward pass that reaches it raises",
                "`model.get_parameter(name).requires_grad_(False)`",
            )


def upcasts(survey: Survey) -> Iterator[Finding]:
    """Find frozen dense parameters that are wider than the base."""
    dtype = _base_dtype(survey)
    if dtype is None:
        return
    for entry in survey.entries:
        local = entry.local
        is_dense = entry.quantized is None and local.is_floating_point()
        if is_dense and not entry.is_trainable and local.itemsize > dtype.itemsize:
            yield Finding(
                "warning",
                "upcast",
                (entry.name,),
                local.numel() * (local.itemsize - dtype.itemsize),
                f"frozen in {local.dtype}, while the 4-bit weights are {dtype}: what follows it "
                "computes, and keeps activations, in the wider one",
                "before fully_shard: `parameter = model.get_parameter(name); "
                f"parameter.data = parameter.data.to({dtype})`",
            )


def logical_dtypes(survey: Survey) -> Iterator[Finding]:
    """Find 4-bit weights of another logical dtype than most."""
    dtype = _base_dtype(survey)
    for entry in survey.quantized:
        if entry.local.dtype != dtype:
            yield Finding(
                "warning",
                "logical-dtype",
                (entry.name,),
                0,
                f"a 4-bit weight of logical dtype {entry.local.dtype}, while most are {dtype}",
                "before fully_shard, which changes no byte of it: "
                "`parameter = model.get_parameter(name); "
                f"torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.to({dtype}), "
                "False))`",
            )


def dense_weights(survey: Survey) -> Iterator[Finding]:
    """Find large frozen weights that stayed dense: one of many alike is an accident, not a note."""
    if not survey.quantized:
        return
    kinds = {without_numbers(entry.name) for entry in survey.quantized}
    for entry in survey.entries:
        if entry.is_trainable or not _may_be_quantized(entry) or entry.local.nbytes < LARGE_BYTES:
            continue
        saved = _saved_bytes(entry)
        if not saved:
            yield Finding(
                "note",
                "narrow",
                (entry.name,),
                0,
                "dense: 4-bit rows of so few columns would be no smaller than bfloat16 ones",
                "none is needed",
            )
            continue
        is_odd_one = without_numbers(entry.name) in kinds
        tied = "; tied weights stay dense unless all their modules are chosen"
        yield Finding(
            "warning" if is_odd_one else "note",
            "dense-weight",
            entry.names,
            saved,
            ("dense, while those of other layers are 4-bit" if is_odd_one else "large and dense")
            + (tied if len(entry.names) > 1 else ""),
            "if its accuracy allows, before fully_shard: "
            "`owners = {n.rpartition('.')[0] for n in names}; nf4tensor.quantize_(model, skip=(), "
            "filter_fn=lambda module, name: name in owners)`",
        )


def _may_be_quantized(entry: Entry) -> bool:
    library = type(entry.local).__module__.partition(".")[0]
    is_dense = entry.quantized is None and library not in _OF_OTHERS
    return is_dense and entry.local.dim() >= 2 and entry.local.is_floating_point()


def _saved_bytes(entry: Entry) -> int:
    """Return what 4 bits would save of a dense weight; nothing if they don't beat bfloat16."""
    columns = entry.local.shape[-1]
    if columns == 0 or NF4Spec.for_weight(columns).pitch >= torch.bfloat16.itemsize * columns:
        return 0
    rows = entry.local.numel() // columns
    return entry.local.nbytes - rows * NF4Spec.for_weight(columns).pitch


def _base_dtype(survey: Survey) -> torch.dtype | None:
    """Return the logical dtype of most 4-bit weights."""
    dtypes: Counter[torch.dtype] = Counter()
    for entry in survey.quantized:
        dtypes[entry.local.dtype] += entry.parameter.numel()
    return dtypes.most_common(1)[0][0] if dtypes else None
