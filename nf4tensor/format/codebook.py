"""The 16 levels of NF4 and FP4 and the 256 of the 8-bit scale map, at full float32 precision.

Only constants and how they follow from each other. The C++ copy is `csrc/common/codebook.h`; there
is no third.

Source: NF4 levels from the QLoRA paper (https://arxiv.org/abs/2305.14314, appendix E), FP4 levels
and the 8-bit map from bitsandbytes 0.50.2.
"""

import itertools
import struct


def _float32(value: float) -> float:
    """Round to the nearest float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _midpoints(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return `fl(fl(a + b) / 2)` for neighbours; halving a float32 is exact here."""
    return tuple(_float32(a + b) / 2 for a, b in itertools.pairwise(levels))


NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# A code is the number of thresholds that the normalized weight exceeds.
NF4_THRESHOLDS = _midpoints(NF4_LEVELS)

# Codes 0 to 7 are the magnitudes, 8 to 15 their negatives; code 8 is +0.0 like code 0.
_FP4_MAGNITUDES = tuple(
    _float32(m) for m in (0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
)
FP4_LEVELS = (*_FP4_MAGNITUDES, 0.0, *(-m for m in _FP4_MAGNITUDES[1:]))
FP4_THRESHOLDS = _midpoints(tuple(sorted(_FP4_MAGNITUDES)))
# The code of a magnitude above `count` thresholds; 8 more where the weight is negative and
# count > 0.
FP4_CODE_BY_COUNT = (0, 1, 6, 7, 4, 5, 2, 3)

LEVELS = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}
ZERO_CODE = {"nf4": 7, "fp4": 0}

# Positive entries of the 8-bit map as float32 bits, ascending: indices 128 to 255.
_DYNAMIC_MAP_BITS = bytes.fromhex(
    "3513A3B7 365A1A94 370205FF 37B24206 38378034 388AEFB3 38BA1F4B 3923D70B"
    "398CE705 39C7E283 3A016F01 3A1EECC1 3A3C6A80 3A59E83E 3A7765FF 3AA7EF9D"
    "3AF1A9FC 3B1DB22D 3B428F5C 3B676C8A 3B8624DD 3B989374 3BAB020D 3BBD70A4"
    "3BCFDF3B 3BE24DD3 3BF4BC6A 3C039581 3C0CCCCD 3C160418 3C1F3B64 3C3AE148"
    "3C68F5C3 3C8B851F 3CA28F5D 3CB9999A 3CD0A3D7 3CE7AE15 3CFEB852 3D0AE148"
    "3D166667 3D21EB85 3D2D70A3 3D38F5C3 3D447AE1 3D500000 3D5B851F 3D670A3D"
    "3D728F5D 3D7E147B 3D84CCCD 3D8A8F5D 3D9051EB 3D96147B 3D9BD70A 3DA1999A"
    "3DA75C2A 3DAD1EB8 3DB2E148 3DB8A3D7 3DBE6667 3DC428F7 3DC9EB85 3DDB3334"
    "3DF80000 3E0A6666 3E18CCCD 3E273333 3E35999A 3E440000 3E526666 3E60CCCD"
    "3E6F3333 3E7D9999 3E860000 3E8D3334 3E946666 3E9B999A 3EA2CCCC 3EAA0000"
    "3EB13333 3EB86666 3EBF999A 3EC6CCCC 3ECE0000 3ED53333 3EDC6666 3EE3999A"
    "3EEACCCC 3EF20000 3EF93332 3F003333 3F03CCCC 3F076666 3F0B0000 3F0E999A"
    "3F123334 3F15CCCD 3F196666 3F1D0000 3F20999A 3F243334 3F27CCCD 3F2B6666"
    "3F2F0000 3F32999A 3F363334 3F39CCCD 3F3D6666 3F410000 3F44999A 3F483333"
    "3F4BCCCD 3F4F6666 3F530000 3F56999A 3F5A3333 3F5DCCCD 3F616666 3F650000"
    "3F68999A 3F6C3333 3F6FCCCD 3F736666 3F770000 3F7A999A 3F7E3333 3F800000"
)


def _dynamic_map() -> tuple[float, ...]:
    """Mirror the positive entries around zero at index 127; 1.0 has no mirror."""
    positive = struct.unpack(">128f", _DYNAMIC_MAP_BITS)
    return (*(-value for value in reversed(positive[:127])), 0.0, *positive)


DYNAMIC_MAP = _dynamic_map()
