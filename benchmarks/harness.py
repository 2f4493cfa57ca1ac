"""What every benchmark here shares: contestants take turns in one process, medians are compared.

A contestant is a function without arguments. Results are checked by the caller before anything is
timed. Bytes and operations come from formulas, never from counters. Run the scripts beside this
file, or `make bench`. `roofs.py` measures the machine, `peers.py` has other packages' kernels.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from nf4tensor.errors import NF4TensorError
from nf4tensor.kernels import native

RESULTS = Path(__file__).parent / "results"
WARM_UPS = 2
SLOW_SECONDS = 3.0
INSTRUCTION_SETS = ("avx512", "avx2", "scalar")  # the best first
QUICK = {"rounds": 2, "seconds": 0.2}
HIDDEN = {"flops", "bytes"}  # of the JSON only

Result = TypeVar("Result")
Timing = dict[str, float]
Row = dict[str, object]


def parser(description: str) -> argparse.ArgumentParser:
    """Return the options that all benchmarks have."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--rounds", type=int, default=15, help="most turns of each contestant")
    add("--seconds", type=float, default=3.0, help="a slow contestant gets fewer turns than this")
    add("--threads", type=int, nargs="+", default=[1, 2])
    add("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    add("--no-peers", action="store_true", help="leave out bitsandbytes and torchao")
    add("--quick", action="store_true", help="small shapes, few rounds: only to see that it runs")
    return found


def parse(found: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; --quick changes the defaults of what is not given."""
    if found.parse_args(argv).quick:
        found.set_defaults(**QUICK)
    return found.parse_args(argv)


def shape(text: str) -> tuple[int, int]:
    """Read a weight's shape from "4096x14336", its rows first."""
    rows, columns = text.split("x")
    return int(rows), int(columns)


def instruction_sets() -> list[str]:
    """Return the instruction sets that this build and processor have, the best first.

    Raises:
        SystemExit: nothing was compiled.
    """
    if native.unavailable_because() is not None:
        raise SystemExit(f"no compiled kernels to measure: {native.unavailable_because()}")
    before, usable = native.isa(), []
    for name in INSTRUCTION_SETS:
        try:
            native.use_isa(name)
        except NF4TensorError:
            continue
        usable.append(name)
    native.use_isa(before)
    return usable[usable.index(before) :] if before in usable else [before, *usable]


def race(
    contestants: dict[str, Callable[[], Result]],
    rounds: int,
    seconds: float = float("inf"),
    check: Callable[[str, Result], None] | None = None,
    *,
    slow: float = SLOW_SECONDS,
    clock: Callable[..., float] | None = None,
) -> dict[str, Timing]:
    """Let contestants take turns, every other round in the reverse order.

    Args:
        contestants: what to call, by name.
        rounds: most turns of each.
        seconds: a contestant whose first call says that it would need more than this gets fewer
            turns, at least three.
        check: called with the name and the result of each first call, before all other calls.
        slow: one that takes more than this many seconds a call is called once.
        clock: makes a call, gives its result to a function if there is one, and returns the
            seconds that the call took; None for the time that passes here.

    Returns:
        For each its median and quartiles in milliseconds, and the turns that they are of.
    """
    clock = clock or _seconds
    first = {
        name: clock(run, partial(check, name) if check else None)
        for name, run in contestants.items()
    }
    turns = {
        name: 1 if once > slow else int(min(rounds, max(3, seconds / once)))
        for name, once in first.items()
    }
    taken: dict[str, list[float]] = {
        name: [once] if once > slow else [] for name, once in first.items()
    }
    for turn in range(1, WARM_UPS + rounds):
        names = list(contestants)
        for name in reversed(names) if turn % 2 else names:
            if len(taken[name]) == turns[name]:
                continue
            # A slow one is warm after its first call.
            is_warm_up = turn < WARM_UPS and first[name] * rounds < seconds
            once = clock(contestants[name])
            if not is_warm_up:
                taken[name].append(once)
    return {name: summary(values) for name, values in taken.items()}


def _seconds(run: Callable[[], Result], check: Callable[[Result], None] | None = None) -> float:
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    if check is not None:
        check(result)
    return seconds


def summary(seconds: list[float]) -> Timing:
    """Return median and quartiles of some times, in milliseconds."""
    low, median, high = seconds * 3 if len(seconds) == 1 else statistics.quantiles(seconds, n=4)
    return {
        "median_ms": median * 1e3,
        "q1_ms": low * 1e3,
        "q3_ms": high * 1e3,
        "rounds": len(seconds),
    }


def cells(timing: Timing) -> Row:
    """Return the columns that show one timing."""
    return {
        "ms": timing["median_ms"],
        "q1": timing["q1_ms"],
        "q3": timing["q3_ms"],
        "rounds": timing["rounds"],
    }


def verdict(theirs: float, ours: float, least: float | None, limit: str = "") -> Row:
    """Return the columns that compare two times, or two of anything of which less is better.

    Args:
        theirs: of the other contestant.
        ours: of this package.
        least: the goal, what their share of ours should be at least; None for no goal.
        limit: shown where the goal is not met: what bounds ours, as far as measured.
    """
    ratio = theirs / ours
    if least is None:
        return {"theirs / ours": ratio}
    row: Row = {"theirs / ours": ratio, "goal": f">= {least:.3g}"}
    return row | ({"met": "yes"} if ratio >= least else {"met": "no", "limit": limit})


def say(text: str) -> None:
    """Tell on standard error what is being measured: some of it takes minutes."""
    print(f"measuring {text} ...", file=sys.stderr, flush=True)


def environment() -> dict[str, object]:
    """Say what was measured: the command, the commit, the machine."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit() or "unknown",
        "torch": torch.__version__,
        "processor": _processor(),
        "isa": native.isa() if native.unavailable_because() is None else "reference",
    }


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:  # no git
        return ""
    return found.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def report(
    name: str,
    tables: dict[str, list[Row]],
    folder: Path,
    *,
    roofs: dict[int, dict[str, float]],
    skipped: dict[str, str],
    notes: dict[str, str] | None = None,
) -> Path:
    """Print tables, what was left out, and write all of it as JSON.

    Args:
        name: of the benchmark and, with the instruction set, of the file.
        tables: rows by title; a row need not have every column.
        folder: where the file goes.
        roofs: what `roofs.measure` found, by number of threads.
        skipped: who could not take part, and why.
        notes: what marks in the tables stand for.
    """
    found = environment()
    print(f"{name}: {found['processor']}, torch {found['torch']}, commit {found['commit']}")
    for threads, roof in roofs.items():
        print(f"roofs, {threads} threads: " + ", ".join(f"{k} {v:.1f}" for k, v in roof.items()))
    for title, rows in tables.items():
        print(f"\n{title}")
        for line in table(rows):
            print(line)
    for mark, text in (notes or {}).items():
        print(f"{mark} {text}")
    for who, why in skipped.items():
        print(f"skipped: {who}: {why}")
    print(flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{found['isa']}.json"
    content = {"name": name, **found, "roofs": roofs, "skipped": skipped, "tables": tables}
    if notes is not None:
        content["notes"] = notes
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def table(rows: list[Row]) -> list[str]:
    """Return rows as lines of text, under a line of column names."""
    columns = [name for name in dict.fromkeys(k for row in rows for k in row) if name not in HIDDEN]
    lines = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.005 else f"{value:.2f}"
