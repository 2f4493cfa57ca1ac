"""What Hypothesis draws in these tests: geometries, and rows that are delicate block by block.

Rows come from a seed and a kind for each block, not from free floats: that finds the edges named
in the specification faster, and shrinks to the kinds that matter. Every property test uses the
settings of this file, so that a run is the same everywhere.
"""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from nf4tensor.format.codebook import FP4_THRESHOLDS, NF4_THRESHOLDS
from nf4tensor.format.spec import NF4Spec

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80, database=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANT_TYPES = ("nf4", "fp4")
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149
# Blocks that no quantizer gives its exact scale back.
NON_FINITE_KINDS = ("nan", "inf")
FINITE_KINDS = (
    "gaussian",
    "zero",
    "negative zero",
    "one value",
    "outlier",
    "subnormal",
    "tiny",
    "huge",
    "largest",
    "thresholds",
    "narrow",
    "squares",
)


def _narrow(generator: np.random.Generator, size: int) -> np.ndarray:
    # Blocks of one row whose absmax values differ in their last bits only.
    block = generator.uniform(-1, 1, size)
    block[0] = 1 + generator.integers(0, 40000) * 2.0**-23
    return block


def _squares(generator: np.random.Generator, size: int) -> np.ndarray:
    # Scales at the ties of the square root: base 1 and step 1 / 65025 where a block has 2.
    block = generator.uniform(-1, 1, size)
    block[0] = 1 + generator.choice([0, 1, (generator.integers(0, 255) + 0.5) ** 2 / 65025])
    return block


def _thresholds(generator: np.random.Generator, size: int) -> np.ndarray:
    # Weights that are a threshold once they are normalized, or its neighbours: ties of clause 5.
    thresholds = np.float32([*NF4_THRESHOLDS, *FP4_THRESHOLDS])
    near = [np.nextafter(thresholds, np.float32(side)) for side in (-2, 2)]
    block = generator.choice(np.concatenate([thresholds, *near]), size)
    block *= generator.choice(np.float32([-1, 1]), size)
    block[0] = 1
    return block.astype(np.float64) * 2.0 ** generator.integers(-100, 100)


def make_block(kind: str, generator: np.random.Generator, size: int) -> np.ndarray:
    """Return `size` weights of one kind, as float64 that float32 may round."""
    gaussian = generator.standard_normal(size)
    place = generator.integers(size)
    if kind in ("zero", "negative zero"):
        return np.full(size, 0.0 if kind == "zero" else -0.0)
    if kind == "one value":
        return np.full(size, gaussian[0])
    if kind == "subnormal":
        return generator.integers(-12, 13, size) * SMALLEST
    if kind == "tiny":
        return gaussian * 2.0**-127
    if kind in ("huge", "largest"):
        block = np.clip(gaussian / 3, -1, 1) * LARGEST
        block[place] = LARGEST if kind == "largest" else block[place]
        return block
    if kind == "thresholds":
        return _thresholds(generator, size)
    if kind == "narrow":
        return _narrow(generator, size)
    if kind == "squares":
        return _squares(generator, size)
    special = {"outlier": 1000 * gaussian[place], "nan": np.nan, "inf": -np.inf}
    if kind in special:
        gaussian[place] = special[kind]
    return gaussian


def make_rows(
    spec: NF4Spec, kinds: list[str], num_rows: int, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return `[num_rows, in_features]`; block b of the weight has the kind `kinds[b % len]`."""
    generator = np.random.default_rng(seed)
    weight = np.empty((num_rows, spec.in_features))
    for row in range(num_rows):
        for block in range(spec.num_blocks):
            columns = slice(block * spec.block_size, (block + 1) * spec.block_size)
            kind = kinds[(row * spec.num_blocks + block) % len(kinds)]
            size = weight[row, columns].size
            weight[row, columns] = make_block(kind, generator, size)
    with np.errstate(over="ignore"):
        return torch.from_numpy(weight.astype(np.float32)).to(dtype)


@st.composite
def specs(draw: st.DrawFn, scale_block_sizes: tuple = (None, 1, 2, 3, 256)) -> NF4Spec:
    """Draw the spec of a short row, with odd widths and short last blocks."""
    block_size = draw(st.sampled_from((16, 32, 64)))
    return NF4Spec.for_weight(
        draw(st.integers(1, 5 * block_size)),
        block_size,
        draw(st.sampled_from(scale_block_sizes)),
        draw(st.sampled_from(QUANT_TYPES)),
    )


def kinds(allowed: tuple[str, ...] = FINITE_KINDS) -> st.SearchStrategy:
    """Draw what the blocks of a weight are."""
    return st.lists(st.sampled_from(allowed), min_size=1, max_size=6)


seeds = st.integers(0, 2**32 - 1)
