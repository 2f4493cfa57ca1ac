"""Train one small Llama with LoRA under FSDP2, over the bases of this package and of others.

Each base on each number of ranks, for shapes that divide and shapes that do not, runs in processes
of its own (gloo, one thread a rank): it trains, which must give the loss of the same program
unsharded with the decoded weights dense; it is saved, and loaded into a model of other weights,
which must then hold the same bytes. Activations and adapters are float32, since many processors
emulate bfloat16; the dense base is held and gathered in bfloat16, and cast where it is used.

Base bytes are those of the storages under the frozen weights of a rank, with the scales and tables
that a package replicates. Gathered bytes are what one rank's all-gathers receive in one step, of
adapters and embeddings too. A step takes its time on the clock, which other processes and ranks
lengthen where there are fewer cores, and CPU time of the rank. What fails is told in the words of
its exception.
"""

import argparse
import importlib
import statistics
import tempfile
from collections.abc import Sequence

import harness
import peers
import sharding_models as models
import sharding_ranks as ranks
import torch

WORLDS = [1, 2, 3, 4]
MEMORY_GOAL = 1.02  # of the records, cut into rows, with padding
LOSS_GOAL = 1e-5  # relative; float32 sums in another order
OURS = "nf4tensor"
Row = harness.Row


class Notes:
    """Marks in a table, and the texts that they stand for."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Return the mark of a text, the same for the same text."""
        marks = {known: mark for mark, known in self.texts.items()}
        mark = marks.get(text, f"[{len(marks) + 1}]")
        self.texts[mark] = text
        return mark


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of ranks")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a run may take")
    options = harness.parse(parser, argv)
    if any(ranks.GLOBAL_BATCH % num_ranks for num_ranks in options.worlds):
        parser.error(f"--worlds: each number must divide {ranks.GLOBAL_BATCH}, the batch")
    skipped: dict[str, str] = {}
    with peers.quiet():  # here, so that the ranks, which are forked, have all of it
        for package in ("transformers", "peft"):
            import_or_exit(package)
        contestants = models.contestants(options, skipped)
    notes, rows = Notes(), []
    shapes = {
        f"{name}, {sizes.hidden} x {sizes.intermediate}": sizes
        for name, sizes in (models.QUICK_SHAPES if options.quick else models.SHAPES).items()
    }
    for shape, sizes in shapes.items():
        for row in run(contestants, sizes, options, notes):
            rows.append({"shape": shape, **row})
    most = max(options.worlds)
    title = (
        "LoRA under FSDP2 (ok: loss right and checkpoint comes back; trains: loss right), then "
        f"MB and ms of a rank of {most}"
    )
    tables = {
        title: summary(rows, most),
        "each run": rows,
        f"goals: base bytes of a rank of {most}": memory_goals(rows, shapes, most),
        "goals: loss against the unsharded dense model, on any number of ranks": loss_goals(
            rows, shapes
        ),
    }
    harness.report(
        "sharding", tables, options.results, roofs={}, skipped=skipped, notes=notes.texts
    )


def import_or_exit(package: str) -> None:
    """Import a package that the model needs."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise SystemExit(f'{error}: pip install "nf4tensor[hf]"') from None


def run(
    contestants: dict[str, models.Contestant],
    sizes: models.Sizes,
    options: argparse.Namespace,
    notes: Notes,
) -> list[Row]:
    """Run all contestants on every number of ranks; return a row of each run."""
    harness.say(f"the unsharded model, {sizes.hidden} x {sizes.intermediate}")
    case = (sizes, options.rounds)
    expected = {
        name: ranks.run(ranks.reference, 1, options.limit, contestant, *case)
        for name, contestant in contestants.items()
    }
    rows = []
    for num_ranks in options.worlds:
        harness.say(f"{num_ranks} ranks")
        for name, contestant in contestants.items():  # in turn: so does the machine's mood change
            with tempfile.TemporaryDirectory() as folder:
                outcome = ranks.run(
                    ranks.measure, num_ranks, options.limit, contestant, *case, folder
                )
            found = describe(outcome, expected[name], notes)
            rows.append({"ranks": num_ranks, "base": name, **found})
    return rows


def describe(outcome: ranks.Outcome, expected: ranks.Outcome, notes: Notes) -> Row:
    """Return what a row says of a run, as far as it got on every rank."""
    row: Row = {}
    failure = outcome.failure
    if (losses := outcome.all("losses")) is not None:
        for column, key in (("step ms", "seconds"), ("CPU ms", "cpu_seconds")):
            row[column] = max(map(statistics.median, outcome.all(key))) * 1e3
        row |= {"gathered bytes": max(outcome.all("gathered_bytes"))}
        if (dense := expected.all("losses")) is None:
            failure = f"unsharded and dense: {expected.failure}"
        else:
            row |= {"loss off": abs(losses[0][-1] / dense[0][-1] - 1)}
    if (held := outcome.all("base_bytes")) is not None:
        row |= {"base bytes": max(held)}
    if any(differing := outcome.all("differing") or []):
        failure = tell_differing(differing)
    return row | ({"failure": notes.mark(failure)} if failure else {})


def tell_differing(differing: list[dict[str, list[str]]]) -> str:
    """Say what did not come back from a checkpoint, on any rank."""
    layers = {layer for rank in differing for layer in rank}
    parts = dict.fromkeys(part for rank in differing for names in rank.values() for part in names)
    return f"load: no error, but {', '.join(parts)} of {len(layers)} layers are not those saved"


def verdict_of(row: Row) -> str:
    """Return a run's cell in the summary."""
    if "loss off" not in row:
        return f"fails {row['failure']}"
    if not row["loss off"] <= LOSS_GOAL:  # NaN neither
        return f"loss off {row['loss off']:.0e}"
    return f"trains {row['failure']}" if "failure" in row else "ok"


def summary(rows: list[Row], most: int) -> list[Row]:
    """Return a row for each shape and base, the numbers of ranks side by side."""
    found: dict[tuple, Row] = {}
    for row in rows:
        labels = {"shape": row["shape"], "base": row["base"]}
        line = found.setdefault(tuple(labels.values()), labels)
        line["1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"] = verdict_of(row)
        if row["ranks"] == most and "base bytes" in row:
            line["base MB"] = row["base bytes"] / 1e6
            line["gathered MB"] = row["gathered bytes"] / 1e6
            line |= {column: round(row[column]) for column in ("step ms", "CPU ms")}
    return list(found.values())


def memory_goals(rows: list[Row], shapes: dict[str, models.Sizes], most: int) -> list[Row]:
    """Compare our bytes with those of the rows by formula; those of others beside."""
    found = []
    for shape, sizes in shapes.items():
        runs = [row for row in rows if row["shape"] == shape and row["ranks"] == most]
        held = {row["base"]: row.get("base bytes") for row in runs}
        formula = sizes.packed_bytes(most)
        judged = compare(formula, held[OURS], 1 / MEMORY_GOAL)
        found.append({"shape": shape, "formula": formula, OURS: held.pop(OURS)} | judged | held)
    return found


def loss_goals(rows: list[Row], shapes: dict[str, models.Sizes]) -> list[Row]:
    """Compare our losses with those of the same program unsharded, its weights dense."""
    found = []
    for shape in shapes:
        off = [row.get("loss off") for row in rows if (row["base"], row["shape"]) == (OURS, shape)]
        worst = None if None in off else max(*off, torch.finfo(torch.float32).eps)
        row = {"shape": shape, "allowed": LOSS_GOAL, "worst": worst}
        found.append(row | compare(LOSS_GOAL, worst, 1.0))
    return found


def compare(allowed: float, ours: float | None, least: float) -> Row:
    """Return the verdict's columns; a run that failed has met nothing."""
    if ours is None:
        return {"met": "no", "limit": "it failed"}
    judged = harness.verdict(allowed, ours, least)
    return {"allowed / ours" if name == "theirs / ours" else name: v for name, v in judged.items()}


if __name__ == "__main__":
    main()
