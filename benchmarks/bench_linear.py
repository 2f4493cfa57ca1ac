"""Multiply with a 4-bit weight, forward and backward, beside torch and the other packages.

`F.linear` and the gradient of its input, for 1 to 512 rows of input. torch has the decoded weight
in the input's dtype. "ours, raw op" is the op below autograd. First results are checked before all
others: ours against float64, within what its accumulation may round; the others by distance.

A contestant too slow for its turns is reported from fewer rows, as a lower bound: some processors
emulate bfloat16, and torch's backward then takes a minute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import harness
import peers
import roofs
import torch
import torch.nn.functional as F

from nf4tensor import NF4Tensor, to_nf4
from nf4tensor.kernels import ops

SHAPES = ((14336, 4096), (4096, 14336))
QUICK_SHAPES = ((128, 512),)
ROWS = (1, 4, 16, 128, 512)
QUICK_ROWS = (1, 4)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# By rows and in_features: what torch's time over ours should be at least, with bfloat16.
FORWARD_GOALS = {(1, 4096): 4.0, (1, 14336): 3.0, 4: 3.0, 16: 1.2, 128: 0.92, 512: 0.92}
BACKWARD_GOALS = {128: 0.92, 512: 0.92}
BITSANDBYTES_GOAL = {1: 1.0}  # forward
CHECKED_ROWS = 4
LONGEST_SECONDS = 20.0  # of one call; a contestant that would take longer is not called
PEER_DISTANCE = 0.02  # of a result from that of the peer's own decoded weight
FLOAT32_ROUNDOFF = 2.0**-24
CACHED_BYTES = 1 << 20  # of a record: it stays in the second or third cache of a core


@dataclass
class Case:
    """One product to race: a weight in every form, an input, an output's gradient."""

    weight: NF4Tensor
    dense: torch.Tensor
    input: torch.Tensor
    gradient: torch.Tensor
    direction: str
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    decoded: dict[str, torch.Tensor]

    @property
    def rows(self) -> int:
        """Rows of the input."""
        return self.input.shape[0]

    @property
    def flops(self) -> int:
        """Multiplies and adds."""
        return 2 * self.rows * self.dense.numel()

    @property
    def bytes(self) -> int:
        """Record read once, input read, output written."""
        return self.bytes_with("ours")

    def bytes_with(self, name: str) -> int:
        """Bytes of the same with our weight or the dense one of torch."""
        weight = self.weight if name == "ours" else self.dense
        return weight.nbytes + self.input.nbytes + self.gradient.nbytes

    def check(self, name: str, result: torch.Tensor) -> None:
        """Compare a result with the product of the weight that its contestant decodes to."""
        picked = torch.linspace(0, self.rows - 1, min(self.rows, CHECKED_ROWS)).long()
        left = (self.input if self.direction == "forward" else self.gradient)[picked]
        weight = self.decoded.get(name, self.dense)
        right = weight.T if self.direction == "forward" else weight
        if name.startswith("ours"):
            check_bound(result[picked], left.double(), right.double())
        else:
            peers.check_close(result[picked], left.float() @ right.float(), PEER_DISTANCE)


def check_bound(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare with the exact product: n float32 products and sums, in any order, one rounding.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 3.5.
    """
    gamma = left.shape[1] * FLOAT32_ROUNDOFF / (1 - left.shape[1] * FLOAT32_ROUNDOFF)
    roundoff = torch.finfo(result.dtype).eps / 2
    bound = (gamma + roundoff * (1 + gamma)) * (left.abs() @ right.abs())
    wrong = ((result.double() - left @ right).abs() > bound).sum().item()
    assert not wrong, f"{wrong} of {result.numel()} results are off"


@dataclass
class Pace:
    """What a call took, by contestant, to tell what one with more rows would take."""

    seen: dict[tuple, tuple[int, float]] = field(default_factory=dict)

    def is_too_slow(self, key: tuple, rows: int) -> bool:
        """Say whether a call would take too long, by its time at fewer rows."""
        fewer, milliseconds = self.seen.get(key, (rows, 0.0))
        return milliseconds / 1e3 * rows / fewer > LONGEST_SECONDS


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", type=harness.shape, nargs="+", help="out_features x in_features")
    parser.add_argument("--rows", type=int, nargs="+", help="of the input")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    options = harness.parse(parser, argv)
    shapes = options.shape or (QUICK_SHAPES if options.quick else SHAPES)
    rows = sorted(options.rows or (QUICK_ROWS if options.quick else ROWS))
    skipped = {"roofs": reason} if (reason := roofs.unavailable_because()) else {}
    tables: dict[str, list[harness.Row]] = {}
    found = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        found[threads] = roofs.measure(threads, options)
    torch.manual_seed(0)
    for shape in shapes:
        weight = torch.randn(shape, dtype=torch.bfloat16)
        for name in options.dtype:
            make = prepare(weight, DTYPES[name], options, skipped)
            for direction in ("forward", "backward"):
                pace = Pace()
                lines = tables.setdefault(f"{direction}, {shape[0]}x{shape[1]}, {name}", [])
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    for num_rows in rows:
                        harness.say(
                            f"{direction}, {shape}, {name}, {threads} threads, {num_rows} rows"
                        )
                        case = make(num_rows, direction)
                        lines += measure(case, threads, pace, options, found[threads])
    harness.report("linear", tables, options.results, roofs=roofs.present(found), skipped=skipped)


def prepare(weight, dtype: torch.dtype, options, skipped) -> Callable[[int, str], Case]:
    """Quantize a weight in every format; return what makes a case of it."""
    ours = to_nf4(weight)
    dense = ours.dequantize(dtype)
    layers: dict[str, dict[str, Callable]] = {"forward": {}, "backward": {}}
    decoded = {}
    if (bnb := peers.load("bitsandbytes", options, skipped)) is not None:
        for direction, is_training in (("forward", False), ("backward", True)):
            layer = peers.bitsandbytes_linear(bnb, weight, dtype).train(is_training)
            decoded["bitsandbytes"] = bnb.functional.dequantize_4bit(
                layer.weight, layer.weight.quant_state
            )
            layers[direction]["bitsandbytes"] = layer
    if (torchao := peers.load_torchao(weight, options, skipped)) is not None:
        theirs = peers.torchao_weight(torchao, weight.to(dtype))
        decoded["torchao"] = theirs.get_original_weight()
        for direction in layers:
            layers[direction]["torchao"] = partial(torchao.linear_nf4, weight=theirs)

    def make(num_rows: int, direction: str) -> Case:
        input = torch.randn(num_rows, weight.shape[1], dtype=dtype)
        gradient = torch.randn(num_rows, weight.shape[0], dtype=dtype)
        return Case(ours, dense, input, gradient, direction, layers[direction], decoded)

    return make


def measure(case: Case, threads: int, pace: Pace, options, roof) -> list[harness.Row]:
    """Race the contestants of one case that are not too slow; say of the others what is known."""
    contestants, slow = {}, {}
    functions = {
        "ours": partial(F.linear, weight=case.weight),
        "torch": partial(F.linear, weight=case.dense),
        **case.layers,
    }
    for name, function in functions.items():
        if pace.is_too_slow((name, threads), case.rows):
            slow[name] = pace.seen[name, threads]
        else:
            contestants[name] = call(case, function)
    if "ours" in contestants:
        contestants["ours, raw op"] = raw_op(case)
    times = harness.race(contestants, options.rounds, options.seconds, check=case.check)
    pace.seen |= {(name, threads): (case.rows, times[name]["median_ms"]) for name in times}
    limit = limit_of(case, times["ours"]["median_ms"], options, roof) if "ours" in times else ""
    return summarize(case, times, slow, threads, limit)


def call(case: Case, function: Callable) -> Callable[[], torch.Tensor]:
    """Return a forward call that records no graph, or a backward call over a graph made here."""
    if case.direction == "forward":

        @torch.no_grad()
        def forward() -> torch.Tensor:
            return function(case.input)

        return forward
    input = case.input.clone().requires_grad_()
    output = function(input)

    def backward() -> torch.Tensor:
        return torch.autograd.grad(output, input, case.gradient, retain_graph=True)[0]

    return backward


def raw_op(case: Case) -> Callable[[], torch.Tensor]:
    """Return the op below autograd."""
    record, spec = case.weight.record, case.weight.spec
    if case.direction == "forward":
        return lambda: ops.linear(case.input, record, spec)
    return lambda: ops.matmul(case.gradient, record, spec)


def limit_of(case: Case, mine: float, options, roof) -> str:
    """Say how near ours comes to the machine's roofs, and what it takes without the memory."""
    if not any(goals_of(case).values()) or "fma GFLOP/s" not in roof:
        return ""
    part = first_rows(case, max(1, CACHED_BYTES // case.weight.spec.pitch))
    from_cache = harness.race({"": raw_op(part)}, 5 * options.rounds)[""]["median_ms"]
    from_cache *= case.weight.shape[0] / part.weight.shape[0]
    limit = roofs.share(case.bytes / mine / 1e6, roof, "read GB/s")
    limit += f", {case.flops / mine / 1e6 / roof['fma GFLOP/s']:.0%} of fma"
    return f"{limit}; from cache the op takes {from_cache:.1f} ms"


def first_rows(case: Case, num_rows: int) -> Case:
    """Return the case of the first rows of the weight, in memory of their own."""
    gradient = case.gradient[:, :num_rows].contiguous()
    weight, dense = case.weight[:num_rows].clone(), case.dense[:num_rows]
    return replace(case, weight=weight, dense=dense, gradient=gradient)


def summarize(case: Case, times, slow, threads: int, limit: str) -> list[harness.Row]:
    """Make table rows; whoever was not called gets the time of fewer rows as a lower bound."""
    mine = times["ours"]["median_ms"] if "ours" in times else None
    goals = goals_of(case)
    rows = []
    for name in ("ours", "ours, raw op", "torch", *case.layers):
        row = {"threads": threads, "rows": case.rows, "contestant": name}
        median = None
        if name in times:
            median = times[name]["median_ms"]
            row |= {**harness.cells(times[name]), "GFLOP/s": case.flops / median / 1e6}
            if name in ("ours", "torch"):
                row |= {"bytes": case.bytes_with(name), "flops": case.flops}
        elif name in slow:
            fewer, median = slow[name]
            row["note"] = f"at least: {fewer} rows took {median:.0f} ms"
        if name != "ours" and mine is not None:
            row |= harness.verdict(median, mine, goals.get(name), limit)
        rows.append(row)
    return rows


def goals_of(case: Case) -> dict[str, float]:
    """Return the goals of a case by contestant."""
    if case.input.dtype != torch.bfloat16:
        return {}
    if case.direction == "backward":
        return {"torch": BACKWARD_GOALS[case.rows]} if case.rows in BACKWARD_GOALS else {}
    goals = {"bitsandbytes": BITSANDBYTES_GOAL.get(case.rows)}
    by_rows = FORWARD_GOALS.get(case.rows)
    goals["torch"] = FORWARD_GOALS.get((case.rows, case.input.shape[1]), by_rows)
    return {name: goal for name, goal in goals.items() if goal is not None}


if __name__ == "__main__":
    main()
