"""How `gpu_check.py` times: the same contestants and turns as elsewhere, by the GPU's own clock.

On a GPU a contestant is a CUDA graph of many calls over several sets of tensors, so many that none
finds its data in the cache; its time is that of events around a replay. On a CPU it is the calls.
Bytes come from formulas; rates are compared with that of `copy_`, which reads and writes an output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import harness
import torch

from nf4tensor import NF4Spec
from nf4tensor.kernels import ops

ROUNDS, SECONDS = 30, 0.3  # of a race: turns at most, and seconds of a contestant
CACHES, MAX_SETS = 8, 16  # the sets of a race are so many caches together, and at most so many
PASSES = 2  # over all sets, in one graph
# Written before each turn: it empties the cache, and keeps the GPU busy while the turn is queued.
FLUSH_BYTES = 512 << 20
Call = Callable[[int], object]  # with the number of a set of tensors


def num_sets(check, num_bytes: int) -> int:
    """Return how many sets of tensors, of so many bytes a call, are more than the cache holds."""
    if check.device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(MAX_SETS, max(2, -(-CACHES * cache // num_bytes)))


def race(
    check, contestants: dict[str, Call], sets: int = 1, is_captured: bool = True
) -> dict[str, harness.Timing]:
    """Let contestants take turns; return the time of one call of each.

    Args:
        check: of the section.
        contestants: what to call with the number of a set, by name.
        sets: of tensors.
        is_captured: calls are those of a CUDA graph, where CUDA can make one of them.
    """
    calls = PASSES * sets
    units = {name: partial(call_all, run, sets) for name, run in contestants.items()}
    if check.device == "cpu":
        times = harness.race(units, **harness.QUICK)
    else:
        if is_captured:
            units = {name: captured(check, name, unit) for name, unit in units.items()}
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=check.device)
        times = harness.race(units, ROUNDS, SECONDS, clock=partial(seconds_of, flush))
    return {
        name: {key: value / calls if key != "rounds" else value for key, value in timing.items()}
        for name, timing in times.items()
    }


def call_all(run: Call, sets: int) -> None:
    """Call with every set, some times over, keeping no result."""
    for _ in range(PASSES):
        for number in range(sets):
            run(number)


def captured(check, name: str, unit: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of calls as a CUDA graph; the calls themselves where they refuse that."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        # A capture that fails leaves its own stream the current one.
        with torch.cuda.stream(stream):
            unit()  # libraries make their handles and workspaces in their first calls
            with torch.cuda.graph(graph, stream=stream):
                unit()
    except RuntimeError as error:
        torch.cuda.synchronize()
        check.left_out[f"CUDA graph of {name}"] = f"timed call by call: {str(error)[:200]}"
        return unit
    return graph.replay


def seconds_of(flush: torch.Tensor, run: Callable, check: Callable | None = None) -> float:
    """Return the seconds that the GPU takes for a call, with an empty cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    result = run()
    end.record()
    end.synchronize()
    if check is not None:
        check(result)
    return start.elapsed_time(end) / 1e3


def cells(timing: harness.Timing) -> harness.Row:
    """Return the columns of a timing, in microseconds."""
    names = {"us": "median_ms", "q1": "q1_ms", "q3": "q3_ms"}
    return {name: timing[key] * 1e3 for name, key in names.items()}


def share(rate: float, copy: float, goal: float | None) -> harness.Row:
    """Return the columns that compare a rate in GB/s with that of the copy."""
    row: harness.Row = {"GB/s": rate, "of copy": rate / copy}
    if goal is not None:
        row |= {"goal": f">= {goal:.2f}", "met": "yes" if rate / copy >= goal else "no"}
    return row


@dataclass
class Sets:
    """Copies of a record, and outputs to decode them into."""

    spec: NF4Spec
    records: list[torch.Tensor]
    outs: list[torch.Tensor]

    @classmethod
    def of(cls, check, weight: torch.Tensor, scale_block_size: int | None, dtype) -> "Sets":
        """Quantize a weight, with square8 or float32 scales; so many that records fill caches."""
        spec = NF4Spec.for_weight(weight.shape[1], 64, scale_block_size)
        record = ops.quantize(weight, spec)
        out = ops.dequantize(record, spec, dtype)
        numbers = range(num_sets(check, record.nbytes))
        return cls(spec, [record.clone() for _ in numbers], [out.clone() for _ in numbers])

    @property
    def bytes(self) -> int:
        """Bytes of a call: the record read, the output written."""
        return self.records[0].nbytes + self.outs[0].nbytes

    def decode(self, number: int) -> torch.Tensor:
        """Decode one record into its output."""
        return ops.dequantize_into(self.records[number], self.spec, self.outs[number])

    def rate_of_copy(self, times: dict[str, harness.Timing]) -> float:
        """Return the GB/s of `copy_`: an output read and one written."""
        return 2 * self.outs[0].nbytes / times["copy_"]["median_ms"] / 1e6

    def copies(self) -> Call:
        """Return the call that copies an output."""
        sources = [out.clone() for out in self.outs]
        return lambda number: self.outs[number].copy_(sources[number])
