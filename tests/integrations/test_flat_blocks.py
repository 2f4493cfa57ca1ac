"""Flat blocks into rows and back, over shapes and block sizes, with any bytes."""

from math import gcd, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nf4tensor.errors import UnsupportedError
from nf4tensor.format.codebook import LEVELS
from nf4tensor.integrations import flat_blocks
from nf4tensor.integrations.flat_blocks import FlatWeight, Nested
from tests.integrations.golden_entries import as_bytes, table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def any_bytes(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@st.composite
def flat_weights(draw) -> FlatWeight:
    """Draw a weight of random bytes, most of a shape that rows can hold."""
    columns = draw(
        st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.integers(1, 700), st.just(4096))
    )
    lead = draw(st.lists(st.integers(1, 7), max_size=3))
    if draw(st.booleans()):
        lead = [*lead, draw(st.integers(1, max(1, 20000 // (prod(lead) * columns))))]
    shape, block_size = (*lead, columns), 1 << draw(st.integers(4, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    num_blocks = -(-prod(shape) // block_size)
    nested = None
    scales = any_bytes(generator, 4 * num_blocks).view(torch.float32)
    if draw(st.booleans()):
        scales = any_bytes(generator, num_blocks)
        absmax = torch.randn(-(-num_blocks // 256), generator=generator)
        nested = Nested(absmax, torch.randn((), generator=generator).item())
    packed = any_bytes(generator, -(-prod(shape) // 2))
    quant_type = draw(st.sampled_from(["nf4", "fp4"]))
    return FlatWeight(shape, block_size, quant_type, packed, scales, nested)


@settings(max_examples=150, deadline=None)
@given(flat_weights(), st.sampled_from(DTYPES))
def test_rows_hold_every_byte_and_value(flat, dtype):
    rows, columns = prod(flat.shape[:-1]), flat.shape[-1]
    if rows > 1 and gcd(columns, flat.block_size) < 16:
        with pytest.raises(UnsupportedError, match="cross rows in pieces of"):
            flat_blocks.to_rows(flat, dtype)
        return
    tensor = flat_blocks.to_rows(flat, dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (flat.shape, dtype)
    again = flat_blocks.from_rows(tensor, flat.block_size)
    assert (again.shape, again.block_size) == (flat.shape, flat.block_size)
    assert again.quant_type == flat.quant_type
    assert as_bytes(again.packed) == as_bytes(flat.packed)
    assert as_bytes(again.scales) == as_bytes(flat.scales)
    if flat.nested is not None:
        assert torch.equal(again.nested.absmax, flat.nested.absmax)
        assert again.nested.offset == flat.nested.offset
    levels = table(LEVELS[flat.quant_type])
    expected = flat_blocks.decode(flat, levels, dtype).nan_to_num(nan=-7.0)
    assert as_bytes(tensor.dequantize().nan_to_num(nan=-7.0)) == as_bytes(expected)


def test_decoding_in_chunks_is_decoding_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(-(-7 * 33 * 64 // 4096), generator=generator)
    packed = any_bytes(generator, 7 * 33 * 32)
    flat = FlatWeight((7, 33, 64), 4096, "nf4", packed, scales)
    codes = torch.stack([packed >> 4, packed & 15], -1).view(-1).int()
    expected = table(LEVELS["nf4"])[codes] * scales.repeat_interleave(4096)[: codes.numel()]
    monkeypatch.setattr(flat_blocks, "_CHUNK_WEIGHTS", 8192)
    decoded = flat_blocks.decode(flat, table(LEVELS["nf4"]), torch.float32)
    assert torch.equal(decoded, expected.view(7, 33, 64))


def test_a_single_number_can_be_viewed_as_bytes():
    """A slice of one number keeps its stride through `clone()`, and then has no bytes view."""
    scales = torch.randn(64)[::16][:1]
    packed = torch.zeros(32, dtype=torch.uint8)
    tensor = flat_blocks.to_rows(FlatWeight((1, 64), 64, "nf4", packed, scales), torch.float32)
    assert flat_blocks.from_rows(tensor, 64).scales.view(torch.uint8).shape == (4,)


@pytest.mark.parametrize("block_size", [32, 48, 100])
def test_flat_blocks_smaller_than_those_of_the_rows_are_refused(block_size):
    packed = torch.zeros(64, dtype=torch.uint8)
    tensor = flat_blocks.to_rows(FlatWeight((2, 64), 64, "nf4", packed, torch.ones(2)), DTYPES[0])
    with pytest.raises(UnsupportedError, match=f"agree with flat blocks of {block_size} over the"):
        flat_blocks.from_rows(tensor, block_size)
