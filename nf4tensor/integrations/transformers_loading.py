"""What becomes of a tensor of a checkpoint on its way into a model: Transformers' conversion ops.

Each gets what this rank reads, its own rows where the model is sharded, and gives a frozen 4-bit
parameter, or what it got where that stays dense. Called by the quantizer.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nf4tensor.checkpoint.bytes import check_record_bytes
from nf4tensor.checkpoint.entries import Weight
from nf4tensor.errors import CheckpointError, UnsupportedError
from nf4tensor.integrations import bitsandbytes
from nf4tensor.integrations import bitsandbytes_entries as entries
from nf4tensor.integrations.transformers_versions import ConversionOps, WeightConverter
from nf4tensor.tensor import NF4Tensor, to_nf4


@dataclass
class Loaded:
    """What is known of the 4-bit weights of a model, by their names in it.

    Args:
        options: Of `to_nf4`.
        names: Of the parameters that are to be 4-bit.
        weights: What the files say, if they are 4-bit already.
        layouts: What another package's file had beside a weight.
    """

    options: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    weights: dict[str, Weight] = field(default_factory=dict)
    layouts: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Operation(ConversionOps):
    """An op that shares what is loaded with the others.

    Args:
        loaded: Of the model.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Operation":
        return self  # Transformers copies its converters for every tensor


class Quantize(_Operation):
    """Make a 4-bit weight of a dense one."""

    def convert(self, input_dict: Mapping[str, Any], model: Any, **kwargs: Any) -> dict[str, Any]:
        """Quantize what is to be 4-bit.

        Raises:
            CheckpointError: A tensor has another shape than the model's.
            NF4TensorError: `to_nf4` refused it.
        """
        converted = {}
        for name, value in input_dict.items():
            tensor = _only(value)
            if name in self.loaded.names:
                _check_shape(name, tensor.shape, _expected(model, name).shape)
                tensor = _frozen(to_nf4(tensor, **self.loaded.options))
            converted[name] = tensor
        return converted


class FromRecords(_Operation):
    """Make a 4-bit weight of a record of our own files."""

    def after(self, conversions: Iterable[Any], stored: Iterable[str]) -> list[Any]:
        """Return conversions that end in this one.

        Args:
            conversions: Those of the model. One that keeps the name of a tensor is left out: our
                files hold tensors as they are in memory.
            stored: Names of 4-bit weights.
        """
        kept = []
        for conversion in conversions:
            if isinstance(conversion, WeightConverter):
                if conversion.source_patterns == conversion.target_patterns:
                    continue
                conversion.operations = [*conversion.operations, self]
            kept.append(conversion)
        ends = sorted({name.rpartition(".")[2] for name in stored})
        return [*kept, *(WeightConverter([end], [end], [self]) for end in ends)]

    def convert(
        self, input_dict: Mapping[str, Any], model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        """Wrap records.

        Raises:
            CheckpointError: One is damaged, or for a weight of another shape.
        """
        converted = {}
        for name, value in _by_full_name(input_dict, full_layer_name):
            weight, tensor = self.loaded.weights.get(name), _only(value)
            expected = _expected(model, name)
            if weight is None and expected.is_floating_point() > tensor.is_floating_point():
                raise CheckpointError(
                    f"{name} is {tensor.dtype}, and the metadata of the files does not say that it "
                    "is a 4-bit weight: save or copy them again"
                )
            if weight is not None:
                _check_shape(name, tensor.shape, (*expected.shape[:-1], weight.spec.pitch))
                check_record_bytes(tensor, weight.spec)
                tensor = _frozen(NF4Tensor(_own(tensor), weight.spec, expected.dtype))
                if weight.layout is not None:
                    self.loaded.layouts[name] = weight.layout
            converted[name] = tensor
        return converted


class FromBitsAndBytes(_Operation):
    """Make a 4-bit weight of what bitsandbytes saved of it, with the same codes and scales."""

    def converter(self) -> Any:
        """Return the conversion that collects the entries of a weight."""
        ends = [entries.PACKED, entries.ABSMAX, entries.LEVEL_MAP, entries.GROUP_ABSMAX]
        ends += [entries.SCALE_MAP, f"{entries.JSON}nf4", f"{entries.JSON}fp4"]
        return WeightConverter([f"weight{end}" for end in ends], ["weight"], [self])

    def convert(
        self, input_dict: Mapping[str, Any], model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        """Move codes and scales into a record.

        Raises:
            CheckpointError: Entries are damaged, or for a weight of another shape.
            UnsupportedError: The weight cannot be held exactly.
        """
        found = {name: _only(value) for name, value in input_dict.items()}
        expected = _expected(model, full_layer_name)
        if not bitsandbytes.prefixes(found):
            return {name: tensor.to(expected.dtype) for name, tensor in found.items()}
        try:
            tensor, layout = bitsandbytes.from_state_dict(found, "weight")
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{full_layer_name}: {error}; `nf4tensor convert PATH NEW --to nf4tensor "
                "--requantize` does it for the whole checkpoint"
            ) from error
        _check_shape(full_layer_name, tensor.shape, expected.shape)
        self.loaded.layouts[full_layer_name] = {"bitsandbytes": layout.to_dict()}
        return {full_layer_name: _frozen(tensor.to(expected.dtype))}


def _only(value: Any) -> Tensor:
    return value[0] if isinstance(value, list) else value


def _expected(model: Any, name: str) -> Tensor:
    """Return this rank's part of a parameter or buffer, which may be on meta."""
    parameter = model.get_parameter_or_buffer(name)
    return getattr(parameter, "_local_tensor", parameter)


def _own(record: Tensor) -> Tensor:
    """Return a record that keeps neither a mapped file nor other rows alive."""
    is_whole = record.untyped_storage().nbytes() == record.nbytes
    return record if is_whole and record.is_contiguous() else record.clone().contiguous()


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _check_shape(name: str, shape: Iterable[int], expected: Iterable[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise CheckpointError(
            f"{name} is {list(shape)} in the checkpoint, expected {list(expected)}: it is for "
            "another model"
        )


def _by_full_name(given: Mapping[str, Any], full_name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a conversion made by full names, of which it may know only the middle."""
    before, after = next(
        (full_name.partition(part)[::2] for part in given if part in full_name), ("", "")
    )
    for part, value in given.items():
        yield f"{before}{part}{after}", value
