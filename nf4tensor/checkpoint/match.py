"""Which entry of a checkpoint is for which tensor of a model, and whether it fits.

Reads no bytes. Called by `load.py` and `prepare.py`.
"""

from dataclasses import dataclass

from nf4tensor.checkpoint.entries import Entry
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.checkpoint.model import Slot, whole_spec
from nf4tensor.errors import CheckpointError
from nf4tensor.tensor import NF4Tensor

_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
_PEFT_PREFIX, _PEFT_INFIX = "base_model.model.", ".base_layer"


@dataclass(frozen=True)
class LoadResult:
    """Names without a counterpart.

    Args:
        missing: Of the model; they are as they were before.
        unexpected: Of the checkpoint; they were not read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(found: list[Slot], checkpoint: Checkpoint) -> tuple[list[tuple[Slot, Entry]], LoadResult]:
    """Pair what a model has with what a checkpoint holds, by any of their names."""
    pairs, missing = [], []
    for slot in found:
        names = (*slot.names, *map(_without_peft, slot.names))
        entry = next((e for e in map(checkpoint.find, names) if e is not None), None)
        if entry is None:
            missing.append(slot.name)
        else:
            pairs.append((slot, entry))
    used = {entry.name for _, entry in pairs}
    unexpected = tuple(name for name in checkpoint.entries if name not in used)
    return pairs, LoadResult(tuple(missing), unexpected)


def _without_peft(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX).replace(_PEFT_INFIX, "")


def unmatched(result: LoadResult, checkpoint: Checkpoint) -> str:
    """Say which names have no counterpart."""

    def listed(names: tuple[str, ...]) -> str:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return ", ".join(names[:5]) + more

    missing = f"the model has {listed(result.missing)}, which {checkpoint.path} lacks; "
    unexpected = f"{checkpoint.path} has {listed(result.unexpected)}, which the model lacks; "
    return (
        (missing if result.missing else "")
        + (unexpected if result.unexpected else "")
        + "pass strict=False to leave them out"
    )


def check_shape(slot: Slot, entry: Entry) -> None:
    """Refuse an entry of another shape than the tensor that it is for.

    Raises:
        CheckpointError: It is.
    """
    if entry.weights_shape != tuple(slot.tensor.shape):
        raise CheckpointError(
            f"{entry.what} has shape {list(entry.weights_shape)}, {slot.name} of the model "
            f"{list(slot.tensor.shape)}"
        )


def check_fits(slot: Slot, entry: Entry, requantize: bool = False) -> None:
    """Refuse an entry of another shape, spec or kind than the tensor that it is for.

    Args:
        slot: Of the model.
        entry: Of the checkpoint.
        requantize: Allow another spec.

    Raises:
        CheckpointError: It is.
    """
    check_shape(slot, entry)
    local = getattr(slot.tensor, "_local_tensor", slot.tensor)
    if isinstance(local, NF4Tensor):
        spec = whole_spec(slot.tensor)
        if entry.weight is not None and entry.weight.spec != spec and not requantize:
            raise CheckpointError(
                f"{entry.what} has {entry.weight.spec}, {slot.name} of the model {spec}: call "
                "checkpoint.prepare(model, path) before it is sharded, or quantize the model with "
                "the same options; requantize=True rounds the weight again"
            )
        if entry.weight is None and entry.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                f"{entry.what} is {entry.dtype}, expected F32, BF16 or F16 to quantize, or a 4-bit "
                "weight with its metadata"
            )
    elif entry.weight is None and (entry.dtype in _FLOATS) != slot.tensor.is_floating_point():
        raise CheckpointError(f"{entry.what} is {entry.dtype}, {slot.name} {slot.tensor.dtype}")
