"""Sections of `gpu_check.py` that time single kernels, beside a copy measured in the same race."""

from collections.abc import Callable
from functools import partial

import bench_linear
import harness
import peers
import torch
import torch.nn.functional as F
from gpu_timing import Call, Sets, cells, race, share
from gpu_worker import ALWAYS, MAPPINGS

from nf4tensor.kernels import native, ops
from nf4tensor.kernels.schema import WEIGHT_DTYPES

SHAPES = ((4096, 14336), (8192, 28672))
QUICK_SHAPES = ((64, 512), (64, 1024))
COPY_GOALS = {(4096, 14336): 0.90, (8192, 28672): 0.93}  # of the copy's rate
NESTED_GOAL = 2.0  # bitsandbytes' time over ours
DOUBLE_QUANTIZATION = 1 / 1.03  # 8-bit scales cost at most 3 %
LINEAR_SHAPES = ((14336, 4096), (4096, 14336))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 16)
# Of the copy's rate. About 0.65 are within reach on an H200, by the instructions of a weight.
ONE_ROW_GOAL = 0.80
GRIDS = (1, 2, 4, 8, 16)  # blocks for each multiprocessor, to cap the grid at
CHECKED_ROWS = 4
PEER_DISTANCE = 0.06  # of another format's results from ours
LEAST_SECONDS = 3.0  # for the products of one number of rows


def mappings(check) -> str | None:
    """Time the store mappings of dequantize, and caps on its grid, against each other."""
    choose = native.tune_dequantize
    if check.device == "cpu":
        return "no store mappings to choose from: only CUDA's dequantize has them"
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for shape in QUICK_SHAPES if check.quick else SHAPES:
        check.at(f"mappings {shape}")
        weight = torch.randn(shape, dtype=torch.bfloat16, device=check.device)
        sets = Sets.of(check, weight, 256, weight.dtype)

        def decode(mapping: str | None, max_blocks: int, number: int, sets=sets) -> None:
            choose(mapping, max_blocks)
            sets.decode(number)

        contestants: dict[str, Call] = {"copy_": sets.copies()}
        for mapping in check.choices("tune_dequantize", MAPPINGS):
            contestants[mapping or "default"] = partial(decode, mapping, 0)
        for grid in GRIDS:
            contestants[f"{grid} blocks a processor"] = partial(decode, None, grid * processors)
        try:
            times = race(check, contestants, len(sets.records))
        finally:
            choose(None)
        copy = sets.rate_of_copy(times)
        for name, timing in times.items():
            rate = copy if name == "copy_" else sets.bytes / timing["median_ms"] / 1e6
            row = {"mapping": name, **cells(timing), **share(rate, copy, None)}
            check.row(f"mappings of dequantize {shape[0]}x{shape[1]} to bfloat16", row)
    return None


def dequantize(check) -> None:
    """Time dequantize of both kinds of scales, beside a copy and the other packages."""
    for shape in QUICK_SHAPES if check.quick else SHAPES:
        weight = torch.randn(shape, dtype=torch.bfloat16, device=check.device)
        for dtype in WEIGHT_DTYPES if shape == SHAPES[0] else (torch.bfloat16,):
            check.at(f"dequantize {shape} to {dtype}")
            nested, plain = (Sets.of(check, weight, size, dtype) for size in (256, None))
            contestants: dict[str, Call] = {
                "square8 scales": nested.decode,
                "float32 scales": plain.decode,
                "copy_": nested.copies(),
            }
            if dtype == torch.bfloat16:
                contestants |= others(check, weight, nested)
            times = race(check, contestants, len(nested.records))
            title = f"dequantize {shape[0]}x{shape[1]} to {str(dtype).removeprefix('torch.')}"
            goals = {"copy_": COPY_GOALS[shape]} if check.judges and dtype == torch.bfloat16 else {}
            report_dequantize(check, title, times, {"square8": nested, "float32": plain}, goals)
    launches = launches_of(check, partial(nested.decode, 0))
    if launches is not None:
        met = "yes" if launches == 1 else "no"
        check.row("launches of dequantize", {"launches": launches, "goal": "1", "met": met})


def report_dequantize(check, title: str, times, sets: dict[str, Sets], goals) -> None:
    """Add the rows of one race."""
    mine = times["square8 scales"]["median_ms"]
    copy = sets["square8"].rate_of_copy(times)
    for name, timing in times.items():
        row = {"contestant": name, **cells(timing)}
        kind = name.removesuffix(" scales")
        if kind in sets:
            row["bytes"] = sets[kind].bytes
            row |= share(sets[kind].bytes / timing["median_ms"] / 1e6, copy, goals.get("copy_"))
        elif name == "copy_":
            row |= {"bytes": 2 * sets["square8"].outs[0].nbytes, "GB/s": copy}
        if name != "square8 scales":
            row["theirs / ours"] = timing["median_ms"] / mine
        check.row(title, row)
    if not goals:
        return
    pairs = {"float32 scales": DOUBLE_QUANTIZATION, "bitsandbytes nested": NESTED_GOAL}
    for name, goal in pairs.items():
        if name in times:
            told = harness.verdict(times[name]["median_ms"], mine, goal)
            check.row("square8 scales beside others", {"of": title, "theirs": name, **told})


def others(check, weight: torch.Tensor, ours: Sets) -> dict[str, Call]:
    """Return the other packages' calls, checked."""
    contestants: dict[str, Call] = {}
    decoded = ours.decode(0).clone()
    if (bnb := peers.load("bitsandbytes", check, check.left_out)) is not None:
        for name, nested in (("bitsandbytes nested", True), ("bitsandbytes", False)):
            packed, state = peers.bitsandbytes_weight(bnb, weight, nested)
            copies = [packed.clone() for _ in ours.records]
            contestants[name] = partial(
                lambda copies, state, number: bnb.functional.dequantize_4bit(copies[number], state),
                copies,
                state,
            )
            peers.check_close(contestants[name](0), decoded, PEER_DISTANCE)
    if (torchao := peers.load_torchao(weight, check, check.left_out)) is not None:
        theirs = peers.torchao_weight(torchao, weight)
        contestants["torchao"] = lambda number: theirs.get_original_weight()
        peers.check_close(theirs.get_original_weight(), decoded, PEER_DISTANCE)
    return contestants


def launches_of(check, run: Callable[[], object]) -> int | None:
    """Return how many kernels a call launches; None where nothing can tell."""
    if check.device == "cpu":
        return None
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    on_device = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        check.left_out["launches"] = "torch's profiler saw no kernel"
        return None
    return len([name for name in on_device if "Sync" not in name])


# Products


def linear(check) -> None:
    """Time products with few and many rows of input: ours, fused or not, cuBLAS and the others."""
    for shape in QUICK_SHAPES if check.quick else LINEAR_SHAPES:
        weight = torch.randn(shape, dtype=torch.bfloat16, device=check.device)
        sets = Sets.of(check, weight, 256, weight.dtype)
        copy = sets.rate_of_copy(race(check, {"copy_": sets.copies()}, len(sets.records)))
        layers = peer_layers(check, weight)
        fused_up_to = 0
        for rows in QUICK_ROWS if check.quick else ROWS:
            if check.left() < LEAST_SECONDS:
                check.left_out[f"linear {shape}, {rows} rows"] = "no time left"
                continue
            check.at(f"linear {shape}, {rows} rows")
            times = race_products(check, sets, rows, layers)
            report_products(check, sets, rows, times, copy)
            if "fused" in times and times["fused"]["median_ms"] <= times["decoded"]["median_ms"]:
                fused_up_to = rows
        if fused_up_to:
            row = {"weight": f"{shape[0]}x{shape[1]}", "fused is faster up to rows": fused_up_to}
            check.row("crossover", row)


def peer_layers(check, weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the other packages' products with a weight."""
    layers: dict[str, Callable] = {}
    if (bnb := peers.load("bitsandbytes", check, check.left_out)) is not None:
        layers["bitsandbytes"] = peers.bitsandbytes_linear(bnb, weight, weight.dtype).eval()
    if (torchao := peers.load_torchao(weight, check, check.left_out)) is not None:
        layers["torchao"] = partial(
            torchao.linear_nf4, weight=peers.torchao_weight(torchao, weight)
        )
    return layers


def race_products(check, sets: Sets, rows: int, layers: dict[str, Callable]):
    """Race the products of one number of rows, each checked first."""
    dense = sets.outs[0]
    input = torch.randn(rows, dense.shape[1], dtype=dense.dtype, device=check.device)
    choose = (lambda fused: None) if check.device == "cpu" else native.fuse_linear

    def ours(fused: int | None, number: int) -> torch.Tensor:
        choose(fused)
        return ops.linear(input, sets.records[number], sets.spec)

    contestants: dict[str, Call] = {}
    names = {None: "ours", ALWAYS: "fused", 0: "decoded"}
    for fused in check.choices("fuse_linear", (ALWAYS, 0)):
        contestants[names[fused]] = partial(ours, fused)
    contestants["torch"] = lambda number: F.linear(input, sets.outs[number])
    for name, layer in layers.items():
        contestants[name] = lambda number, layer=layer: layer(input)
    picked = torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS)).long().to(check.device)
    exact = input[picked].double() @ dense.T.double()
    with torch.no_grad():
        for name, run in contestants.items():
            result = run(0)[picked]
            if name in names.values():
                bench_linear.check_bound(result, input[picked].double(), dense.T.double())
            else:
                peers.check_close(result, exact, PEER_DISTANCE)
        try:
            return race(check, contestants, len(sets.records))
        finally:
            choose(None)


def report_products(check, sets: Sets, rows: int, times, copy: float) -> None:
    """Add the rows of one race."""
    out_features, in_features = sets.outs[0].shape
    mine = times["ours"]["median_ms"]
    for name, timing in times.items():
        row = {"rows": rows, "contestant": name, **cells(timing)}
        if name not in ("bitsandbytes", "torchao"):
            weight = sets.outs[0] if name == "torch" else sets.records[0]
            values = rows * (in_features + out_features)
            row["bytes"] = weight.nbytes + sets.outs[0].itemsize * values
            row["flops"] = 2 * rows * sets.outs[0].numel()
            goal = ONE_ROW_GOAL if check.judges and (rows, name) == (1, "ours") else None
            row |= share(row["bytes"] / timing["median_ms"] / 1e6, copy, goal)
        if name != "ours":
            row["theirs / ours"] = timing["median_ms"] / mine
        check.row(f"linear {out_features}x{in_features}, bfloat16", row)
