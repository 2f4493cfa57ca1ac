"""Quantize a weight: each instruction set, the plain PyTorch reference, bitsandbytes and torchao.

Records are compared, byte for byte, before anything is timed; the others by what they decode to.
The second table is the peak memory of a process beyond the weight, in % of the bf16 weight's bytes,
each in a process of its own: all of it, and without the result.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import harness
import peers
import roofs
import torch

from nf4tensor import to_nf4
from nf4tensor.format.spec import NF4Spec
from nf4tensor.kernels import native, ops, reference

SHAPE = (4096, 14336)
QUICK_SHAPE = (64, 512)
GOALS = {"bitsandbytes": 50.0}  # of their time over ours
EXTRA_GOAL = 5.0  # % of the weight's bytes beyond weight and result, at most
DISTANCE = 0.05  # of their decoded weights from ours, as in bench_dequantize.py
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report; with --peak NAME, measure one contestant's memory in this process."""
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", type=harness.shape, help="rows x columns of the weight")
    parser.add_argument("--peak", help="print the peak memory of one contestant and exit")
    options = harness.parse(parser, argv)
    shape = options.shape or (QUICK_SHAPE if options.quick else SHAPE)
    isas = harness.instruction_sets()
    skipped = {"roofs": reason} if (reason := roofs.unavailable_because()) else {}
    if options.peak:
        print(json.dumps(measure_peak(options.peak, shape, options)))
        return
    torch.manual_seed(0)
    found, rows = {}, []
    for threads in options.threads:
        torch.set_num_threads(threads)
        found[threads] = roofs.measure(threads, options)
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randn(shape).to(dtype)
            spec = NF4Spec.for_weight(shape[-1])
            record = ops.quantize(weight, spec)
            contestants = own(weight, spec, record, isas)
            if dtype == torch.bfloat16:
                contestants |= others(weight, options, skipped)
            harness.say(f"quantize from {dtype}, {threads} threads")
            times = harness.race(contestants, options.rounds, options.seconds)
            labels = {"from": str(dtype).removeprefix("torch."), "threads": threads}
            moved = weight.nbytes + record.nbytes
            rows += summarize(times, labels, moved, weight.numel(), found[threads])
    native.use_isa(isas[0])
    title = f"quantize {shape[0]}x{shape[1]}"
    tables = {title: rows, "peak memory beyond the weight, % of its bytes": peaks(shape, options)}
    harness.report("quantize", tables, options.results, roofs=roofs.present(found), skipped=skipped)


def own(weight, spec: NF4Spec, record: torch.Tensor, isas: list[str]) -> peers.Contestants:
    """Return our kernels by instruction set, and the reference, all checked against it."""

    def run(isa: str) -> None:
        native.use_isa(isa)
        ops.quantize_into(weight, spec, record)

    contestants: peers.Contestants = {}
    expected = reference.quantize(weight[:64], spec)
    for isa in isas:
        record.copy_(ops.zero_record(record.shape[:-1], spec, record.device))
        run(isa)
        assert torch.equal(record[:64], expected), f"{isa} differs from the reference"
        contestants[isa] = partial(run, isa)
    contestants["reference"] = partial(reference.quantize, weight, spec)
    return contestants


def others(weight: torch.Tensor, options, skipped: dict[str, str]) -> peers.Contestants:
    """Return the other packages' calls, checked by what they decode to."""
    contestants: peers.Contestants = {}
    ours = to_nf4(weight).dequantize()
    if (bnb := peers.load("bitsandbytes", options, skipped)) is not None:
        contestants["bitsandbytes"] = partial(peers.bitsandbytes_weight, bnb, weight, nested=True)
        theirs = bnb.functional.dequantize_4bit(*contestants["bitsandbytes"]())
        peers.check_close(theirs, ours, DISTANCE)
    if (torchao := peers.load_torchao(weight, options, skipped)) is not None:
        contestants["torchao"] = partial(peers.torchao_weight, torchao, weight)
        peers.check_close(contestants["torchao"]().get_original_weight(), ours, DISTANCE)
    return contestants


def summarize(times, labels: harness.Row, moved: int, weights: int, roof) -> list[harness.Row]:
    """Make table rows; all but our best are compared with it."""
    ours, *_ = times
    mine = times[ours]["median_ms"]
    limit = roofs.share(moved / mine / 1e6, roof, "copy GB/s")
    rows = []
    for name, timing in times.items():
        row = {**labels, "contestant": name, **harness.cells(timing)}
        if name in harness.INSTRUCTION_SETS:
            row |= {"GB/s": moved / timing["median_ms"] / 1e6, "bytes": moved, "flops": weights}
        if name != ours:
            row |= harness.verdict(timing["median_ms"], mine, GOALS.get(name), limit)
        rows.append(row)
    return rows


def peaks(shape: tuple[int, int], options) -> list[harness.Row]:
    """Measure the peak memory of ours and of every other package, each in a fresh process."""
    rows = []
    for name in ("ours", *([] if options.no_peers else ["bitsandbytes", "torchao"])):
        command = [sys.executable, __file__, "--peak", name, "--shape", f"{shape[0]}x{shape[1]}"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            rows.append({"contestant": name, "note": run.stderr.strip().splitlines()[-1]})
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        row = {"contestant": name, **found}
        if name == "ours" and "extra %" in found:
            met = "yes" if found["extra %"] <= EXTRA_GOAL else "no"
            row |= {"goal": f"extra <= {EXTRA_GOAL:.0f} %", "met": met}
        rows.append(row)
    return rows


def measure_peak(name: str, shape: tuple[int, int], options) -> harness.Row:
    """Quantize once here and return how far resident memory rose above the weight's.

    Raises:
        SystemExit: the package is missing, or this system does not tell.
    """
    skipped: dict[str, str] = {}
    weight = torch.empty(shape, dtype=torch.bfloat16)
    for row in weight:
        row.normal_()  # no float32 copy of the whole
    run = quantizer(name, weight, options, skipped)
    if run is None:
        raise SystemExit(skipped[name])
    quantizer(name, weight[:32], options, skipped)()  # loads what loads on first use
    try:
        CLEAR.write_text("5")  # the peak becomes what is resident now
        before = resident("VmRSS")
    except OSError as error:
        raise SystemExit(f"this system does not tell peak memory: {error}") from None
    result = run()
    extra = resident("VmHWM") - before
    kept = sum(tensor.nbytes for tensor in parts(result))
    return {
        "peak %": 100 * extra / weight.nbytes,
        "result %": 100 * kept / weight.nbytes,
        "extra %": 100 * max(0, extra - kept) / weight.nbytes,
    }


def resident(field: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def quantizer(name: str, weight, options, skipped) -> Callable[[], object] | None:
    """Return a contestant that makes its result anew, or None."""
    if name == "ours":
        return partial(to_nf4, weight)
    if name == "torchao":
        torchao = peers.load_torchao(weight, options, skipped)
        return torchao and partial(peers.torchao_weight, torchao, weight)
    bnb = peers.load(name, options, skipped)
    return bnb and partial(peers.bitsandbytes_weight, bnb, weight, nested=True)


def parts(result) -> list[torch.Tensor]:
    """Return the tensors that hold a quantized weight."""
    if hasattr(result, "record"):
        return [result.record]
    if isinstance(result, tuple):  # of bitsandbytes
        packed, state = result
        return [packed, state.absmax, state.state2.absmax]
    return [result.quantized_data, result.quantized_scalers, result.quantization_factor]


if __name__ == "__main__":
    main()
