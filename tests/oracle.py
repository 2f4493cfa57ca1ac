"""The byte specification in plain Python: what `kernels.reference` itself is checked against.

Written from `nf4tensor/format/README.md`, whose clauses the docstrings quote, and from nothing
else: no torch, no numpy, no code of the package but the 256 constants of the 8-bit map. Rows are
lists of floats, records are bytes. Slow on purpose: each `fl` is one rounding. Cuts and joins of
columns are in `oracle_columns.py`.
"""

import itertools
import math
import struct
from typing import NamedTuple

from nf4tensor.format.codebook import DYNAMIC_MAP

NAN_BITS = 0x7FC00000
NF4_BITS = """
    BF800000 BF3239B1 BF066B30 BECA32A0 BE91A24D BE3D353F BDBA7871 00000000
    3DA2FAFF 3E24CAE3 3E7C04DD 3EAD033A 3EE1A4B8 3F1007AB 3F3913B3 3F800000
"""
FP4_BITS = """
    00000000 3BAAAAAB 3F2AAAAB 3F800000 3EAAAAAB 3F000000 3E2AAAAB 3E800000
    00000000 BBAAAAAB BF2AAAAB BF800000 BEAAAAAB BF000000 BE2AAAAB BE800000
"""


def from_bits(bits: int) -> float:
    """Read a float32 from its 32 bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def to_bits(value: float) -> int:
    """Return the 32 bits of a float that is a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def fl(value: float) -> float:
    """Round a double to float32 (clause 1.4).

    A double holds the product of two float32 values exactly, and their sum, quotient or square
    root to 53 bits without underflow. That is more than twice 24 and two, so rounding once more
    to float32 gives what one rounding of the exact result gives, also where a subnormal has fewer
    bits. `tests/format/test_specification.py` compares it with exact fractions.
    """
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


LEVELS = {
    "nf4": [from_bits(int(bits, 16)) for bits in NF4_BITS.split()],
    "fp4": [from_bits(int(bits, 16)) for bits in FP4_BITS.split()],
}
ZERO_CODE = {"nf4": 7, "fp4": 0}


class Spec(NamedTuple):
    """The fields of a spec, and the offsets of clauses 1 to 3 worked out anew."""

    in_features: int
    block_size: int
    scale_kind: str
    segment_length: int
    num_segments: int
    quant_type: str

    @classmethod
    def of(cls, spec) -> "Spec":
        """Take the fields of any object that has them."""
        return cls(*(getattr(spec, field) for field in cls._fields))

    @property
    def blocks(self) -> int:
        """Clause 1.5: `ceil(in_features / block_size)`."""
        return math.ceil(self.in_features / self.block_size)

    @property
    def scales_at(self) -> int:
        """Clause 1.6: the codes take half a byte a weight, rounded up to 4 bytes."""
        return (self.in_features + 1) // 2 + 3 & ~3

    @property
    def segments_at(self) -> int:
        """Clause 1.6: behind the scales, rounded up to 8 bytes."""
        return self.scales_at + self.blocks * (4 if self.scale_kind == "float32" else 1) + 7 & ~7

    @property
    def pitch(self) -> int:
        """Clause 1.7: the end, rounded up to 32 bytes."""
        if self.scale_kind == "float32":
            return self.scales_at + 4 * self.blocks + 31 & ~31
        return self.segments_at + 8 + 8 * self.num_segments + 31 & ~31


def whole_spec(
    in_features: int, block_size: int, scale_block_size: int | None, quant_type: str
) -> Spec:
    """Clauses 3.2 and 3.5: the spec of a row that is quantized whole."""
    if scale_block_size is None:
        return Spec(in_features, block_size, "float32", 0, 0, quant_type)
    blocks = math.ceil(in_features / block_size)
    length = math.ceil(blocks / math.ceil(blocks / scale_block_size))
    return Spec(in_features, block_size, "square8", length, math.ceil(blocks / length), quant_type)


class Parts(NamedTuple):
    """A record taken apart: codes (with the unused nibble), scale numbers, phase, pairs."""

    codes: list
    scales: list
    phase: int
    pairs: list


def assemble(parts: Parts, spec: Spec) -> bytes:
    """Clauses 1.3, 1.6, 2.1 and 3.1: put a record together, zeros everywhere else."""
    out = bytearray(spec.pitch)
    for i in range(0, len(parts.codes), 2):
        out[i // 2] = parts.codes[i] << 4 | parts.codes[i + 1]
    scale_format = "f" if spec.scale_kind == "float32" else "B"
    struct.pack_into(f"<{spec.blocks}{scale_format}", out, spec.scales_at, *parts.scales)
    if spec.scale_kind != "float32":
        struct.pack_into("<II", out, spec.segments_at, parts.phase, 0)
        for i, pair in enumerate(parts.pairs):
            struct.pack_into("<ff", out, spec.segments_at + 8 + 8 * i, *pair)
    return bytes(out)


def take_apart(record: bytes, spec: Spec) -> Parts:
    """Undo `assemble`."""
    packed = record[: (spec.in_features + 1) // 2]
    codes = [nibble for byte in packed for nibble in (byte >> 4, byte & 15)]
    if spec.scale_kind == "float32":
        absmax = struct.unpack_from(f"<{spec.blocks}f", record, spec.scales_at)
        return Parts(codes, list(absmax), 0, [])
    (phase,) = struct.unpack_from("<I", record, spec.segments_at)
    pairs_at = [spec.segments_at + 8 + 8 * i for i in range(spec.num_segments)]
    pairs = [struct.unpack_from("<ff", record, at) for at in pairs_at]
    return Parts(codes, list(record[spec.scales_at : spec.scales_at + spec.blocks]), phase, pairs)


def midpoints(levels: list) -> list[float]:
    """Clauses 4.2 and 4.3: `fl(fl(a + b) / 2)` of neighbours."""
    return [fl(fl(a + b) / 2) for a, b in itertools.pairwise(levels)]


NF4_THRESHOLDS = midpoints(LEVELS["nf4"])
FP4_THRESHOLDS = midpoints(sorted(LEVELS["fp4"][:8]))


def nf4_code(n: float) -> int:
    """Clause 5.3: the number of thresholds below n."""
    return sum(n > t for t in NF4_THRESHOLDS)


def fp4_code(n: float) -> int:
    """Clause 5.4: the number of thresholds below the magnitude names it; 8 more below zero."""
    count = sum(abs(n) > t for t in FP4_THRESHOLDS)
    return [0, 1, 6, 7, 4, 5, 2, 3][count] + (8 if n < 0 and count else 0)


def quantize_block(weights: list, quant_type: str) -> tuple[list, float]:
    """Clauses 5.1 to 5.4, 7.1, 7.3: the codes and absmax of a block, NaN if it is not finite."""
    zero_codes = [ZERO_CODE[quant_type]] * len(weights)
    if not all(math.isfinite(x) for x in weights):
        return zero_codes, from_bits(NAN_BITS)
    absmax = max(abs(x) for x in weights)
    if absmax == 0:
        return zero_codes, 0.0
    code_of = nf4_code if quant_type == "nf4" else fp4_code
    return [code_of(fl(x / absmax)) for x in weights], absmax


def fit_square8(absmax: list) -> tuple[list, tuple[float, float]]:
    """Clauses 5.5 to 5.9 and 7.4: the bytes q of a segment's blocks and its (step, base)."""
    if any(math.isnan(s) for s in absmax):
        return [0] * len(absmax), (from_bits(NAN_BITS), from_bits(NAN_BITS))
    used = [s for s in absmax if s != 0]
    if not used:
        return [0] * len(absmax), (0.0, 0.0)
    base = min(used)
    step = fl(fl(max(used) - base) / 65025)
    if math.isinf(fl(fl(65025 * step) + base)):
        step = from_bits(to_bits(step) - 1)
    if step == 0:
        return [0] * len(absmax), (step, base)
    roots = [fl(math.sqrt(fl(fl(s - base) / step))) if s != 0 else 0.0 for s in absmax]
    return [min(max(round(root), 0), 255) for root in roots], (step, base)


def quantize_row(row: list, spec: Spec, phase: int = 0) -> bytes:
    """Clause 5: the record of one row of float32 weights; 5.11 where phase is not 0."""
    starts = range(0, spec.in_features, spec.block_size)
    blocks = [quantize_block(row[i : i + spec.block_size], spec.quant_type) for i in starts]
    codes = [code for block_codes, _ in blocks for code in block_codes]
    codes += [ZERO_CODE[spec.quant_type]] * (spec.in_features % 2)
    absmax = [block_absmax for _, block_absmax in blocks]
    if spec.scale_kind == "float32":
        return assemble(Parts(codes, absmax, 0, []), spec)
    assert spec.scale_kind == "square8"
    q, pairs = [], []
    for segment in range(spec.num_segments):
        blocks_of = [j for j in range(spec.blocks) if (phase + j) // spec.segment_length == segment]
        segment_q, pair = fit_square8([absmax[j] for j in blocks_of])
        q += segment_q
        pairs.append(pair)
    return assemble(Parts(codes, q, phase, pairs), spec)


def quantize(rows: list, spec) -> list[bytes]:
    """Quantize each row by itself (clause 1.1)."""
    return [quantize_row(row, Spec.of(spec)) for row in rows]


def scales(record: bytes, spec) -> list[float]:
    """Clauses 3.4 to 3.6: the scale of each block."""
    spec = Spec.of(spec)
    parts = take_apart(record, spec)
    if spec.scale_kind == "float32":
        return parts.scales
    decoded = []
    for j, q in enumerate(parts.scales):
        step, base = parts.pairs[(parts.phase + j) // spec.segment_length]
        level = q * q if spec.scale_kind == "square8" else DYNAMIC_MAP[q]
        decoded.append(fl(fl(level * step) + base))
    return decoded


def round_bits(value: float, dtype: str) -> int:
    """Clause 6.2: round a float32 to the bits of the named dtype, to nearest even."""
    if dtype == "float32":
        return to_bits(value)
    if dtype == "bfloat16":
        bits = to_bits(value)
        return 0x7FC0 if math.isnan(value) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def dequantize(record: bytes, spec, dtype: str = "float32") -> list[int]:
    """Clause 6: the bits of the weights of one row."""
    spec = Spec.of(spec)
    codes, block_scales = take_apart(record, spec).codes, scales(record, spec)
    levels = LEVELS[spec.quant_type]
    weights = []
    for i in range(spec.in_features):
        weights.append(fl(levels[codes[i]] * block_scales[i // spec.block_size]))
    return [round_bits(weight, dtype) for weight in weights]


def zero_row(spec) -> bytes:
    """Clause 7.2: zero codes, and zero everywhere else."""
    spec = Spec.of(spec)
    codes = [ZERO_CODE[spec.quant_type]] * (spec.in_features + spec.in_features % 2)
    return assemble(Parts(codes, [0] * spec.blocks, 0, [(0.0, 0.0)] * spec.num_segments), spec)
