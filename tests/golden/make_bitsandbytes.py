"""Ask bitsandbytes 0.50.2, on the CPU, for the bytes in `bitsandbytes.npz` and `bitsandbytes.json`.

Run from the root of the repository, with torch 2.13.0 and bitsandbytes 0.50.2:

    python -m tests.golden.make_bitsandbytes

The npz has inputs (bfloat16 bits) and the tensors that it stores; the json has the version and, of
each weight, the JSON that it stores and the SHA-256 of what it decodes to in three dtypes. Every
weight is decoded flat: on some CPUs bitsandbytes 0.50.2 decodes rows wrongly whose length is not a
multiple of its block size.
"""

import hashlib
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

VERSION = "0.50.2"
FOLDER = Path(__file__).parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIDE_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class Case(NamedTuple):
    """One call of its quantizer, and which input it is given."""

    weight: str
    block_size: int
    quant_type: str = "nf4"
    nested: bool = False
    storage: str = "uint8"


# Not kept: inputs of cases that are only decoded.
DECODED_ONLY = ("straddling", "crossing", "narrow")
CASES = {
    **{f"wide-{size}": Case("wide", size) for size in WIDE_BLOCK_SIZES},
    "odd": Case("odd", 64),
    "fp4": Case("small", 64, "fp4"),
    # Groups of 256 scales that end inside a row of 9 blocks.
    "nested-nf4": Case("straddling", 64, "nf4", nested=True),
    "nested-fp4": Case("straddling", 64, "fp4", nested=True),
    # Blocks of 64 over rows of 96: the record has blocks of 32.
    "crossing": Case("crossing", 64),
    "crossing-nested": Case("crossing", 64, "nf4", nested=True),
    # One group, fewer blocks than 256, large blocks.
    "narrow-nested": Case("narrow", 512, "nf4", nested=True),
    **{f"storage-{dtype}": Case("small", 64, "nf4", True, dtype) for dtype in DTYPES},
}


def weights() -> dict[str, torch.Tensor]:
    """Make the inputs: Gaussian rows, and by name what is delicate in them."""
    generator = np.random.default_rng(2305_14314)

    def gaussian(*shape: int) -> torch.Tensor:
        values = 0.02 * generator.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values).to(torch.bfloat16)

    wide = gaussian(3, 4096)
    wide[1, :32] = 0  # a zero block
    wide[1, 32:64] *= 2.0**-120  # absmax just above 1e-38, with subnormal weights
    wide[1, 64:96] *= 2.0**127  # absmax in the last binades but five
    wide[1, 64] = 3e38
    wide[1, 96:128] = torch.tensor([-0.25, 0.5]).repeat(16)  # one magnitude at both ends
    wide[1, 500] = 3.0  # outliers
    wide[1, 3000] = -100.0
    wide[2] = 0
    wide[2, 4000] = -0.0
    return {
        "wide": wide,
        "odd": gaussian(1, 65),
        "small": gaussian(4, 256),
        "straddling": gaussian(40, 576) * torch.logspace(-2, 1, 40)[:, None].to(torch.bfloat16),
        "crossing": gaussian(192, 96),
        "narrow": gaussian(8, 1024),
    }


def call(weight: torch.Tensor, case: Case) -> tuple[dict[str, np.ndarray], dict]:
    """Return the tensors that bitsandbytes stores for a weight, and what the json says of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes.functional as bnb
    packed, state = bnb.quantize_4bit(
        weight,
        blocksize=case.block_size,
        quant_type=case.quant_type,
        compress_statistics=case.nested,
        quant_storage=getattr(torch, case.storage),
    )
    text = state.as_dict(packed=True)[f"quant_state.bitsandbytes__{case.quant_type}"]
    packed_bytes = packed.view(-1).view(torch.uint8).numpy()
    stored = {"packed": packed_bytes, "absmax": state.absmax.numpy()}
    if case.nested:
        stored["nested_absmax"] = state.state2.absmax.numpy()
        stored["offset"] = state.offset.numpy()
    hashes = {}
    state.shape = torch.Size([weight.numel()])
    for name, dtype in DTYPES.items():
        state.dtype = dtype
        decoded = bnb.dequantize_4bit(packed, state).contiguous()
        if case.quant_type == "fp4":
            # Code 8 is +0.0 in its table and in its PyTorch path, -0.0 in its scalar CPU path.
            decoded = torch.where(decoded == 0, 0.0, decoded)
        hashes[name] = hashlib.sha256(decoded.view(torch.uint8).numpy().tobytes()).hexdigest()
    return stored, {"quant_state": bytes(text.tolist()).decode(), "sha256": hashes}


def make() -> tuple[dict[str, np.ndarray], dict[str, dict]]:
    """Return all arrays, by `case/name`, and the description of all cases."""
    inputs = weights()
    arrays = {
        f"{name}/weight": weight.view(torch.uint16).numpy()
        for name, weight in inputs.items()
        if name not in DECODED_ONLY
    }
    cases = {}
    for name, case in CASES.items():
        stored, description = call(inputs[case.weight], case)
        arrays |= {f"{name}/{key}": value for key, value in stored.items()}
        shape = list(inputs[case.weight].shape)
        cases[name] = {**case._asdict(), "shape": shape, **description}
    return arrays, cases


def main() -> None:
    """Write both files."""
    import bitsandbytes

    assert bitsandbytes.__version__ == VERSION, bitsandbytes.__version__
    arrays, cases = make()
    np.savez_compressed(FOLDER / "bitsandbytes.npz", **arrays)
    manifest = {"bitsandbytes": VERSION, "torch": torch.__version__, "cases": cases}
    (FOLDER / "bitsandbytes.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
