"""Transformers loads, saves and trains models with 4-bit weights: `NF4Config` and its quantizer.

Importing this registers both: `from_pretrained(..., quantization_config=NF4Config())`. Beside this
file: `transformers_choice.py` says which weights, `transformers_loading.py` makes them of what a
checkpoint holds, `transformers_saving.py` takes a model apart again, `transformers_versions.py`
has everything that depends on a release of Transformers. Called by users.
"""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nf4tensor.checkpoint.entries import Weight
from nf4tensor.checkpoint.files import VERSION, read_names, read_weights
from nf4tensor.checkpoint.write import QUANT_METHOD
from nf4tensor.errors import CheckpointError, DTypeError, SpecError, UnsupportedError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.integrations import transformers_choice, transformers_saving
from nf4tensor.integrations.bitsandbytes import prefixes
from nf4tensor.integrations.transformers_loading import (
    FromBitsAndBytes,
    FromRecords,
    Loaded,
    Quantize,
)
from nf4tensor.integrations.transformers_versions import (
    HfQuantizer,
    QuantizationConfigMixin,
    accept_bitsandbytes,
    names_in_model,
    register_quantization_config,
    register_quantizer,
    save_as_in_memory,
)
from nf4tensor.kernels.schema import WEIGHT_DTYPES
from nf4tensor.nn.convert import dequantize_
from nf4tensor.tensor import NF4Tensor

__all__ = ["NF4Config", "NF4Quantizer"]


@register_quantization_config(QUANT_METHOD)
class NF4Config(QuantizationConfigMixin):
    """How a model of Transformers is quantized when it is loaded.

    For a checkpoint that is 4-bit already, of this package or of bitsandbytes, the checkpoint says
    how its weights are, and only `compute_dtype` matters.

    Args:
        quant_type: "nf4" or "fp4".
        block_size: Elements that share a scale, a power of two from 16 to 4096.
        scale_block_size: At most so many 8-bit scales share a float32 pair ("double quantization");
            None keeps float32 scales.
        compute_dtype: float32, bfloat16 or float16: of the whole model, in place of the `dtype` of
            `from_pretrained`. 4-bit weights are multiplied in the dtype of their input.
        skip_modules: Modules to leave alone: names from their start, regular expressions of such,
            or ends of names; beside those that Transformers keeps in float32, and a head at the
            end.
        quantize_embeddings: Quantize `nn.Embedding`s too.
        quantize_lm_head: Quantize the output layer too. Where it is tied to the input embeddings,
            both or none are quantized.
        quantize_experts: Quantize the 3-D weights of experts. Only the experts that tokens are sent
            to are decoded then, one at a time.

    Raises:
        SpecError: A size or name is outside its range.
        DTypeError: `compute_dtype` is another one.
    """

    def __init__(
        self,
        quant_type: str = "nf4",
        block_size: int = 64,
        scale_block_size: int | None = 256,
        compute_dtype: torch.dtype | str | None = None,
        skip_modules: Iterable[str] | None = None,
        *,
        quantize_embeddings: bool = False,
        quantize_lm_head: bool = False,
        quantize_experts: bool = True,
    ) -> None:
        self.quant_method = QUANT_METHOD
        self.quant_type = quant_type
        self.block_size = block_size
        self.scale_block_size = scale_block_size
        self.compute_dtype = _dtype(compute_dtype)
        names = [skip_modules] if isinstance(skip_modules, str) else skip_modules
        self.skip_modules = None if names is None else list(names)
        self.quantize_embeddings = quantize_embeddings
        self.quantize_lm_head = quantize_lm_head
        self.quantize_experts = quantize_experts
        self.spec(in_features=1)  # refuses what no weight can have
        self.source = QUANT_METHOD  # "bitsandbytes" where the checkpoint is of that package

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Undo `to_dict`; what `nf4tensor.checkpoint.save` writes is read too.

        Raises:
            CheckpointError: It is of another version.
            SpecError: A key is unknown.
        """
        given = {k: v for k, v in config_dict.items() if k not in ("quant_method", "weights")}
        version = given.pop("version", VERSION)
        if version != VERSION:
            raise CheckpointError(
                f"the quantization_config is of version {version!r:.100}, this nf4tensor reads "
                f"{VERSION}: install a release that knows it"
            )
        unknown = set(given) - set(cls().to_dict())
        if unknown:
            raise SpecError(f"NF4Config has no {', '.join(sorted(map(str, unknown)))}")
        return super().from_dict(given, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return it as `config.json` has it."""
        found = {name: value for name, value in vars(self).items() if name != "source"}
        if self.compute_dtype is not None:
            found["compute_dtype"] = str(self.compute_dtype).removeprefix("torch.")
        return {**found, "version": VERSION}

    def spec(self, in_features: int) -> NF4Spec:
        """Return the geometry of a row that is quantized with these options."""
        return NF4Spec.for_weight(
            in_features, self.block_size, self.scale_block_size, self.quant_type
        )


def _names_to_ignore(model: Any) -> list[str]:
    """Name the 4-bit weights for DistributedDataParallel, which asks the module that it wraps.

    It would broadcast them together with dense ones. Named as in the model, and as PEFT names them.
    """
    weights = [n for n, p in model.named_parameters() if isinstance(p, NF4Tensor)]
    adapted = [f"base_model.model.{name}" for name in weights]
    deep = [f"{head}.base_layer.{key}" for head, _, key in (n.rpartition(".") for n in adapted)]
    return weights + adapted + deep


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, given, given) if isinstance(given, str) else given
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise DTypeError(f"the dtype is {given}, expected float32, bfloat16 or float16")
    return dtype


@register_quantizer(QUANT_METHOD)
class NF4Quantizer(HfQuantizer):
    """What Transformers asks while it loads and saves a 4-bit model; made by `from_pretrained`."""

    quantization_config: NF4Config
    requires_calibration = False

    def __init__(self, quantization_config: NF4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.loaded = Loaded()
        self._stored: dict[str, Weight | None] = {}  # by name; None for those of bitsandbytes
        self._has_experts = False

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to offload weights in a way that reads them as floats.

        Raises:
            UnsupportedError: Part of the model goes to the disk, or to the CPU beside a device.
        """
        places = {str(p) for p in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise UnsupportedError(
                "device_map puts part of the model on the disk or the CPU, where Accelerate's hooks"
                ' do not know 4-bit weights: pass device_map={"": device}, or shard the model with '
                "fully_shard and CPUOffloadPolicy()"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the model.

        Raises:
            DTypeError: 4-bit weights do not decode to it.
        """
        dtype = self.quantization_config.compute_dtype or dtype
        if dtype not in WEIGHT_DTYPES:
            raise DTypeError(
                f"the model's dtype is {dtype}, expected float32, bfloat16 or float16: pass "
                "dtype=torch.bfloat16 to from_pretrained"
            )
        return dtype

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Tell whether a parameter of the model will be 4-bit."""
        return param_name in self.loaded.names

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes that an element takes, for a device map that fits."""
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        weight = self.loaded.weights.get(param_name)
        in_features = param.shape[-1]
        spec = weight.spec if weight else self.quantization_config.spec(in_features)
        return spec.pitch / in_features

    # Loading

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        is_from_theirs = self.pre_quantized and config.source != QUANT_METHOD
        transformers_choice.check_distribution(model, is_from_theirs)
        options = ("quant_type", "block_size", "scale_block_size")
        self.loaded = Loaded({name: getattr(config, name) for name in options})
        if not self.pre_quantized:
            skip = self.get_modules_to_not_convert(
                model, config.skip_modules, model._keep_in_fp32_modules, add_default_skips=True
            )
            self.loaded.names = transformers_choice.choose(model, config, skip)
        elif not checkpoint_files:
            raise CheckpointError(
                "a 4-bit model is loaded from its files, whose metadata says what its weights are, "
                "not from state_dict: call load_state_dict on the model instead"
            )
        else:
            files = [Path(file) for file in checkpoint_files]
            if is_from_theirs:
                self._stored = dict.fromkeys(prefixes(read_names(files)))
            else:
                self._stored = {**read_weights(files)}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Let 4-bit weights of the checkpoint pass through the conversions that a model has."""
        if self.pre_quantized:
            found = names_in_model(self._stored, weight_conversions, model)
            self.loaded.names = set(found)
            if self.quantization_config.source == QUANT_METHOD:
                self.loaded.weights = {name: weight for name, weight in found.items() if weight}
                weight_conversions = FromRecords(self.loaded).after(weight_conversions, found)
            else:
                converter = FromBitsAndBytes(self.loaded).converter()
                weight_conversions = [*weight_conversions, converter]
        # Here the model knows its weights and is not sharded yet, which changes its class.
        self._has_experts = transformers_choice.decode_experts_singly(model, self.loaded.names)
        return weight_conversions

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Return what a stored tensor is cast to, None for those of bitsandbytes as they are."""
        operations = getattr(converter, "operations", ())
        if any(isinstance(operation, FromBitsAndBytes) for operation in operations):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def get_quantize_ops(self) -> Quantize:
        """Return what makes 4-bit weights of dense ones."""
        return Quantize(self.loaded)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():
            if isinstance(getattr(parameter, "_local_tensor", parameter), NF4Tensor):
                parameter.requires_grad_(False)  # of a DTensor it is not what the operation said
        model._ddp_params_and_buffers_to_ignore = _names_to_ignore(model)
        save_as_in_memory(model)
        if "accelerate" in sys.modules:
            with suppress(ImportError):  # of another version; then what needs it says so
                import nf4tensor.integrations.accelerate
        if "peft" in sys.modules:  # which takes seconds to load
            import nf4tensor.integrations.peft  # noqa: F401
        return model

    # Saving, training

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what is saved, 4-bit weights as their records, and what files say of them."""
        return transformers_saving.state_and_metadata(model, self.loaded.layouts)

    def is_serializable(self) -> bool:
        """Tell that `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Tell that adapters can be trained beside 4-bit weights."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Tell whether `generate` may compile the model; choosing experts breaks graphs."""
        return not self._has_experts

    def _dequantize(self, model: nn.Module, dtype: Any = None) -> nn.Module:
        return dequantize_(model, _dtype(dtype))  # a saved model's configuration names it


accept_bitsandbytes(NF4Config)
