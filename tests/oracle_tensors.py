"""Between the oracle's bytes and tensors: records, and the bits of decoded weights.

Every NaN has the same bits here, since clause 6.3 leaves them open.
"""

import torch

from tests import oracle

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NAME = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def records_of(record: torch.Tensor) -> list[bytes]:
    """Return each row of a record tensor as bytes."""
    return [bytes(row.tolist()) for row in record.reshape(-1, record.shape[-1])]


def to_record(rows: list[bytes]) -> torch.Tensor:
    """Return the record tensor `[len(rows), pitch]`."""
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def bits_of(weight: torch.Tensor) -> list[list[int]]:
    """Return the bits of each element, row by row."""
    weight = torch.where(weight.isnan(), torch.nan, weight).flatten(0, -2)
    mask = 0xFFFFFFFF if weight.dtype == torch.float32 else 0xFFFF
    return [[bits & mask for bits in row] for row in weight.view(INTEGERS[weight.dtype]).tolist()]


def decode(rows: list[bytes], spec, dtype: torch.dtype) -> list[list[int]]:
    """Return the bits to which the oracle decodes each row."""
    nan = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[NAME[dtype]]
    infinity = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[NAME[dtype]]
    mask = 0x7FFFFFFF if dtype == torch.float32 else 0x7FFF
    decoded = [oracle.dequantize(row, spec, NAME[dtype]) for row in rows]
    return [[nan if bits & mask > infinity else bits for bits in row] for row in decoded]
