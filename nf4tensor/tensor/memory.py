"""Questions about memory, and ways out of torch: answered by the record or by decoded values.

Most never reach ATen, where a tensor without memory of its own is an error or a crash, so they are
replaced as Python functions.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nf4tensor import _versions
from nf4tensor.errors import UnsupportedError
from nf4tensor.format.spec import ceil_div
from nf4tensor.tensor import fallback
from nf4tensor.tensor.decoded import decoded
from nf4tensor.tensor.dispatch import overrides
from nf4tensor.tensor.nf4_tensor import NF4Tensor

_WORDS_AT_ONCE = 2**20  # of a checksum


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of every storage behind tensors on this rank, by its address.

    That of a record for a 4-bit tensor, of this rank's part for a DTensor; one that several tensors
    share is there once.
    """
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = getattr(local, "record", local).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return storages


def checksum(parameter: Tensor) -> int:
    """Add up the bytes of a parameter, weighted by their position, modulo 2**64.

    Each word of 8 bytes has an odd weight, so that no change of one goes unseen. On the device, a
    few megabytes at a time: a base of 35 GB must not travel to be compared.
    """
    if parameter.is_meta:
        return 0
    tensor = parameter.record if isinstance(parameter, NF4Tensor) else parameter.detach()
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words_at_once = max(min(_WORDS_AT_ONCE, ceil_div(len(data), 8)), 1)
    odd = torch.arange(1, 2 * words_at_once, 2, device=data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start, part in enumerate(data.split(8 * words_at_once)):
        words = torch.zeros_like(odd)
        words.view(torch.uint8)[: len(part)] = part
        total += (words * (odd + 2 * start * words_at_once)).sum()
    return int(total) % 2**64


@overrides(torch.Tensor.data_ptr)
def _data_ptr(tensor: NF4Tensor) -> int:
    """Return the address of the record, which tells tensors that share memory from others.

    torch.distributed.checkpoint.async_save gets 0, the address of every other wrapper.

    Raises:
        UnsupportedError: safetensors asks, which would read as many bytes as the floats have.
    """
    caller = _versions.calling_module()
    if caller == _versions.COPIES_WRAPPERS_AT_ADDRESS_0:
        return 0
    if caller.partition(".")[0] == "safetensors":
        raise UnsupportedError(
            f"safetensors cannot write an NF4Tensor: it would read {tensor.numel()} "
            f"{tensor.dtype} from a record of {tensor.nbytes} bytes; use "
            "nf4tensor.checkpoint.save(model, folder) or torch.save, or call dequantize_(model) "
            "before save_pretrained"
        )
    return tensor.record.data_ptr()


@overrides(torch.Tensor.share_memory_)
def _share_memory_(tensor: NF4Tensor) -> NF4Tensor:
    """Move the record to shared memory."""
    tensor.record.share_memory_()
    return tensor


@overrides(torch.Tensor.is_shared)
def _is_shared(tensor: NF4Tensor) -> bool:
    """Tell whether the record is in shared memory."""
    return tensor.record.is_shared()


@overrides(torch.Tensor.storage, torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_)
def _no_elements(*args: Any, **kwargs: Any) -> Any:
    """Refuse what works on elements in memory.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "an NF4Tensor has no memory of floats (storage, apply_, map_): use dequantize(), or its "
        "record for the bytes"
    )


def _leaves_torch(function: Any) -> None:
    """Let a function that hands values to other libraries hand over decoded ones."""

    @overrides(function)
    def of_decoded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        fallback.warn_decoded(function.__name__)
        return function(decoded(tensor.dequantize()), *args, **kwargs)


for _function in (
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
):
    _leaves_torch(_function)
