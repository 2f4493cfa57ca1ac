"""What is said of the tensors of a checkpoint: names, shapes, dtypes, and what 4-bit ones are.

No file is opened here. Called by the rest of this room and by integrations.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nf4tensor.errors import CheckpointError, SpecError
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels.schema import WEIGHT_DTYPES

if TYPE_CHECKING:
    from nf4tensor.checkpoint.files import Checkpoint

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_WEIGHT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}


@dataclass(frozen=True)
class Weight:
    """What the metadata says of a 4-bit weight.

    Args:
        spec: Geometry of its rows.
        dtype: Logical dtype.
        layout: What another package's file had beside the weight, as its integration wrote it.
    """

    spec: NF4Spec
    dtype: torch.dtype
    layout: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as the metadata has it."""
        found = {**asdict(self.spec), "dtype": str(self.dtype).removeprefix("torch.")}
        return found if self.layout is None else {**found, "layout": self.layout}

    @classmethod
    def from_dict(cls, given: Any) -> "Weight":
        """Undo `to_dict`.

        Raises:
            SpecError: Keys, types or values are not those of this version.
        """
        if not isinstance(given, dict):
            raise SpecError(f"expected a dictionary, got {given!r:.100}")
        given = dict(given)
        dtype, layout = given.pop("dtype", None), given.pop("layout", None)
        kinds = {field.name: field.type for field in fields(NF4Spec)}
        if set(given) != set(kinds):
            raise SpecError(f"expected the keys {sorted(kinds)}, got {sorted(map(str, given))}")
        for name, value in given.items():
            if type(value) is not kinds[name]:
                raise SpecError(f"{name} is {value!r:.100}, expected {kinds[name].__name__}")
        if dtype not in _WEIGHT_DTYPES:
            raise SpecError(f"dtype is {dtype!r:.100}, expected one of {', '.join(_WEIGHT_DTYPES)}")
        if layout is not None and not isinstance(layout, dict):
            raise SpecError(f"layout is {layout!r:.100}, expected a dictionary")
        return cls(NF4Spec(**given), _WEIGHT_DTYPES[dtype], layout)


class Parts(Protocol):
    """The entries of a weight of another package, of which rows are made when they are read."""

    @property
    def entries(self) -> Sequence["Entry"]:
        """What the files have of it."""

    def rows(self, checkpoint: "Checkpoint", first: int, last: int) -> Tensor:
        """Return consecutive rows: records, or decoded where no record holds them exactly.

        Args:
            checkpoint: The files.
            first: The first of them, of all leading dimensions in one.
            last: The one behind the last.
        """


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `[*lead, pitch]` uint8 if `weight` says that it is 4-bit.

    Args:
        file: Where it is.
        name: Its own.
        shape: As stored.
        dtype: Safetensors' name of it.
        weight: What it is if 4-bit.
        parts: What it is made of, where files of another package have it in several entries.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    weight: Weight | None = None
    parts: Parts | None = None

    @property
    def what(self) -> str:
        """Name it for an error."""
        return f"{self.name} in {self.file}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of what is read.

        Raises:
            CheckpointError: It is not known here.
        """
        if self.dtype not in _TORCH_DTYPES:
            raise CheckpointError(f"{self.what} is {self.dtype}, which is not known here")
        return _TORCH_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        if self.parts is not None:
            return sum(part.nbytes for part in self.parts.entries)
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """The shape of what it decodes to."""
        if self.weight is None:
            return self.shape
        return (*self.shape[:-1], self.weight.spec.in_features)
