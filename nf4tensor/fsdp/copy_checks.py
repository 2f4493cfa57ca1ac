"""Memory that a model holds twice: dense copies, storages behind parameters, broken ties.

Each check takes a survey and yields a finding for each fault; none runs a collective. Called by
`doctor`.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nf4tensor.fsdp.report import Finding
from nf4tensor.fsdp.survey import LARGE_BYTES, Entry, Survey, bytes_of, local_part
from nf4tensor.tensor import NF4Tensor

_OWN_COPY = (
    "before fully_shard, a copy of its own: `owner, _, key = name.rpartition('.'); "
    "module = model.get_submodule(owner); old = getattr(module, key); "
    "setattr(module, key, torch.nn.Parameter(old.detach().clone(), old.requires_grad))`"
)


def dense_copies(survey: Survey) -> Iterator[Finding]:
    """Find dense tensors as large as a 4-bit weight in the module that holds it."""
    for entry in survey.quantized:
        sizes = {entry.parameter.numel(), entry.local.numel()} - {0}
        owner = entry.name.rpartition(".")[0]
        for key, tensor in _tensors_of(entry.module):
            if (
                tensor.is_floating_point()
                and tensor.dim() >= 2
                and not tensor.requires_grad
                and not isinstance(local_part(tensor), NF4Tensor)
                and tensor.numel() in sizes
            ):
                yield Finding(
                    "warning",
                    "dense-copy",
                    (f"{owner}.{key}" if owner else key,),
                    bytes_of(tensor),
                    "a dense tensor of the size of the 4-bit weight beside it",
                    "`owner, _, key = name.rpartition('.'); "
                    "delattr(model.get_submodule(owner), key)`",
                )


def hidden_storage(survey: Survey) -> Iterator[Finding]:
    """Find memory that a parameter keeps alive without using it."""
    for entry in survey.quantized:
        attached = _attached_bytes(entry.local)
        if attached:
            yield Finding(
                "warning",
                "hidden-storage",
                (entry.name,),
                attached,
                "dense data was attached to the 4-bit weight, which never reads it",
                _OWN_COPY,
            )
    used: dict[int, set[tuple[int, int]]] = defaultdict(set)
    holders: dict[int, tuple[Entry, int]] = {}
    for entry in survey.entries:
        tensor = _bytes_held(entry)
        if tensor is not None and not tensor.is_meta:
            storage = tensor.untyped_storage()
            used[storage._cdata].add((int(tensor.storage_offset()), tensor.nbytes))
            holders.setdefault(storage._cdata, (entry, storage.nbytes()))
    for address, (entry, nbytes) in holders.items():
        unused = nbytes - sum(length for _, length in used[address])
        if unused >= LARGE_BYTES:
            yield Finding(
                "warning",
                "hidden-storage",
                (entry.name,),
                unused,
                "a view of a larger tensor, all of which stays in memory",
                _OWN_COPY,
            )


def broken_ties(survey: Survey) -> Iterator[Finding]:
    """Find weights that are equal in every byte and stored apart, adapters left out."""
    seen: dict[Any, list[tuple[Entry, Tensor]]] = defaultdict(list)
    for entry in survey.entries:
        held = entry.local if entry.quantized is None else entry.quantized.record
        key = _looks_like(entry, held)
        if key is None or entry.is_adapter:
            continue
        twin = next((e for e, other in seen[key] if _is_copy(other, held)), None)
        if twin is None:
            seen[key].append((entry, held.detach()))
            continue
        owner, _, attribute = entry.name.rpartition(".")
        yield Finding(
            "error" if entry.is_trainable else "warning",
            "broken-tie",
            (entry.name,),
            held.nbytes,
            f"equal to {twin.name} in every byte but stored apart: if they were tied, they no "
            "longer are",
            f"before fully_shard: `model.get_submodule({owner!r}).{attribute} = "
            f"model.get_parameter({twin.name!r})`, and shard the two modules in one call: "
            "fully_shard([first, second])",
        )


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module holds itself: parameters, buffers and plain attributes."""
    for key, value in (
        *module._parameters.items(),
        *module._buffers.items(),
        *vars(module).items(),
    ):
        if isinstance(value, Tensor):
            yield key, value


def _bytes_held(entry: Entry) -> Tensor | None:
    """Return the tensor whose bytes a parameter uses, padding of its shard included."""
    if entry.quantized is not None:
        padded = entry.quantized.padded
        return entry.quantized.record if padded is None else padded
    is_plain = type(entry.parameter) is nn.Parameter
    return entry.local if is_plain else None


def _attached_bytes(weight: Tensor) -> int:
    """Return the bytes of dense data behind a wrapper that should have none.

    `torch.Tensor.data.__set__` puts it there below Python, where no class can intercept it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        storage = weight.untyped_storage()
    try:
        address = storage.data_ptr()
    except RuntimeError:  # what torch says of a wrapper's storage
        return 0
    return storage.nbytes() if address else 0


def _is_copy(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() != second.data_ptr() and torch.equal(first, second)


def _looks_like(entry: Entry, held: Tensor) -> Any:
    """Return a key that equal weights share; None for what may be equal by accident."""
    if held.dim() < 2 or held.numel() == 0 or held.is_meta:
        return None
    first = held.reshape(-1, held.shape[-1])[0]
    if entry.quantized is not None:
        first = first[: entry.quantized.spec.codes_bytes]
    beginning = tuple(first[:64].tolist())
    spec = None if entry.quantized is None else entry.quantized.spec
    is_constant = len(set(beginning)) == 1
    return None if is_constant else (held.device, held.dtype, held.shape, spec, beginning)
