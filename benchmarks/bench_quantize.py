"""Quantize a weight, by each instruction set and by the plain PyTorch reference.

Records are compared, byte for byte, before anything is timed.
"""

from functools import partial

import harness
import torch

from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import native, ops, reference

SHAPE = (4096, 14336)
REFERENCE_ROUNDS = 3


def main() -> None:
    """Run and report."""
    options = harness.options(__doc__)
    if native.unavailable_because() is not None:
        raise SystemExit(f"no compiled kernels: {native.unavailable_because()}")
    torch.manual_seed(0)
    spec = NF4Spec.for_weight(SHAPE[-1])
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(SHAPE).to(dtype)
        record = ops.quantize(weight, spec)
        assert torch.equal(record[:64], reference.quantize(weight[:64], spec))
        for threads in options.threads:
            torch.set_num_threads(threads)
            slow = harness.race(
                {"reference": partial(reference.quantize, weight, spec)}, REFERENCE_ROUNDS
            )
            for isa in sorted({native.isa(), "scalar"}):
                rows.append(row(isa, weight, record, spec, threads, options.rounds, slow))
    harness.report(f"quantize {SHAPE[0]}x{SHAPE[1]}", rows, options.json)


def row(isa, weight, record, spec, threads, rounds, slow) -> dict[str, object]:
    """Time one instruction set; the others' records must equal the first one's."""
    best = native.isa()
    native.use_isa(isa)
    assert torch.equal(ops.quantize(weight, spec), record)
    times = harness.race({"ours": partial(ops.quantize_into, weight, spec, record)}, rounds)["ours"]
    native.use_isa(best)
    return {
        "from": str(weight.dtype).removeprefix("torch."),
        "isa": isa,
        "threads": threads,
        "ms": times["median_ms"],
        "q1": times["q1_ms"],
        "q3": times["q3_ms"],
        "GB/s": (weight.nbytes + record.nbytes) / times["median_ms"] / 1e6,
        "reference / ours": slow["reference"]["median_ms"] / times["median_ms"],
    }


if __name__ == "__main__":
    main()
