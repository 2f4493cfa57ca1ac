"""torchao's NF4Tensor made into ours."""

import pytest
import torch

from nf4tensor import to_nf4
from nf4tensor.errors import DTypeError, UnsupportedError
from nf4tensor.integrations.torchao import from_torchao
from nf4tensor.kernels import reference
from tests.integrations.golden_entries import as_bytes

# Of a decoded weight: as the docstring of `from_torchao` has them.
BOUNDS = {torch.float32: 5.5e-4, torch.float16: 2.1e-3, torch.bfloat16: 1.3e-2}


@pytest.fixture(scope="module")
def torchao():
    """The module with torchao's NF4Tensor, which has moved; importing it takes ten seconds."""
    pytest.importorskip("torchao", reason="the extra `bench` is not installed")
    return pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


def test_another_tensor_is_refused():
    for other in (torch.zeros(2, 64), to_nf4(torch.zeros(2, 64))):
        with pytest.raises(DTypeError, match="expected an NF4Tensor of torchao, got "):
            from_torchao(other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("shape", "block_size"), [((64, 1024), 64), ((2048, 48), 64)])
def test_codes_and_scales_are_those_of_torchao(torchao, shape, block_size, dtype):
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(shape, dtype=torch.float32)
    given = torchao.to_nf4(weight.to(dtype), block_size, 16)
    tensor = from_torchao(given)
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == (given.shape, dtype, False)
    codes = tensor.record[:, : tensor.spec.codes_bytes]
    assert as_bytes(codes) == as_bytes(given.quantized_data)
    scales = given.dequantize_scalers(
        given.quantized_scalers, given.quantization_factor, given.scaler_block_size
    )
    repeated = scales.float().repeat_interleave(block_size // tensor.spec.block_size)
    assert torch.equal(reference.read_scales(tensor.record, tensor.spec).flatten(), repeated)
    expected, decoded = given.get_original_weight().double(), tensor.dequantize().double()
    assert ((expected - decoded).abs() <= BOUNDS[dtype] * decoded.abs()).all()
    assert ((expected - decoded).abs() > 0.5 * BOUNDS[dtype] * decoded.abs()).any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_rows_cannot_hold_is_refused(torchao):
    weight = torch.randn(64, 512)
    with pytest.raises(UnsupportedError, match=r"strides \(1, 512\) .* is a view: pass weight.get"):
        from_torchao(torchao.to_nf4(weight, 64, 16).t())
    with pytest.raises(UnsupportedError, match="block_size is 8, not a power of two from 16 to"):
        from_torchao(torchao.to_nf4(weight, 8, 16))
    with pytest.raises(UnsupportedError, match="rows of 8 weights cut blocks of 64 into pieces"):
        from_torchao(torchao.to_nf4(weight.view(-1, 8), 64, 16))
