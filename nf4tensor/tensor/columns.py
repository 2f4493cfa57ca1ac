"""Operations along the last dimension: legal cuts and joins are records again, the rest decodes.

Bytes only; what is legal is decided in `format/layout.py`. A cut is a copy of bytes, so writing
into one raises until it has been cloned (`NF4Tensor.is_cut`).
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nf4tensor.errors import SpecError
from nf4tensor.format import layout
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import ops
from nf4tensor.tensor import all_gather, fallback
from nf4tensor.tensor.decoded import decoded
from nf4tensor.tensor.dispatch import bind
from nf4tensor.tensor.nf4_tensor import NF4Tensor

aten = torch.ops.aten


def on_last_dim(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slice or split columns; other ops along the last dimension decode."""
    bound = bind(op, args, kwargs)
    tensor, num_columns = bound["self"], bound["self"].shape[-1]
    if op is aten.slice.Tensor and bound["step"] == 1:
        start, stop, _ = slice(bound["start"], bound["end"]).indices(num_columns)
        return _cut_or_decode(tensor, start, max(start, stop))
    if op is aten.split.Tensor:
        length = bound["split_size"]
        sizes = [min(length, num_columns - i) for i in range(0, num_columns, max(length, 1))]
    elif op is aten.split_with_sizes.default:
        sizes = list(bound["split_sizes"])
    else:
        return fallback.decode(op, args, kwargs)
    if len(sizes) > 1:
        all_gather.refuse_column_shard(tensor)
    if sum(sizes) != num_columns:
        return fallback.decode(op, args, kwargs)
    stops = list(accumulate(sizes))
    cuts = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    are_legal = all(layout.is_legal_cut(tensor.spec, *cut) for cut in cuts)
    if not are_legal or len({layout.cut(tensor.spec, *cut).spec for cut in cuts}) > 1:
        all_gather.refuse_cut_shard(tensor, sizes)
    return [_cut_or_decode(tensor, *cut) for cut in cuts]


def _cut_or_decode(tensor: NF4Tensor, start: int, stop: int) -> Tensor:
    if (start, stop) == (0, tensor.shape[-1]):
        return tensor.with_record(tensor.record.detach(), padded=tensor.padded)
    if layout.is_legal_cut(tensor.spec, start, stop):
        cut = layout.cut(tensor.spec, start, stop)
        result = NF4Tensor(
            _cut_record(tensor.record, tensor.spec, cut, start), cut.spec, tensor.dtype
        )
        result.is_cut = True
        return result
    fallback.warn_decoded("a cut of columns that is not on multiples of 16", is_view=True)
    return decoded(tensor.decode()[..., start:stop])


def cat(tensors: list[NF4Tensor]) -> NF4Tensor:
    """Join columns left to right.

    Raises:
        SpecError: The geometries or the segments' pairs do not fit each other.
    """
    joined, *rest = tensors
    for right in rest:
        spec = _join_specs(joined.spec, right.spec)
        record = _join_records(joined, right, spec)
        joined = NF4Tensor(record, spec, joined.dtype)
    return joined


def _join_specs(left: NF4Spec, right: NF4Spec) -> NF4Spec:
    try:
        return layout.join(left, right)
    except SpecError as error:
        raise SpecError(f"columns cannot be joined; join what dequantize() returns: {error}") from (
            error
        )


def _cut_record(record: Tensor, spec: NF4Spec, cut: layout.Cut, start: int) -> Tensor:
    new = record.new_zeros(*record.shape[:-1], cut.spec.pitch)
    first_byte = start // 2
    new[..., : cut.spec.codes_bytes] = record[..., first_byte : first_byte + cut.spec.codes_bytes]
    scales = _scales(record, spec).repeat_interleave(cut.repeats, -2)
    scales = scales[..., cut.first_block : cut.first_block + cut.spec.num_blocks, :]
    _scales(new, cut.spec).copy_(scales)
    if spec.scale_kind != "float32":
        _write_phase(new, cut.spec, _phase(record, spec) * cut.repeats + cut.first_block)
        _pairs(new, cut.spec).copy_(_pairs(record, spec))
    return new


def _with_block_size(tensor: NF4Tensor, block_size: int) -> tuple[Tensor, NF4Spec]:
    """Return the same weights in smaller blocks."""
    spec = tensor.spec
    if block_size == spec.block_size:
        return tensor.record, spec
    new_spec = layout.with_block_size(spec, block_size)
    cut = layout.Cut(new_spec, spec.block_size // block_size, first_block=0)
    return _cut_record(tensor.record, spec, cut, 0), new_spec


def _join_records(left: NF4Tensor, right: NF4Tensor, spec: NF4Spec) -> Tensor:
    left_record, left_spec = _with_block_size(left, spec.block_size)
    right_record, right_spec = _with_block_size(right, spec.block_size)
    new = left_record.new_zeros(*left_record.shape[:-1], spec.pitch)
    codes = (left_record[..., : left_spec.codes_bytes], right_record[..., : right_spec.codes_bytes])
    new[..., : spec.codes_bytes] = torch.cat(codes, -1)
    scales = (_scales(left_record, left_spec), _scales(right_record, right_spec))
    _scales(new, spec).copy_(torch.cat(scales, -2))
    if spec.scale_kind != "float32":
        _join_segments(new, spec, left_record, left_spec, right_record, right_spec)
    return new


def _join_segments(
    new: Tensor, spec: NF4Spec, left: Tensor, left_spec: NF4Spec, right: Tensor, right_spec: NF4Spec
) -> None:
    left_phase, right_phase = _phase(left, left_spec), _phase(right, right_spec)
    left_pairs, right_pairs = _pairs(left, left_spec), _pairs(right, right_spec)
    left_is_zero, right_is_zero = _is_zero_row(left, left_spec), _is_zero_row(right, right_spec)
    expected_phase = right_phase - left_spec.num_blocks
    fits = (left_pairs == right_pairs).all(-1) & (left_phase == expected_phase)
    fits |= right_is_zero | (left_is_zero & (expected_phase >= 0))
    phase = torch.where(left_is_zero & ~right_is_zero, expected_phase, left_phase)
    last_segment = (phase + spec.num_blocks - 1) // spec.segment_length
    fits &= last_segment < spec.num_segments
    if not fits.all():
        raise SpecError(
            f"{int((~fits).sum())} of {fits.numel()} rows cannot be joined: the right columns do "
            "not follow the left ones in the weight they were cut from; join what dequantize() "
            "returns"
        )
    _write_phase(new, spec, phase)
    is_zero = (left_is_zero & ~right_is_zero).unsqueeze(-1)
    _pairs(new, spec).copy_(torch.where(is_zero, right_pairs, left_pairs))


def _is_zero_row(record: Tensor, spec: NF4Spec) -> Tensor:
    """Tell which rows are zero rows, or cuts of one, whose phase may be any (clause 9.4)."""
    codes = record[..., : spec.codes_bytes] ^ ops.zero_record((), spec, record.device)[0]
    if spec.in_features % 2:
        codes[..., -1] &= 0xF0
    scales = _scales(record, spec).flatten(-2)
    return (torch.cat([codes, scales, _pairs(record, spec)], -1) == 0).all(-1)


# The parts of a record as views; pairs stay bytes, since they are only moved and compared.


def _scales(record: Tensor, spec: NF4Spec) -> Tensor:
    start = spec.scales_offset_bytes
    width = spec.scales_bytes // spec.num_blocks
    return record[..., start : start + spec.scales_bytes].unflatten(-1, (spec.num_blocks, width))


def _pairs(record: Tensor, spec: NF4Spec) -> Tensor:
    return record[..., spec.segments_offset_bytes + 8 : spec.end_bytes]


def _phase(record: Tensor, spec: NF4Spec) -> Tensor:
    start = spec.segments_offset_bytes
    phase = record[..., start : start + 8].clone(memory_format=torch.contiguous_format)
    return phase.view(torch.int64).squeeze(-1)


def _write_phase(record: Tensor, spec: NF4Spec, phase: Tensor) -> None:
    start = spec.segments_offset_bytes
    record[..., start : start + 8] = phase.unsqueeze(-1).contiguous().view(torch.uint8)
