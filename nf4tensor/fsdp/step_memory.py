"""What a training step holds beside the model, counted by running it on tensors without memory.

Every operation of the step runs on the meta device, so that what autograd keeps, and for how long,
is what it will keep: no formula to be calibrated, for any architecture. Called by `nf4tensor plan`.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nf4tensor.tensor import NF4Tensor


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward, without parameters, their gradients and buffers.

    Args:
        kept: Held when the forward pass ends, for the backward pass.
        loss: The most held until the first parameter has its gradient: around the loss.
        layers: The most held after that, while layers go backward.
    """

    kept: int
    loss: int
    layers: int


class _Live(TorchDispatchMode):
    """Add up the storages that operations made and that are still held by anybody."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, NF4Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def trace(model: nn.Module, loss: Callable[[], Tensor]) -> StepMemory:
    """Run a forward and a backward pass and count what they hold.

    What kernels need inside of an operation, such as a decoded weight, is not seen here.

    Args:
        model: Whose parameters and buffers are not counted; on the meta device.
        loss: Runs the model and returns the loss, which some parameter gets a gradient of.
            Gradients are dropped as they are made.

    Returns:
        Bytes in the dtypes that the model computes in.
    """
    tensors = [getattr(t, "record", t) for t in (*model.parameters(), *model.buffers())]
    live = _Live(tensors)
    peaks: list[int] = []

    def arrived(parameter: Tensor) -> None:
        parameter.grad = None
        if not peaks:
            peaks.append(live.peak)
            live.peak = 0

    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trained]
    try:
        with live:
            value = loss()
            kept = live.now
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return StepMemory(kept, peaks[0], live.peak)
