"""Between blocks that lie flat over a whole weight and rows that decode by themselves.

Bytes are moved and compared, never computed anew (`format/README.md`, clause 10); `decode` alone
makes weights, for those that cannot be moved. Knows no names and no files. Called by the other
integrations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from nf4tensor.errors import UnsupportedError
from nf4tensor.format.codebook import DYNAMIC_MAP
from nf4tensor.format.spec import MIN_BLOCK_SIZE, NF4Spec, ceil_div
from nf4tensor.kernels import ops
from nf4tensor.tensor import NF4Tensor

GROUP_BLOCKS = 256  # scales of bitsandbytes that share an absmax
_CHUNK_WEIGHTS = 1 << 20


class Nested(NamedTuple):
    """The second level of nested scales.

    Attributes:
        absmax: Of each 256 scales, float32 `[ceil(blocks / 256)]`.
        offset: Added to every scale, a float32 number.
    """

    absmax: Tensor
    offset: float


@dataclass(frozen=True)
class FlatWeight:
    """A 4-bit weight whose blocks are consecutive weights of all rows, one after the other.

    Attributes:
        shape: `[*lead, in_features]`.
        block_size: Weights that share a scale, a power of two.
        quant_type: "nf4" or "fp4".
        packed: Codes, two a byte, uint8 `[ceil(weights / 2)]`.
        scales: `[ceil(weights / block_size)]`, float32, or the uint8 of nested scales.
        nested: None for plain scales.
    """

    shape: tuple[int, ...]
    block_size: int
    quant_type: str
    packed: Tensor
    scales: Tensor
    nested: Nested | None = None

    def decoded_scales(self, scale_map: Tensor | None = None) -> Tensor:
        """Return the float32 scale of every block: the product rounds, and then the sum.

        Args:
            scale_map: float32 `[256]` of nested scales; by default that of bitsandbytes.
        """
        if self.nested is None:
            return self.scales
        if scale_map is None:
            scale_map = torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=self.scales.device)
        absmax = self.nested.absmax.repeat_interleave(GROUP_BLOCKS)[: self.scales.numel()]
        return scale_map[self.scales.int()] * absmax + self.nested.offset


def block_size_in_rows(shape: Sequence[int], block_size: int) -> int:
    """Return the largest block size with which no flat block crosses a row (clause 10.1)."""
    if prod(shape[:-1]) == 1 or shape[-1] % block_size == 0:
        return block_size
    return gcd(shape[-1], block_size)


def spec_in_rows(
    shape: Sequence[int], block_size: int, quant_type: str, is_nested: bool
) -> NF4Spec:
    """Return the geometry of the rows of a flat weight.

    Raises:
        UnsupportedError: Its blocks cross rows in pieces of less than 16 weights.
    """
    in_features, piece = shape[-1], block_size_in_rows(shape, block_size)
    if piece < MIN_BLOCK_SIZE:
        raise UnsupportedError(
            f"in_features is {in_features}: blocks of {block_size} cross rows in pieces of "
            f"{piece} weights, where a record has blocks of {MIN_BLOCK_SIZE} or more: "
            "requantize=True decodes such a weight and quantizes it again"
        )
    if not is_nested:
        return NF4Spec(in_features, piece, "float32", 0, 0, quant_type)
    num_blocks = ceil_div(in_features, piece)
    length = GROUP_BLOCKS * block_size // piece
    num_segments = ceil_div(length - gcd(num_blocks, length) + num_blocks, length)
    return NF4Spec(in_features, piece, "dynamic8", length, num_segments, quant_type)


def to_rows(flat: FlatWeight, dtype: torch.dtype) -> NF4Tensor:
    """Make the tensor of a flat weight: the same codes, and scales that decode to the same bits.

    Args:
        flat: Any device.
        dtype: The logical dtype.

    Raises:
        UnsupportedError: A case of `spec_in_rows`.
    """
    spec = spec_in_rows(flat.shape, flat.block_size, flat.quant_type, flat.nested is not None)
    record = pack_rows(flat, spec)
    return NF4Tensor(record.view(*flat.shape[:-1], spec.pitch), spec, dtype)


def blocks_of_rows(spec: NF4Spec, block_size: int, first: int, last: int) -> slice:
    """Return which flat blocks hold weights of the rows from first to before last."""
    repeats = block_size // spec.block_size
    return slice(first * spec.num_blocks // repeats, ceil_div(last * spec.num_blocks, repeats))


def pack_rows(flat: FlatWeight, spec: NF4Spec, first_row: int = 0) -> Tensor:
    """Make the records of consecutive rows of a flat weight.

    Args:
        flat: With the codes of these rows only, the scales of the blocks that `blocks_of_rows`
            gives, and the second level of the whole weight.
        spec: That of `spec_in_rows` for the whole weight.
        first_row: The first of them.

    Returns:
        uint8 `[rows, pitch]`.
    """
    packed = flat.packed.view(-1, spec.codes_bytes)
    num_rows, start = len(packed), first_row * spec.num_blocks
    repeats = flat.block_size // spec.block_size
    scales = flat.scales.repeat_interleave(repeats)[start % repeats :]
    scales = scales[: num_rows * spec.num_blocks].view(num_rows, -1)
    if flat.nested is None:
        return ops.assemble(ops.Parts(packed, scales), spec)
    phase, pairs = _segments(flat.nested, spec, start, num_rows)
    return ops.assemble(ops.Parts(packed, scales, phase, pairs), spec)


def _segments(
    nested: Nested, spec: NF4Spec, first_block: int, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the phase of each row and the pairs of the groups that it has blocks of."""
    device = nested.absmax.device
    start = first_block + torch.arange(num_rows, device=device) * spec.num_blocks
    first = start // spec.segment_length
    last = (start + spec.num_blocks - 1) // spec.segment_length
    group = first.unsqueeze(-1) + torch.arange(spec.num_segments, device=device)
    is_used = group <= last.unsqueeze(-1)
    step = nested.absmax[group.clamp(max=nested.absmax.numel() - 1)]
    pairs = torch.stack([step, torch.full_like(step, nested.offset)], -1)
    return start % spec.segment_length, torch.where(is_used.unsqueeze(-1), pairs, 0.0)


def from_rows(tensor: NF4Tensor, block_size: int, offset: float | None = None) -> FlatWeight:
    """Take a tensor apart into flat blocks of a size, if that keeps every scale.

    Args:
        tensor: Of at least one row, of any scale kind; `square8` scales are decoded.
        block_size: Weights of a flat block.
        offset: Of nested scales, if it is known; by default the record's own.

    Raises:
        UnsupportedError: Flat blocks of this size would change a scale.
    """
    spec, shape = tensor.spec, tuple(tensor.shape)
    record = tensor.record.reshape(-1, spec.pitch)
    piece = block_size_in_rows(shape, spec.block_size)
    if block_size % piece or (spec.in_features % 2 and record.shape[0] > 1):
        raise _disagreement(tensor, block_size)
    repeats = block_size // piece

    def by_piece(values: Tensor) -> Tensor:
        values = values.repeat_interleave(spec.block_size // piece, -1)
        return values[:, : ceil_div(spec.in_features, piece)].flatten()

    decoded, nested = by_piece(ops.read_scales(record, spec)), None
    scales = _copy(decoded[::repeats])
    if spec.scale_kind == "dynamic8":
        start = spec.scales_offset_bytes
        scales = _copy(by_piece(record[:, start : start + spec.scales_bytes])[::repeats])
        step, base = (by_piece(values) for values in ops.read_pairs_of_blocks(record, spec))
        offset = base[0].item() if offset is None else offset
        nested = Nested(_copy(step[:: repeats * GROUP_BLOCKS]), offset)
    packed = _copy(record[:, : spec.codes_bytes]).view(-1)
    flat = FlatWeight(shape, block_size, spec.quant_type, packed, scales, nested)
    expected = flat.decoded_scales().repeat_interleave(repeats)[: decoded.numel()]
    if not torch.equal(expected.view(torch.int32), decoded.view(torch.int32)):
        raise _disagreement(tensor, block_size)
    return flat


def _copy(values: Tensor) -> Tensor:
    # Not plain `clone()`: it keeps the stride of a single number, which has no bytes view then.
    return values.clone(memory_format=torch.contiguous_format)


def _disagreement(tensor: NF4Tensor, block_size: int) -> UnsupportedError:
    return UnsupportedError(
        f"rows of {tensor.shape[-1]} weights in blocks of {tensor.spec.block_size} do not agree "
        f"with flat blocks of {block_size} over the whole weight, as in a weight that was written "
        "to, cut or joined, or never had such blocks: quantize dequantize() with bitsandbytes, or "
        "keep the tensor in files of nf4tensor"
    )


def decode(flat: FlatWeight, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode a flat weight by levels of its own, a few megabytes at a time.

    Args:
        flat: Any device.
        levels: float32 `[16]`.
        dtype: What to round the float32 product to.

    Returns:
        `[*lead, in_features]`.
    """
    num_weights = prod(flat.shape)
    scales = flat.decoded_scales()
    weight = torch.empty(num_weights, dtype=dtype, device=flat.packed.device)
    for start in range(0, num_weights, _CHUNK_WEIGHTS):
        stop = min(start + _CHUNK_WEIGHTS, num_weights)
        packed = flat.packed[start // 2 : ceil_div(stop, 2)]
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten()[: stop - start]
        blocks = scales[start // flat.block_size : ceil_div(stop, flat.block_size)]
        scale = blocks.repeat_interleave(flat.block_size)[: stop - start]
        weight[start:stop] = levels[codes.int()] * scale
    return weight.view(flat.shape)
