"""Dequantize a weight into a given output, beside a copy of the same output.

For each number of threads, instruction set, scale kind and dtype: milliseconds, and the time as a
share of `copy_` of the decoded tensor, which moves 1.6 times the bytes. The result is compared with
the reference, bit for bit, before anything is timed.
"""

from functools import partial

import harness
import torch

from nf4tensor import to_nf4
from nf4tensor.kernels import native, reference

SHAPE = (4096, 14336)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SCALES = {"square8": 256, "float32 scales": None}


def main() -> None:
    """Run and report."""
    options = harness.options(__doc__)
    torch.manual_seed(0)
    weight = torch.randn(SHAPE, dtype=torch.bfloat16)
    quantized = {name: to_nf4(weight, scale_block_size=size) for name, size in SCALES.items()}
    rows = []
    isas = instruction_sets()
    for dtype_name, dtype in DTYPES.items():
        out, source = torch.empty(SHAPE, dtype=dtype), weight.to(dtype)
        for isa in isas:
            native.use_isa(isa)
            for tensor in quantized.values():
                check(tensor, out)
            for threads in options.threads:
                torch.set_num_threads(threads)
                contestants = {
                    name: partial(tensor.dequantize, out=out) for name, tensor in quantized.items()
                }
                contestants["copy_"] = partial(out.copy_, source)
                times = harness.race(contestants, options.rounds)
                rows += summarize(times, quantized, (dtype_name, isa, threads), dtype.itemsize)
    harness.report(f"dequantize {SHAPE[0]}x{SHAPE[1]}", rows, options.json)


def instruction_sets() -> list[str]:
    """Return the best instruction set and the plain one, where a library was compiled."""
    if native.unavailable_because() is not None:
        raise SystemExit(f"no compiled kernels: {native.unavailable_because()}")
    return sorted({native.isa(), "scalar"})


def check(tensor, out: torch.Tensor) -> None:
    """Compare with the reference before timing."""
    tensor.dequantize(out=out)
    expected = reference.dequantize(tensor.record, tensor.spec, out.dtype)
    assert torch.equal(out, expected)


def summarize(times, quantized, labels, itemsize: int) -> list[dict[str, object]]:
    """Make table rows of medians; bytes are those of records read and weights written."""
    dtype, isa, threads = labels
    copy_ms = times["copy_"]["median_ms"]
    rows = []
    for name, tensor in quantized.items():
        moved = tensor.nbytes + itemsize * tensor.numel()
        rows.append(
            {
                "to": dtype,
                "isa": isa,
                "threads": threads,
                "scales": name,
                "ms": times[name]["median_ms"],
                "q1": times[name]["q1_ms"],
                "q3": times[name]["q3_ms"],
                "GB/s": moved / times[name]["median_ms"] / 1e6,
                "copy_ ms": copy_ms,
                "of copy_": times[name]["median_ms"] / copy_ms,
            }
        )
    return rows


if __name__ == "__main__":
    main()
