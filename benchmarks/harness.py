"""What every benchmark here shares: contestants take turns in one process, medians are compared.

A contestant is a function without arguments. Results are checked by the caller before anything is
timed. Bytes come from formulas, never from counters. Run the scripts beside this file, or
`make bench`.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
WARM_UPS = 2


def options(description: str) -> argparse.Namespace:
    """Parse the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser.parse_args()


def race(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Let contestants take turns.

    Returns:
        For each its median and quartiles in milliseconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(WARM_UPS + rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn >= WARM_UPS:
                seconds[name].append(time.perf_counter() - start)
    return {name: _summary(values) for name, values in seconds.items()}


def _summary(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median_ms": median * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3}


def environment() -> dict[str, object]:
    """Say what was measured: the command, the commit, the machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def report(title: str, rows: list[dict[str, object]], path: Path | None) -> None:
    """Print rows as a table and, where a path is given, write them as JSON."""
    columns = list(rows[0])
    cells = [[_text(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    found = environment()
    print(f"{title}: {found['processor']}, torch {found['torch']}, commit {found['commit']}")
    for line in (columns, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"title": title, **found, "rows": rows}, indent=1) + "\n")


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
