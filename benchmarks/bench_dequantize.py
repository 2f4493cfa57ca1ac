"""Dequantize a weight into a given output: each instruction set, the machine, and the others.

The twin moves the same bytes and decodes nothing, `copy_` moves the decoded tensor, 1.6 times the
bytes. bitsandbytes and torchao decode the same weight in their own formats. Whatever decodes is
checked before anything is timed: ours bit for bit against the reference, with float32 scales bit
for bit against bitsandbytes, the others by their distance from ours.
"""

from collections.abc import Sequence
from functools import partial

import harness
import peers
import roofs
import torch

from nf4tensor import NF4Tensor, to_nf4
from nf4tensor.kernels import native, reference

SHAPE = (4096, 14336)
QUICK_SHAPE = (64, 512)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# What theirs / ours should be at least, with bfloat16 and 8-bit scales.
GOALS = {
    "avx512": {
        "twin": 0.90,
        "copy_": 1.0,
        "bitsandbytes C": 1.6,
        "bitsandbytes": 7.0,
        "torchao": 50.0,
    },
    "avx2": {"twin": 0.80},
}
DOUBLE_QUANTIZATION = 1 / 1.03  # 8-bit scales cost at most 3 %
# Relative distance of another format's weights from ours: both are within a tenth of the weight.
NESTED, OTHER_SCALES = 0.005, 0.05


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", type=harness.shape, help="rows x columns, a multiple of 32")
    options = harness.parse(parser, argv)
    shape = options.shape or (QUICK_SHAPE if options.quick else SHAPE)
    isas = harness.instruction_sets()
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.bfloat16)
    ours = {"square8": to_nf4(weight), "float32": to_nf4(weight, scale_block_size=None)}
    skipped = {"roofs, twin": reason} if (reason := roofs.unavailable_because()) else {}
    found, rows = {}, []
    for threads in options.threads:
        torch.set_num_threads(threads)
        found[threads] = roofs.measure(threads, options)
        for dtype_name, dtype in DTYPES.items():
            out = torch.empty(shape, dtype=dtype)
            contestants = own(ours, out, isas)
            contestants["copy_"] = partial(out.copy_, weight.to(dtype))
            if (twin := roofs.twin(ours["square8"].record, out, threads)) is not None:
                contestants["twin"] = twin
            if dtype == torch.bfloat16:
                contestants |= others(weight, ours, out, options, skipped)
            harness.say(f"dequantize to {dtype_name}, {threads} threads")
            times = harness.race(contestants, options.rounds, options.seconds)
            labels = {"to": dtype_name, "threads": threads}
            limits = {isa: limit_of(isa, ours["square8"], dtype, threads, options) for isa in isas}
            rows += summarize(times, ours, out, labels, limits)
    native.use_isa(isas[0])
    title = f"dequantize {shape[0]}x{shape[1]}"
    harness.report(
        "dequantize", {title: rows}, options.results, roofs=roofs.present(found), skipped=skipped
    )


def own(ours: dict[str, NF4Tensor], out: torch.Tensor, isas: list[str]) -> peers.Contestants:
    """Return our kernels, by instruction set and kind of scales, checked against the reference."""

    def run(isa: str, tensor: NF4Tensor) -> torch.Tensor:
        native.use_isa(isa)
        return tensor.dequantize(out=out)

    contestants = {}
    for scales, tensor in ours.items():
        expected = reference.dequantize(tensor.record, tensor.spec, out.dtype)
        for isa in isas:
            contestants[f"{isa}, {scales} scales"] = partial(run, isa, tensor)
            assert torch.equal(run(isa, tensor), expected), f"{isa} differs from the reference"
    return contestants


def others(weight, ours, out, options, skipped) -> peers.Contestants:
    """Return the other packages' calls, checked."""
    contestants: peers.Contestants = {}
    ours_decoded = ours["square8"].dequantize()
    if (bnb := peers.load("bitsandbytes", options, skipped)) is not None:
        plain = peers.bitsandbytes_weight(bnb, weight, nested=False)
        contestants["bitsandbytes C"] = peers.bitsandbytes_kernel(bnb, *plain, out)
        contestants["bitsandbytes C"]()
        assert torch.equal(out, ours["float32"].dequantize()), "bitsandbytes decodes other weights"
        nested = peers.bitsandbytes_weight(bnb, weight, nested=True)
        contestants["bitsandbytes"] = partial(bnb.functional.dequantize_4bit, *nested)
        peers.check_close(contestants["bitsandbytes"](), ours_decoded, NESTED)
    if (torchao := peers.load_torchao(weight, options, skipped)) is not None:
        theirs = peers.torchao_weight(torchao, weight)
        contestants["torchao"] = theirs.get_original_weight
        peers.check_close(theirs.get_original_weight(), ours_decoded, OTHER_SCALES)
    return contestants


def limit_of(isa: str, tensor: NF4Tensor, dtype: torch.dtype, threads: int, options) -> str:
    """Say what bounds an instruction set where the memory does not."""
    native.use_isa(isa)
    milliseconds = roofs.decoding(tensor, dtype, threads, options)
    return f"decoding takes {milliseconds:.1f} ms in cache"


def summarize(times, ours, out: torch.Tensor, labels: harness.Row, limits) -> list[harness.Row]:
    """Make table rows: each instruction set with what it is compared with below it."""
    moved = {name: 2 * out.nbytes if name == "copy_" else None for name in times}
    moved["twin"] = ours["square8"].nbytes + out.nbytes
    rows = []
    for isa in dict.fromkeys(name.split(", ")[0] for name in times if name.endswith(" scales")):
        mine = times[f"{isa}, square8 scales"]["median_ms"]
        goals = dict(GOALS.get(isa, {})) if out.dtype == torch.bfloat16 else {}
        if isa in GOALS:
            goals[f"{isa}, float32 scales"] = DOUBLE_QUANTIZATION
        for scales, tensor in ours.items():
            moved[f"{isa}, {scales} scales"] = tensor.nbytes + out.nbytes
        for name, timing in times.items():
            of_ours = name.endswith(" scales")
            if of_ours != name.startswith(isa) or (isa == "scalar" and not of_ours):
                continue
            row = {**labels, "ours": isa, "contestant": name, **harness.cells(timing)}
            if moved[name]:
                rate = moved[name] / timing["median_ms"] / 1e6
                row |= {"GB/s": rate, "bytes": moved[name], "flops": out.numel()}
            if name != f"{isa}, square8 scales":
                row |= harness.verdict(timing["median_ms"], mine, goals.get(name), limits[isa])
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
