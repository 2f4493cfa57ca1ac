"""Every operator that torch tests, with 4-bit arguments: what came of each call, as a table.

`python -m tests.tensor.op_table` goes through torch's operator database (`op_db`) and prints it;
`test_op_db.py` asks for the same. Children make the calls, so that a crash is a line of the table
too. How a call is judged is in `op_trials.py`.
"""

import argparse
import collections
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.tensor import op_trials
from tests.tensor.op_trials import FORMS, Trial
from tests.tensor.op_verdicts import LISTED, VERDICTS

SECONDS_PER_OPERATOR = 300
FAULTS = ("wrong", "unclear", "crash")


@dataclass
class Table:
    """How often each verdict came of each form of call, and every fault by name."""

    num_operators: int = 0
    counts: dict[str, collections.Counter] = field(default_factory=dict)
    operators: dict[str, set[str]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, trial: Trial) -> None:
        """Count one call of an operator."""
        self.counts.setdefault(trial.form, collections.Counter())[trial.verdict] += 1
        self.operators.setdefault(trial.verdict, set()).add(name)
        if trial.verdict in FAULTS:
            self.faults.setdefault(f"{trial.verdict}: {name}, {trial.form}", trial.detail)

    @property
    def total(self) -> collections.Counter:
        """Count the verdicts of all forms."""
        return sum(self.counts.values(), collections.Counter())

    def __str__(self) -> str:
        width = max(len(form) for form in (*FORMS, "operators"))
        rows = [("calls", *VERDICTS)]
        counts = {form: self.counts[form] for form in FORMS if form in self.counts}
        counts["all"] = self.total
        rows += [(form, *(str(count[v]) for v in VERDICTS)) for form, count in counts.items()]
        rows += [("operators", *(str(len(self.operators.get(v, ()))) for v in VERDICTS))]
        lines = [f"{self.num_operators} operators, {sum(self.total.values())} calls"]
        lines += [f"{name:{width}}" + "".join(f"{cell:>12}" for cell in row) for name, *row in rows]
        lines += ["", "listed, and why:"]
        lines += [f"  {name}: {reason}" for name, reason in LISTED.items()]
        lines += ["", f"close: {', '.join(sorted(self.operators.get('close', ())))}", ""]
        lines += [f"{fault}: {example}" for fault, example in sorted(self.faults.items())]
        lines += [] if self.faults else ["no wrong value, no unclear error, no crash"]
        return "\n".join(lines)


def run(options: op_trials.Options, operators: Sequence[Any] = op_db) -> Table:
    """Try every operator in children, which may crash."""
    table, next_one = Table(len(operators)), 0
    context = multiprocessing.get_context("fork")
    while next_one < len(operators):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_try_all, args=(operators, next_one, options, sender))
        child.start()
        sender.close()
        for index, trials in _received(receiver):
            for trial in trials:
                table.add(operators[index].formatted_name, trial)
            next_one = index + 1
        child.kill()
        child.join()
        if next_one < len(operators):
            crash = Trial("function", "crash", f"exit code {child.exitcode}")
            table.add(operators[next_one].formatted_name, crash)
            next_one += 1
    return table


def _received(receiver: Any) -> Iterator[tuple[int, list[Trial]]]:
    """Yield what a child sends, until it ends, crashes or hangs."""
    while receiver.poll(SECONDS_PER_OPERATOR):
        try:
            yield receiver.recv()
        except EOFError:
            return


def _try_all(operators: list[Any], first: int, options: op_trials.Options, sender: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    for index in range(first, len(operators)):
        sender.send((index, list(op_trials.trials(operators[index], options))))


def main() -> None:
    """Print the table of a run with the given options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of operators in op_db; all by default")
    parser.add_argument("--quick", action="store_true", help="what `make test` runs")
    arguments = parser.parse_args()
    start = time.monotonic()
    operators = [op for op in op_db if not arguments.names or op.name in arguments.names]
    print(run(op_trials.QUICK if arguments.quick else op_trials.ALL, operators))
    print(f"torch {torch.__version__}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
