"""LoRA adapters as PEFT saves them, for merging a file at a time without building a model.

Other kinds of adapters need their own arithmetic, which is PEFT's: they are refused naming its way.
Called by `transform.py`.
"""

import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from nf4tensor.checkpoint.entries import Entry
from nf4tensor.checkpoint.files import Checkpoint, read_json
from nf4tensor.errors import CheckpointError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.*)\.lora_(?P<side>A|B)\.weight")


class Adapter:
    """The factors of one LoRA adapter, by the name of the weight that they change.

    Args:
        folder: With PEFT's `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        CheckpointError: It is none, is damaged, or is of another kind.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / CONFIG_NAME).is_file():
            raise CheckpointError(
                f"{folder} is no adapter: expected PEFT's {CONFIG_NAME} and {WEIGHTS_NAME}"
            )
        self._config = read_json(self.folder / CONFIG_NAME)
        self._checkpoint = Checkpoint(self.folder / WEIGHTS_NAME)
        self._check_kind()
        self._factors: dict[str, dict[str, Entry]] = {}
        self._replaced: dict[str, Entry] = {}
        for name, entry in self._checkpoint.entries.items():
            match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
            if match is not None:
                factors = self._factors.setdefault(f"{match['module']}.weight", {})
                factors[match["side"]] = entry
            elif "lora_" in name:
                raise CheckpointError(f"{entry.what} is not LoRA of a linear layer: {_WAY_OUT}")
            else:  # a module that was trained as a whole
                self._replaced[name.removeprefix(_PREFIX)] = entry

    def check_fits(self, base: Checkpoint) -> None:
        """Refuse a base that lacks a weight that this changes, or has it in another shape.

        Raises:
            CheckpointError: It does.
        """
        for name, trained in self._replaced.items():
            entry = self._entry_of(base, name)
            if entry.weight is not None or entry.shape != trained.shape:
                raise CheckpointError(
                    f"{trained.what} is {list(trained.shape)} in place of {entry.what}, which is "
                    f"{'4-bit' if entry.weight else list(entry.shape)}: {_WAY_OUT}"
                )
        for name, factors in self._factors.items():
            entry = self._entry_of(base, name)
            shape = list(entry.shape)
            if entry.weight is not None:
                shape[-1] = entry.weight.spec.in_features
            if set(factors) != {"A", "B"}:
                raise CheckpointError(f"{name} has only lora_{min(factors)} in {self.folder}")
            found = [factors["B"].shape[0], factors["A"].shape[-1]]
            ranks = {factors["A"].shape[0], factors["B"].shape[-1]}
            if shape != found or len(ranks) != 1 or len(factors["A"].shape) != 2:
                raise CheckpointError(
                    f"{entry.what} has shape {shape}, the adapter {list(factors['B'].shape)} x "
                    f"{list(factors['A'].shape)}: it is for another model"
                )

    def changes(self, name: str) -> bool:
        """Tell whether merging changes a tensor of the base."""
        return name in self._factors or name in self._replaced

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return what a tensor of the base becomes, in float32.

        Args:
            name: Of the tensor.
            weight: float32 `[out, in]`.
        """
        if name in self._replaced:
            return self._read(self._replaced[name])
        factors = self._factors[name]
        a, b = self._read(factors["A"]), self._read(factors["B"])
        return weight.addmm(b, a, alpha=self._scale(name.removesuffix(".weight"), a.shape[0]))

    def _scale(self, module: str, rank: int) -> float:
        alpha = _pattern(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _read(self, entry: Entry) -> Tensor:
        return self._checkpoint.rows(entry, (slice(None),)).float()

    def _entry_of(self, base: Checkpoint, name: str) -> Entry:
        entry = base.entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"the adapter in {self.folder} changes {name}, which {base.path} lacks: it is for "
                "another model"
            )
        return entry

    def _check_kind(self) -> None:
        config = self._config
        wrong = [key for key in ("use_dora", "fan_in_fan_out", "lora_bias") if config.get(key)]
        if config.get("peft_type") != "LORA" or wrong:
            kind = ", ".join([str(config.get("peft_type")), *wrong])
            raise CheckpointError(f"{self.folder} is {kind}, expected plain LORA: {_WAY_OUT}")
        if not isinstance(config.get("lora_alpha"), int | float):
            raise CheckpointError(f"{self.folder / CONFIG_NAME} has no number lora_alpha")


_WAY_OUT = "merge it with PEFT, by dequantize_(model) and merge_and_unload()"


def _pattern(patterns: Any, module: str, default: float) -> float:
    """Return a module's own value: PEFT's keys are regular expressions of ends of names."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
