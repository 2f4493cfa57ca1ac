"""Accelerate's FSDP2 over 4-bit weights, `fsdp_cpu_ram_efficient_loading: true` included.

With that option only the first rank reads weights. Accelerate sends them as whole dense tensors,
and the other ranks have no way to know that they are 4-bit; nor has torch, when Accelerate loads a
FULL_STATE_DICT. Importing this module puts `checkpoint.scatter` in place of both, which sends each
rank its rows as they are, dense ones too. Everything else works without it. `disable()` undoes it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nf4tensor.checkpoint.scatter import load_from_first_rank

try:
    from accelerate.utils import fsdp_utils

    # Private, as of Accelerate 1.15, and looked up there by its callers at each call. Remove when
    # Accelerate asks the tensor how to send itself, or sends shards.
    _load, _set = fsdp_utils.fsdp2_load_full_state_dict, fsdp_utils._set_model_state_dict
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"nf4tensor.integrations.accelerate needs Accelerate 1.15 or one alike ({error}): "
        "pip install 'accelerate>=1.15', or set fsdp_cpu_ram_efficient_loading: false and "
        "fsdp_state_dict_type: SHARDED_STATE_DICT, which need nothing of it"
    ) from error


def enable() -> None:
    """Send weights of the first rank as they are. Done on import."""
    fsdp_utils.fsdp2_load_full_state_dict = _load_full_state_dict
    fsdp_utils._set_model_state_dict = _set_model_state_dict


def disable() -> None:
    """Let Accelerate do as it does by itself."""
    fsdp_utils.fsdp2_load_full_state_dict, fsdp_utils._set_model_state_dict = _load, _set


def _load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Tensor], cpu_offload: bool = False
) -> nn.Module:
    load_from_first_rank(model, full_sd, offload=cpu_offload)
    return model


def _set_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    adapter_only: bool = False,
    sd_options: Any = None,
) -> Any:
    if adapter_only or not getattr(sd_options, "broadcast_from_rank0", False):
        return _set(model, state_dict, adapter_only=adapter_only, sd_options=sd_options)
    from torch.nn.modules.module import _IncompatibleKeys

    load_from_first_rank(model, state_dict)
    return _IncompatibleKeys([], [])


enable()
