"""The packages that this one is measured beside: bitsandbytes and torchao, each where installed.

Each function returns contestants, or what makes them, and puts into `skipped` why a package could
not take part. Nothing here times or judges.
"""

import contextlib
import ctypes
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import nn

MODULES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
}
BLOCK_SIZE = 64
SCALER_BLOCK_SIZE = 256  # torchao's
Contestants = dict[str, Callable[[], object]]


def load(package: str, options, skipped: dict[str, str]) -> ModuleType | None:
    """Import a package, or say in `skipped` why not."""
    if options.no_peers:
        skipped[package] = "--no-peers"
        return None
    try:
        with quiet():
            return importlib.import_module(MODULES[package])
    except ImportError as error:
        skipped[package] = f'{error}: pip install "nf4tensor[bench]"'
        return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what the packages say when imported, such as of kernels for other processors."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def load_torchao(weight: torch.Tensor, options, skipped: dict[str, str]) -> ModuleType | None:
    """Import torchao's NF4 module, unless it refuses the weight's size."""
    torchao = load("torchao", options, skipped)
    if torchao is not None and weight.numel() % (BLOCK_SIZE * SCALER_BLOCK_SIZE):
        skipped["torchao"] = f"it refuses a weight of {weight.numel()} elements"
        return None
    return torchao


def torchao_weight(torchao: ModuleType, weight: torch.Tensor) -> torch.Tensor:
    """Quantize with torchao."""
    return torchao.to_nf4(weight, BLOCK_SIZE, SCALER_BLOCK_SIZE)


def bitsandbytes_weight(bnb: ModuleType, weight: torch.Tensor, nested: bool):
    """Quantize with bitsandbytes: (packed, state)."""
    return bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK_SIZE, compress_statistics=nested, quant_type="nf4"
    )


def bitsandbytes_kernel(bnb: ModuleType, packed, state, out: torch.Tensor) -> Callable[[], object]:
    """Return a call of bitsandbytes' C kernel, which decodes bf16 with float32 scales into `out`.

    Its Python call has no `out` on a CPU.
    """
    kernel = bnb.cextension.lib.cdequantize_blockwise_cpu_nf4_bf16
    assert out.dtype == torch.bfloat16
    assert not state.nested
    sizes = [ctypes.c_longlong(size) for size in (state.blocksize, *out.shape)]
    # The tensors, not their addresses: a call keeps them alive.
    tensors = (packed, state.absmax, out)
    return lambda: kernel(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), *sizes)


def bitsandbytes_linear(
    bnb: ModuleType,
    weight: torch.Tensor,
    dtype: torch.dtype,
    quant_storage: torch.dtype = torch.uint8,
) -> nn.Module:
    """Return bitsandbytes' layer over a weight, computing in `dtype`, its bytes seen as another.

    In evaluation mode its first call repacks the weight in place on some processors: give each
    mode a layer of its own.
    """
    out_features, in_features = weight.shape
    layer = bnb.nn.Linear4bit(
        in_features, out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    layer.weight = bnb.nn.Params4bit(
        weight.clone(),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=True,
        quant_storage=quant_storage,
        module=layer,  # where the layer looks for its scales once FSDP has replaced the weight
    )
    return layer.to(weight.device)  # quantizes


def check_close(theirs: torch.Tensor, ours: torch.Tensor, bound: float) -> None:
    """Compare another package's result with ours, by the norm of their difference."""
    distance = ((theirs.float() - ours.float()).norm() / ours.float().norm()).item()
    assert distance <= bound, f"relative distance {distance:.2g} from ours, above {bound}"
