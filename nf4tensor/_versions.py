"""Questions about the installed torch, asked in one place.

Each answer names the behaviour it depends on and the condition for its removal. Any room may ask.
"""

import sys
from types import FrameType
from typing import Any

import torch

# FSDP2 calls `fsdp_pre_all_gather(mesh)` or, with five parameters, a form that insists on
# unpacked sizes for unevenly sharded parameters (distributed/fsdp/_fully_shard/_fsdp_param.py).
# Packed rows need the first, which torch keeps "for BC"; tests/tensor/test_all_gather.py fails on
# the day that it goes. Remove when the second form takes inputs of any size.
FSDP_HOOK_TAKES_MESH_ONLY = True

# The module that `dcp.async_save` copies with: it takes a tensor at any other address for one that
# is all of its storage, and copies a wrapper as its attributes. Remove when it asks for the class
# instead (torch.utils._python_dispatch.is_traceable_wrapper_subclass).
COPIES_WRAPPERS_AT_ADDRESS_0 = "torch.distributed.checkpoint._state_dict_stager"

# The modules of Parameter and DTensor, which call `requires_grad_` on the tensor that they are made
# of and take over: nothing else tells a tensor that it is no longer anybody's view. Remove when a
# constructor asks the class.
OWNERS = ("torch.nn.parameter", "torch.distributed.tensor._api")


def caller_of_type(*names: str, max_depth: int = 12) -> Any | None:
    """Return the object of one of torch's classes that (indirectly) called this function, or None.

    Used for early errors only: FSDP2 and DTensor pass too little to tell that a setting cannot
    work, and their own error comes after a collective, on some ranks only, or never.
    """
    frame = sys._getframe(1)
    for _ in range(max_depth):
        caller = frame.f_locals.get("self")
        if type(caller).__name__ in names:
            return caller
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def calling_module() -> str:
    """Return the name of the first module outside this package that (indirectly) called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "nf4tensor":
            return name
        frame = frame.f_back
    return ""


def fsdp_shard_dim(param: Any) -> int:
    """Return the dimension that FSDP2 shards a parameter along: `shard_placement_fn` chooses it."""
    placement = getattr(param, "fsdp_placement", None)
    return 0 if placement is None else placement.dim


def set_fsdp_shard_size(param: Any, size: torch.Size) -> None:
    """Tell FSDP2 the size of a shard of another dimension than the first.

    It puts what it gathered of such shards side by side, as tensors of the shard's logical size,
    which packed bytes do not have (`foreach_all_gather_copy_out`). So they get theirs while they
    are gathered, and the logical one after. Remove when it takes the sizes that
    `fsdp_pre_all_gather` returned.
    """
    param.padded_sharded_param_size = size


def fsdp_groups(module: Any) -> list[Any]:
    """Return the FSDPParamGroups that FSDP2 gathers for a module, none where it gathers nothing.

    Before torch let the parameters of a module have meshes of their own, a module had one group.
    """
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return []
    state = get_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g] if groups is None else list(groups)


def reshards_to_smaller_mesh(group: Any) -> bool:
    """Tell whether `fully_shard` was given an integer `reshard_after_forward` for a group.

    What the group has, not its parameters: `set_reshard_after_forward` changes only the group.
    """
    after_forward = getattr(group, "post_forward_mesh_info", None)
    return after_forward is not None and after_forward != getattr(group, "mesh_info", None)


def is_broadcasting_state() -> bool:
    """Tell whether torch's `set_model_state_dict(..., broadcast_from_rank0=True)` is the caller.

    Rank 0 sends its own tensors there, and the other ranks receive into dense ones that it knows
    nothing of. Remove when they are made alike.
    """
    return _is_called_by("_broadcast_tensors", "torch.distributed._state_dict_utils")


def is_dropped_by_accelerate() -> bool:
    """Tell whether Accelerate is the caller, and goes on to send whole weights as dense ones.

    With `cpu_ram_efficient_loading`, `fsdp2_prepare_model` moves every rank's model to meta first
    and then sends what the first rank had (Accelerate 1.15). Remove when it asks the tensor how.
    """
    frame = _calling_frame("fsdp2_prepare_model", "accelerate.utils.fsdp_utils")
    if frame is None:
        return False
    sender = frame.f_globals.get("fsdp2_load_full_state_dict")
    return getattr(sender, "__module__", None) == frame.f_globals["__name__"]


def is_converting_module() -> bool:
    """Tell whether `module.to(dtype)` or its like is the caller.

    A sharded parameter does not pass the setter of `NF4Tensor.data` there. Remove when FSDP2
    refuses a local tensor of another class.
    """
    return _is_called_by("_apply", "torch.nn.modules.module")


def _is_called_by(function: str, module: str) -> bool:
    return _calling_frame(function, module) is not None


def _calling_frame(function: str, module: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None
