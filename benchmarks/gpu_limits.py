"""Sections of `gpu_check.py` on what must change no bit: CUDA graphs, and sizes past 32 bits."""

from collections.abc import Callable

import torch
from gpu_exactness import Tally, difference

from nf4tensor import NF4Spec
from nf4tensor.format.spec import ceil_div
from nf4tensor.kernels import ops

GRAPH_SHAPE = (1024, 4096)
GRAPH_ROWS = (1, 16, 256)  # of input
HUGE = ((1 << 19) + (1 << 16) + 3, 4096)  # past 2^31 elements, and 2^32 bytes of output
HUGE_BYTES = 16e9  # what it takes


def graph(check) -> str | None:
    """Capture every op in a CUDA graph and replay it over other inputs: as without a graph."""
    if check.device == "cpu":
        return "only CUDA has graphs"
    tally = Tally(check)
    spec = NF4Spec.for_weight(GRAPH_SHAPE[1])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=check.device)

    record = ops.quantize(normal(*GRAPH_SHAPE), spec)
    other = ops.quantize(normal(*GRAPH_SHAPE), spec)
    out, written = normal(*GRAPH_SHAPE), record.clone()
    weights, records = (normal(*GRAPH_SHAPE), normal(*GRAPH_SHAPE)), (record.clone(), other)

    def write(weight: torch.Tensor) -> torch.Tensor:
        ops.quantize_into(weight, spec, written)
        return written

    replays(tally, "quantize", lambda weight: ops.quantize(weight, spec), *weights)
    replays(tally, "quantize_into", write, *weights)
    replays(tally, "dequantize", lambda r: ops.dequantize(r, spec, torch.float16), *records)
    replays(tally, "dequantize_into", lambda r: ops.dequantize_into(r, spec, out), *records)
    for rows in GRAPH_ROWS:
        check.at(f"graph of products of {rows} rows")
        inputs = [normal(rows, GRAPH_SHAPE[1]) for _ in range(2)]
        replays(tally, f"linear {rows}", lambda input: ops.linear(input, record, spec), *inputs)
        inputs = [normal(rows, GRAPH_SHAPE[0]) for _ in range(2)]
        replays(tally, f"matmul {rows}", lambda input: ops.matmul(input, record, spec), *inputs)
    tally.close()
    return None


def replays(
    tally: Tally, what: str, run: Callable, first: torch.Tensor, second: torch.Tensor
) -> None:
    """Capture a call with one input, replay it with another, and compare with a plain call."""
    expected = run(second).clone()
    input = first.clone()
    run(input)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(input)
    input.copy_(second)
    output.zero_()
    graph.replay()
    tally.expect(f"graph of {what}", "another input", difference(output, expected))


def huge(check) -> str | None:
    """Quantize, decode and multiply more than 2^31 elements: each part as by itself."""
    num_rows, width = (67, 64) if check.quick else HUGE
    if check.device == "cuda" and torch.cuda.mem_get_info()[0] < HUGE_BYTES:
        return f"less than {HUGE_BYTES / 1e9:.0f} GB are free"
    tally = Tally(check)
    spec = NF4Spec.for_weight(width)
    check.at(f"{num_rows}x{width}")
    weight = torch.empty(num_rows, width, dtype=torch.bfloat16, device=check.device).normal_()
    record = ops.quantize(weight, spec)
    decoded = ops.dequantize(record, spec, weight.dtype)
    input = torch.zeros(2, width, dtype=weight.dtype, device=check.device)
    input[0, 1] = input[1, width - 1] = 1
    product = ops.linear(input, record, spec)
    tally.expect("linear, huge", "", difference(product[0], decoded[:, 1] + 0.0))
    tally.expect("linear, huge", "", difference(product[1], decoded[:, width - 1] + 0.0))
    step = ceil_div(num_rows, 16)
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        found = ops.quantize(weight[part], spec)
        tally.expect("quantize, huge", f"from row {start}", difference(found, record[part]))
        found = ops.dequantize(record[part], spec, weight.dtype)
        tally.expect("dequantize, huge", f"from row {start}", difference(found, decoded[part]))
    rows = torch.cat([torch.arange(8), torch.arange(num_rows - 8, num_rows)])  # as on the CPU
    expected = ops.quantize(weight[rows].cpu(), spec)
    tally.expect("quantize, huge, as the CPU", "", difference(record[rows].cpu(), expected))
    found, expected = decoded[rows].cpu(), ops.dequantize(expected, spec, weight.dtype)
    tally.expect("dequantize, huge, as the CPU", "", difference(found, expected))
    tally.close()
    return None
