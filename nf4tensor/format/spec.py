"""The geometry of a record: one row of a weight as bytes that decode by themselves.

`NF4Spec` owns every offset of the format (README.md, clauses 1 to 3). It knows no tensor: the
logical dtype and shape belong to the tensor, the phase to each row. Every room may use it.
"""

from dataclasses import dataclass

from nf4tensor.errors import SpecError

FORMAT_VERSION = 1
MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 4096
# Their positions are the integers by which the ops name them.
SCALE_KINDS = ("float32", "square8", "dynamic8")
QUANT_TYPES = ("nf4", "fp4")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below value."""
    return ceil_div(value, multiple) * multiple


@dataclass(frozen=True)
class NF4Spec:
    """Geometry of one row of `in_features` weights.

    Args:
        in_features: Weights in a row, at least 1.
        block_size: Weights that share a scale, a power of two from 16 to 4096; the last block may
            be short.
        scale_kind: "float32", "square8" or "dynamic8" (README.md, clause 3).
        segment_length: Blocks that share a (step, base) pair; 0 for float32 scales.
        num_segments: Pairs in the row; 0 for float32 scales.
        quant_type: "nf4" or "fp4".
        format_version: Version of the byte specification.

    Raises:
        SpecError: A field is outside its range.
    """

    in_features: int
    block_size: int
    scale_kind: str
    segment_length: int
    num_segments: int
    quant_type: str = "nf4"
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise SpecError(
                f"format_version is {self.format_version}, this nf4tensor reads {FORMAT_VERSION}: "
                "install a release that knows it"
            )
        if self.in_features < 1:
            raise SpecError(f"in_features is {self.in_features}, expected at least 1")
        check_block_size(self.block_size)
        _check_choice("scale_kind", self.scale_kind, SCALE_KINDS)
        _check_choice("quant_type", self.quant_type, QUANT_TYPES)
        self._check_segments()

    def _check_segments(self) -> None:
        segments = (self.segment_length, self.num_segments)
        if self.scale_kind == "float32":
            if segments != (0, 0):
                raise SpecError(f"float32 scales have no segments, got (length, number) {segments}")
        elif min(segments) < 1 or self.segment_length * self.num_segments < self.num_blocks:
            raise SpecError(
                f"{self.num_blocks} blocks do not fit in {self.num_segments} segments of "
                f"{self.segment_length} blocks"
            )

    @classmethod
    def for_weight(
        cls,
        in_features: int,
        block_size: int = 64,
        scale_block_size: int | None = 256,
        quant_type: str = "nf4",
    ) -> "NF4Spec":
        """Choose the geometry of a freshly quantized row.

        Args:
            in_features: Weights in a row.
            block_size: Weights that share a scale.
            scale_block_size: At most so many scales share a (step, base) pair; None keeps float32
                scales.
            quant_type: "nf4" or "fp4".

        Returns:
            A spec with `square8` scales in segments of nearly equal length, or with float32 scales.

        Raises:
            SpecError: An argument is outside its range.
        """
        if in_features < 1:
            raise SpecError(f"in_features is {in_features}, expected at least 1")
        check_block_size(block_size)
        if scale_block_size is None:
            return cls(in_features, block_size, "float32", 0, 0, quant_type)
        if not isinstance(scale_block_size, int) or scale_block_size < 1:
            raise SpecError(
                f"scale_block_size is {scale_block_size!r}, expected a positive number of scales, "
                "or None for float32 scales"
            )
        num_blocks = ceil_div(in_features, block_size)
        segment_length = ceil_div(num_blocks, ceil_div(num_blocks, scale_block_size))
        num_segments = ceil_div(num_blocks, segment_length)
        return cls(in_features, block_size, "square8", segment_length, num_segments, quant_type)

    @property
    def num_blocks(self) -> int:
        """Blocks in a row; the last may be short."""
        return ceil_div(self.in_features, self.block_size)

    @property
    def codes_bytes(self) -> int:
        """Bytes of packed codes, from offset 0."""
        return ceil_div(self.in_features, 2)

    @property
    def scales_offset_bytes(self) -> int:
        """Offset of the first scale."""
        return round_up(self.codes_bytes, 4)

    @property
    def scales_bytes(self) -> int:
        """Bytes of all scales of a row."""
        return self.num_blocks * (4 if self.scale_kind == "float32" else 1)

    @property
    def segments_offset_bytes(self) -> int:
        """Offset of the phase, which the (step, base) pairs follow after 8 bytes."""
        return round_up(self.scales_offset_bytes + self.scales_bytes, 8)

    @property
    def end_bytes(self) -> int:
        """Offset behind the last byte that means anything."""
        if self.scale_kind == "float32":
            return self.scales_offset_bytes + self.scales_bytes
        return self.segments_offset_bytes + 8 + 8 * self.num_segments

    @property
    def pitch(self) -> int:
        """Bytes of a record."""
        return round_up(self.end_bytes, 32)

    @property
    def op_args(self) -> tuple[int, int, int, int, int, int]:
        """The spec as the integers that every op of `nf4tensor::` takes."""
        return (
            self.in_features,
            self.block_size,
            SCALE_KINDS.index(self.scale_kind),
            self.segment_length,
            self.num_segments,
            QUANT_TYPES.index(self.quant_type),
        )

    @classmethod
    def from_op_args(cls, *args: int) -> "NF4Spec":
        """Undo `op_args`.

        Raises:
            SpecError: An integer names no scale kind or codebook, or the geometry is impossible.
        """
        in_features, block_size, scale_kind, segment_length, num_segments, quant_type = args
        if not 0 <= scale_kind < len(SCALE_KINDS):
            raise SpecError(f"scale_kind is {scale_kind}, expected 0 to {len(SCALE_KINDS) - 1}")
        if not 0 <= quant_type < len(QUANT_TYPES):
            raise SpecError(f"quant_type is {quant_type}, expected 0 to {len(QUANT_TYPES) - 1}")
        return cls(
            in_features,
            block_size,
            SCALE_KINDS[scale_kind],
            segment_length,
            num_segments,
            QUANT_TYPES[quant_type],
        )


def check_block_size(block_size: int) -> None:
    """Refuse a block size that the format does not have.

    Raises:
        SpecError: It is not a power of two from 16 to 4096.
    """
    is_power_of_two = (
        isinstance(block_size, int) and block_size > 0 and block_size & (block_size - 1) == 0
    )
    if not is_power_of_two or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise SpecError(
            f"block_size is {block_size!r}, expected a power of two from {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE}"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
