"""Draw one roofline picture from the JSON files that the benchmarks wrote.

    python benchmarks/roofline.py [--results FOLDER] [--isa avx2] [--plot PICTURE]

One panel for each number of threads: what the machine can do, measured by those runs, as lines, and
what the kernels did as points, operations over bytes to operations over time. Nothing is measured
here.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import harness

BENCHMARKS = ("dequantize", "quantize", "linear")
BANDWIDTHS = {"copy GB/s": "-", "read GB/s": "--"}
COMPUTE = {
    "fma GFLOP/s": "-",
    "float32 matmul GFLOP/s": "--",
    "bfloat16 matmul GFLOP/s": ":",
}
MARKERS = {"dequantize": "s", "quantize": "D", "forward": "o", "backward": "^"}
COLORS = {"ours": "tab:blue", "torch": "tab:orange"}


def main(argv: Sequence[str] | None = None) -> None:
    """Read, draw and say where the picture is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results", type=Path, default=harness.RESULTS, help="folder of the JSON files")
    add("--isa", default=harness.environment()["isa"], help="of whose runs; default: the best here")
    add("--dtype", default="bfloat16", help="of the decoded weights and the inputs")
    add("--plot", type=Path, help="the picture; default: roofline-ISA.png in the same folder")
    options = parser.parse_args(argv)
    runs = read(options.results, options.isa)
    plot = options.plot or options.results / f"roofline-{options.isa}.png"
    draw(runs, options.dtype, plot)
    print(f"written: {plot}")


def read(folder: Path, isa: str) -> dict[str, dict]:
    """Return the runs by benchmark.

    Raises:
        SystemExit: there are none, or they have no roofs.
    """
    paths = {name: folder / f"{name}-{isa}.json" for name in BENCHMARKS}
    runs = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    runs = {name: run for name, run in runs.items() if run.get("roofs")}
    if not runs:
        raise SystemExit(
            f"no results with roofs in {folder} for {isa}: run make bench first; the roofs need a "
            "C++ compiler"
        )
    return runs


def roofs_of(runs: dict[str, dict], threads: str) -> dict[str, float]:
    """Return the highest of what the runs measured: a roof is what was once reached."""
    found: dict[str, float] = {}
    for run in runs.values():
        for name, value in run["roofs"].get(threads, {}).items():
            found[name] = max(value, found.get(name, 0.0))
    return found


def points(runs: dict[str, dict], threads: str, dtype: str) -> Iterator[tuple]:
    """Yield (kind, whose, label, operations a byte, GFLOP/s) of the points to draw.

    Of the linear, those of the first shape: the other's lie close by.
    """
    for name, run in runs.items():
        first: dict[str, str] = {}
        for title, rows in run["tables"].items():
            kind = title.split(",")[0] if name == "linear" else name
            if name == "linear" and (dtype not in title or first.setdefault(kind, title) != title):
                continue
            for row in rows:
                fits = row.get("threads") == int(threads) and row.get("bytes") and row.get("ms")
                if not fits or row.get("to", row.get("from", dtype)) != dtype:
                    continue
                whose = row["contestant"]
                if name == "dequantize":
                    whose = "ours" if whose == f"{run['isa']}, square8 scales" else None
                elif name == "quantize":
                    whose = "ours" if whose == run["isa"] else None
                if whose in COLORS:
                    flops, label = row["flops"], str(row.get("rows", ""))
                    yield kind, whose, label, flops / row["bytes"], flops / row["ms"] / 1e6


def draw(runs: dict[str, dict], dtype: str, path: Path) -> None:
    """Draw the panels into a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit('no matplotlib: pip install "nf4tensor[bench]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({threads for run in runs.values() for threads in run["roofs"]}, key=int)
    size = {"figsize": (7 * len(counts), 6.5), "layout": "constrained"}
    figure, panels = pyplot.subplots(
        1, len(counts), sharex=True, sharey=True, squeeze=False, **size
    )
    kernels = {}
    for axes, threads in zip(panels[0], counts, strict=True):
        kernels |= draw_points(axes, list(points(runs, threads, dtype)))
    left, right = panels[0][0].get_xlim()
    for axes, threads in zip(panels[0], counts, strict=True):
        draw_roofs(axes, roofs_of(runs, threads), left, right)
        axes.set(title=f"threads: {threads}", xlabel="operations a byte moved (FLOP/byte)")
    panels[0][0].set_ylabel("operations a second (GFLOP/s)")
    some = next(iter(runs.values()))
    figure.suptitle(
        f"nf4tensor, {dtype}: {some['processor']}, {some['isa']}, commit {some['commit']}\n"
        "one operation a weight for quantize and dequantize, two a weight and row for linear; "
        "numbers are rows"
    )
    figure.legend(
        kernels.values(), kernels, loc="outside lower center", ncols=len(kernels), frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_points(axes, found: list[tuple]) -> dict[str, object]:
    """Draw kernels as points, labelled with the rows of the input; return them by name."""
    axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    handles = {}
    for kind, marker in MARKERS.items():
        for whose, color in COLORS.items():
            some = [point for point in found if point[:2] == (kind, whose)]
            if not some:
                continue
            *_, xs, ys = zip(*some, strict=True)
            name = f"linear {kind}, {whose}" if kind in ("forward", "backward") else kind
            face = color if whose == "ours" else "none"
            (handles[name],) = axes.plot(
                xs, ys, marker, color=color, markerfacecolor=face, zorder=3
            )
            offset = (6, -11) if kind == "backward" else (-4, 7)
            for *_, rows, x, y in some:
                axes.annotate(
                    rows, (x, y), offset, textcoords="offset points", fontsize=8, color=color
                )
    return handles


def draw_roofs(axes, roof: dict[str, float], left: float, right: float) -> None:
    """Draw what the machine can do: slopes for bandwidths, level lines for operations."""
    top = max(roof[name] for name in COMPUTE)
    for name, style in BANDWIDTHS.items():
        ends = (left, min(right, top / roof[name]))
        label = f"{name.removesuffix(' GB/s')} {roof[name]:.1f} GB/s"
        heights = [end * roof[name] for end in ends]
        axes.plot(ends, heights, style, color="black", lw=1.2, label=label)
    for name, style in COMPUTE.items():
        label = f"{name.removesuffix(' GFLOP/s')} {roof[name]:.1f} GFLOP/s"
        axes.plot([left, right], [roof[name]] * 2, style, color="tab:green", lw=1.2, label=label)
    axes.set_xlim(left, right)
    axes.legend(loc="best", fontsize=8, title="roofs of this run", title_fontsize=8)


if __name__ == "__main__":
    main()
