"""The ops of csrc/cuda on torch tensors, their kernels interpreted.

A call is made from sizes alone; whoever then runs it brings the tensors. Each is an allocation of
exactly its bytes, and read only where it is an input.
"""

import math
from collections import Counter
from concurrent.futures import Future
from ctypes import c_int64, c_uint64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nf4tensor.format.spec import NF4Spec
from tests.kernels.machine_code import ARCHITECTURES
from tests.kernels.native_grid import ROOT
from tests.kernels.ptx.execute import Execution, Launch
from tests.kernels.ptx.launches import Recorder, compile_ptx
from tests.kernels.ptx.memory import Memory

# In the order of csrc/common/dtype.h.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Where tensors lie: all beyond 32 bits, and room for many GiB between them.
_PLACES = {
    name: (i + 1) << 40 for i, name in enumerate(("record", "weight", "inputs", "bias", "out"))
}
# Records have to lie at a multiple of 16 bytes, and need no more.
_RECORD = _PLACES["record"] + 16


@dataclass(frozen=True)
class Call:
    """What a call launches: on tensors at these addresses, of so many bytes a row of the weight."""

    launches: list[Launch]
    places: dict[str, int]
    row_bytes: dict[str, int]
    output: str


class Calls:
    """One op for one architecture; `turns` counts how often each kernel has run.

    Args:
        op: A file of csrc/cuda.
        capability: The architecture, 90 for 9.0.
        recorder: What the launch functions are in, once it is built.
        folder: For the compiler's output.
    """

    def __init__(self, op: str, capability: int, recorder: Future[Recorder], folder: Path):
        self.capability = capability
        self.module = compile_ptx(ROOT / f"csrc/cuda/{op}.cu", folder, capability)
        self.recorder = recorder.result()
        self.turns: Counter[str] = Counter()

    def is_due(self, call: Call, most: float = math.inf) -> bool:
        """Say whether some kernel of a call has had fewer turns than `most`."""
        return any(self.turns[launch.kernel] < most for launch in call.launches)

    def run(self, call: Call, **tensors: Tensor) -> list[Execution]:
        """Run the launches of a call one after the other; the output is written in place."""
        memory = _memory_of(call, tensors, first_row=0)
        self.turns.update(launch.kernel for launch in call.launches)
        executions = [Execution(self.module, launch, memory).run() for launch in call.launches]
        _read_back(memory, call, tensors)
        return executions

    def run_last(self, call: Call, num_rows: int, **tensors: Tensor) -> int:
        """Run the last blocks of a call for `num_rows`, of which the tensors are the last.

        Returns:
            How many of the last rows these blocks do, at least.
        """
        (launch,) = call.launches
        mine = tensors[call.output].nbytes // call.row_bytes[call.output]
        memory = _memory_of(call, tensors, first_row=num_rows - mine)
        num_blocks = -(-launch.num_blocks * mine // (2 * num_rows))
        blocks = range(launch.num_blocks - num_blocks, launch.num_blocks)
        Execution(self.module, launch, memory, blocks).run()
        _read_back(memory, call, tensors)
        return mine // 2

    def dequantize(
        self, num_rows: int, spec: NF4Spec, dtype: torch.dtype, skew: int = 0, record: int = _RECORD
    ) -> Call:
        """Decode records [rows, pitch] at an address to `out` [rows, in_features], off a page."""
        places = {"record": record, "out": _PLACES["out"] + skew}
        pointers = map(c_uint64, places.values())
        launches = self.recorder.record(
            *("RecordDequantize", self.capability, spec, DTYPES.index(dtype)),
            *(c_int64(num_rows), *pointers),
        )
        row_bytes = {"record": spec.pitch, "out": spec.in_features * dtype.itemsize}
        return Call(launches, places, row_bytes, "out")

    def quantize(
        self,
        num_rows: int,
        spec: NF4Spec,
        dtype: torch.dtype,
        skew: int = 0,
        keep_phase: bool = False,
        record: int = _RECORD,
    ) -> Call:
        """Encode `weight` [rows, in_features], off a page, to records [rows, pitch]."""
        places = {"record": record, "weight": _PLACES["weight"] + skew}
        launches = self.recorder.record(
            *("RecordQuantize", self.capability, spec, DTYPES.index(dtype), c_int64(num_rows)),
            *(c_uint64(places["weight"]), int(keep_phase), c_uint64(places["record"])),
        )
        row_bytes = {"record": spec.pitch, "weight": spec.in_features * dtype.itemsize}
        return Call(launches, places, row_bytes, "record")

    def linear(
        self,
        num_rows: int,
        spec: NF4Spec,
        dtype: torch.dtype,
        num_inputs: int = 1,
        has_bias: bool = False,
    ) -> Call:
        """Multiply `inputs` [num_inputs, in_features] with records [rows, pitch]."""
        names = ("inputs", "bias", "out") if has_bias else ("inputs", "out")
        places = {name: _PLACES[name] for name in ("record", *names)}
        order = (places.get(name, 0) for name in ("record", "inputs", "bias", "out"))
        launches = self.recorder.record(
            *("RecordLinear", self.capability, spec, DTYPES.index(dtype)),
            *(c_int64(num_rows), c_int64(num_inputs), (c_uint64 * 4)(*order)),
        )
        # With one input, that is; the inputs are the same for all rows.
        row_bytes = {"record": spec.pitch, "inputs": 0, "bias": 2, "out": 2}
        return Call(launches, places, row_bytes, "out")


def _memory_of(call: Call, tensors: dict[str, Tensor], first_row: int) -> Memory:
    memory = Memory()
    assert tensors.keys() == call.places.keys()
    for name, address in call.places.items():
        offset = first_row * call.row_bytes[name]
        is_output = name == call.output
        memory.place(name, _bytes_of(tensors[name]), address + offset, writable=is_output)
    return memory


def _read_back(memory: Memory, call: Call, tensors: dict[str, Tensor]) -> None:
    (written,) = (a for a in memory.allocations if a.name == call.output)
    _bytes_of(tensors[call.output])[:] = written.content


def _bytes_of(tensor: Tensor) -> np.ndarray:
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy()


def garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What an output holds before it is written: numbers, as any NaN is as good as another."""
    return torch.full((*shape, dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype).squeeze(-1)


def kernels_of(op: str, *fast: int) -> pytest.MarkDecorator:
    """Give a test an op's kernels for each architecture in turn; all but some of them are slow."""
    params = [
        pytest.param((op, x), id=f"sm_{x}", marks=() if x in fast else pytest.mark.slow)
        for x in ARCHITECTURES
    ]
    return pytest.mark.parametrize("calls", params, indirect=True)


# The sources only ask for sm_100 and later: there they load and store 32 bytes at once.
dequantize_kernels = kernels_of("dequantize", 90, 100)
quantize_kernels = kernels_of("quantize", 90)
linear_kernels = kernels_of("linear", 90)
