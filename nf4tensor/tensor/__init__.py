"""The 4-bit tensor: the class and what each operation does with it.

`nf4_tensor.py` has the class, `dispatch.py` the tables, and each other file one family of
operations, registered on import. Numbers come from `kernels/ops.py` only.
"""

from nf4tensor.tensor import (
    collectives,
    columns,
    copies,
    create,
    einsum,
    fallback,
    gradient,
    linear,
    memory,
    rows,
    views,
    writes,
)
from nf4tensor.tensor.nf4_tensor import NF4Tensor
from nf4tensor.tensor.quantize import to_nf4

__all__ = [
    "NF4Tensor",
    "collectives",
    "columns",
    "copies",
    "create",
    "einsum",
    "fallback",
    "gradient",
    "linear",
    "memory",
    "rows",
    "to_nf4",
    "views",
    "writes",
]
