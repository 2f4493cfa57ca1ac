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
    figure, panels = pyplot.subplots(
        1, len(counts), figsize=(7 * len(counts), 6.5), sharey=True, squeeze=False
    )
    for axes, threads in zip(panels[0], counts, strict=True):
        draw_panel(axes, roofs_of(runs, threads), list(points(runs, threads, dtype)))
        axes.set_title(f"{threads} thread" + ("" if threads == "1" else "s"))
        axes.set_xlabel("operations a byte moved (FLOP/byte)")
    panels[0][0].set_ylabel("operations a second (GFLOP/s)")
    some = next(iter(runs.values()))
    figure.suptitle(
        f"nf4tensor, {dtype}: {some['processor']}, {some['isa']}, commit {some['commit']}\n"
        "one operation a weight for quantize and dequantize, two a weight and row for linear"
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.set_layout_engine("constrained")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_panel(axes, roof: dict[str, float], found: list[tuple]) -> None:
    """Draw one panel: roofs as lines, kernels as points, labelled with the rows of the input."""
    left = min((x for *_, x, _ in found), default=0.1) / 2
    right = max((x for *_, x, _ in found), default=1000.0) * 2
    top = max(roof[name] for name in COMPUTE)
    for name, style in BANDWIDTHS.items():
        end = min(right, top / roof[name])
        axes.plot([left, end], [left * roof[name], end * roof[name]], style, color="black", lw=1)
        axes.annotate(
            f"{name.split()[0]} {roof[name]:.0f} GB/s",
            (left, left * roof[name]),
            (4, 12 if name.startswith("read") else -4),
            textcoords="offset points",
            fontsize=8,
        )
    for name, style in COMPUTE.items():
        axes.plot([left, right], [roof[name]] * 2, style, color="tab:green", lw=1)
        label = f"{name.removesuffix(' GFLOP/s')} {roof[name]:.0f} GFLOP/s"
        axes.annotate(
            label, (left, roof[name]), (4, 3), textcoords="offset points", fontsize=8, color="green"
        )
    for kind, marker in MARKERS.items():
        for whose, color in COLORS.items():
            some = [point for point in found if point[:2] == (kind, whose)]
            if not some:
                continue
            *_, xs, ys = zip(*some, strict=True)
            name = f"linear {kind}, {whose}" if kind in ("forward", "backward") else kind
            face = color if whose == "ours" else "none"
            axes.plot(xs, ys, marker, color=color, markerfacecolor=face, label=name)
            for (*_, rows, x, y), below in zip(some, [kind == "backward"] * len(some), strict=True):
                axes.annotate(
                    rows, (x, y), (5, -10 if below else 4), textcoords="offset points", fontsize=8
                )
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    main()
