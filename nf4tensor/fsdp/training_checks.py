"""What is wrong with what trains: the wrong parameters, or an optimizer that holds others.

Each check takes a survey and yields a finding for each fault; none runs a collective. Called by
`doctor`.
"""

from collections.abc import Iterator

from torch import Tensor

from nf4tensor.fsdp.report import Finding
from nf4tensor.fsdp.survey import Survey, bytes_of

_NEW_OPTIMIZER = (
    "make the optimizer last, after quantize_ and fully_shard, of what trains: "
    "`optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])`"
)


def trainable_dense(survey: Survey) -> Iterator[Finding]:
    """Find trainable parameters that are no adapter, which is what `quantize_` leaves trainable."""
    if not survey.quantized:
        return
    for entry in survey.entries:
        if entry.is_trainable and entry.quantized is None and not entry.is_adapter:
            yield Finding(
                "warning",
                "trainable-dense",
                (entry.name,),
                entry.local.nbytes,
                "trains, but is no adapter: its gradient takes as much memory again, and so does "
                "each moment of an optimizer",
                "`model.get_parameter(name).requires_grad_(False)`, or "
                "quantize_(model, freeze_base=True) before adapters are added",
            )


def frozen_gradients(survey: Survey) -> Iterator[Finding]:
    """Find gradients of parameters that do not train."""
    for entry in survey.entries:
        if entry.parameter.grad is not None and not entry.is_trainable:
            yield Finding(
                "warning",
                "frozen-gradient",
                (entry.name,),
                bytes_of(entry.parameter.grad),
                "frozen, but still has a gradient",
                "`model.get_parameter(name).grad = None`",
            )


def optimizer_of_frozen(survey: Survey) -> Iterator[Finding]:
    """Find frozen parameters in the optimizer."""
    held = {id(parameter) for parameter in survey.optimized()}
    for entry in survey.entries:
        if id(entry.parameter) in held and not entry.is_trainable:
            yield Finding(
                "warning",
                "optimizer-frozen",
                (entry.name,),
                _state_bytes(survey, entry.parameter),
                "frozen, but in the optimizer, whose state for it is counted here",
                _NEW_OPTIMIZER,
            )


def optimizer_without_trainable(survey: Survey) -> Iterator[Finding]:
    """Find trainable parameters that the optimizer does not know."""
    if survey.optimizer is None:
        return
    held = {id(parameter) for parameter in survey.optimized()}
    for entry in survey.entries:
        if entry.is_trainable and entry.quantized is None and id(entry.parameter) not in held:
            yield Finding(
                "error",
                "optimizer-missing",
                (entry.name,),
                0,
                "trainable, but not in the optimizer: it never changes",
                _NEW_OPTIMIZER,
            )


def optimizer_of_strangers(survey: Survey) -> Iterator[Finding]:
    """Find what the optimizer holds and the model does not: often its parameters of before."""
    known = {id(entry.parameter) for entry in survey.entries}
    for position, parameter in enumerate(survey.optimized()):
        if id(parameter) not in known:
            yield Finding(
                "warning",
                "optimizer-stale",
                (f"parameter {position} of the optimizer",),
                bytes_of(parameter) + _state_bytes(survey, parameter),
                "in the optimizer, but not in the model: quantize_, fully_shard and get_peft_model "
                "replace parameters",
                _NEW_OPTIMIZER,
            )


def _state_bytes(survey: Survey, parameter: Tensor) -> int:
    state = survey.optimizer.state.get(parameter, {}).values()
    return sum(bytes_of(value) for value in state if isinstance(value, Tensor))
