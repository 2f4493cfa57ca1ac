"""What no writer leaves in a record, so that a file that has it is damaged.

Called for every record that is read from a file.
"""

import torch
from torch import Tensor

from nf4tensor.errors import CheckpointError
from nf4tensor.format.spec import NF4Spec


def check_record_bytes(record: Tensor, spec: NF4Spec) -> None:
    """Refuse rows with bytes in gaps or a phase past the segments (clause 12.5).

    Args:
        record: uint8 `[*lead, pitch]`.
        spec: What it should be.

    Raises:
        CheckpointError: Some rows have them; the message has their number and the first reason.
    """
    rows = record.reshape(-1, spec.pitch)
    scales_end = spec.scales_offset_bytes + spec.scales_bytes
    gaps = [(spec.codes_bytes, spec.scales_offset_bytes), (spec.end_bytes, spec.pitch)]
    if spec.scale_kind != "float32":
        gaps += [(scales_end, spec.segments_offset_bytes)]
    wrong = {
        f"bytes that are not zero from {start} to {stop}": (rows[:, start:stop] != 0).any(1)
        for start, stop in gaps
    }
    if spec.scale_kind != "float32":
        start = spec.segments_offset_bytes
        phase = rows[:, start : start + 8].contiguous().view(torch.int64)[:, 0]
        last = (phase.clamp(0, 2**32) + spec.num_blocks - 1) // spec.segment_length
        wrong["a phase past the segments"] = (phase < 0) | (last >= spec.num_segments)
    for what, where in wrong.items():
        if where.any():
            first = int(where.nonzero()[0])
            raise CheckpointError(
                f"{int(where.sum())} of {len(rows)} rows, the first {first}, have {what}: the file "
                "is damaged, copy or save it again"
            )
