"""What the CUDA kernels cost, as the interpreter of ptx/ counts it: sectors, bank conflicts, reads.

Instructions and registers of real processors are for test_machine_code.py.
"""

import re

import pytest
import torch

from nf4tensor.format.spec import NF4Spec
from tests.kernels.compiled import make_finite_record, make_record
from tests.kernels.ptx.calls import (
    DTYPES,
    Calls,
    dequantize_kernels,
    garbage,
    linear_kernels,
    quantize_kernels,
)
from tests.kernels.ptx.counts import SECTOR
from tests.kernels.ptx.execute import Execution
from tests.kernels.ptx.launches import needs_compiler, needs_nvcc

pytestmark = [needs_nvcc, needs_compiler]


def count_dequantize(
    calls: Calls, num_rows: int, width: int, dtype: torch.dtype, *, mapping=0, block_size=64
) -> Execution:
    """Decode whole blocks of threads, records at a multiple of a sector."""
    spec = NF4Spec.for_weight(width, block_size)
    with calls.recorder.configured(mapping=mapping):
        call = calls.dequantize(num_rows, spec, dtype, record=1 << 40)
    out = garbage(num_rows, width, dtype=dtype)
    (execution,) = calls.run(call, record=make_record((num_rows,), spec), out=out)
    return execution


@dequantize_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_moves_whole_sectors(calls, dtype):
    for num_rows, width in ((128, 576), (8, 4096)):
        execution = count_dequantize(calls, num_rows, width, dtype)
        stores = [access for access in execution.accesses if access.is_store]
        (codes,) = (
            access
            for access in execution.accesses
            if ".v4." in access.opcode and access not in stores
        )
        assert all(access.fills_sectors for access in (codes, *stores))
        assert sum(access.num_bytes for access in stores) == num_rows * width * dtype.itemsize
        assert codes.num_bytes == num_rows * width // 2
        assert not any(access.name == "shared" for access in execution.accesses)


@dequantize_kernels
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dequantize_fills_sectors_from_blocks_of_32_on(calls, dtype):
    """Before sm_100 by way of shared memory: in pairs, both lanes need the tables of both.

    For blocks of 16, the kernel without kWhole stores 16 bytes a lane: sectors are written in
    halves, by two instructions one after the other. That is how it is, for blocks so rare.
    """
    for block_size, sectors in ((32, 1), (16, 2)):
        execution = count_dequantize(calls, 8, 4096, dtype, block_size=block_size)
        stores = [a for a in execution.accesses if a.is_store and a.name == "out"]
        assert sum(access.num_bytes for access in stores) == 8 * 4096 * 2
        assert {SECTOR * a.sectors / a.num_bytes for a in stores} == {sectors}


@dequantize_kernels
def test_dequantize_takes_few_instructions(calls):
    execution = count_dequantize(calls, 16, 4096, torch.bfloat16)
    # Of PTX, where ptxas makes one LOP3 of two or three; test_machine_code.py counts its own.
    assert sum(execution.thread_instructions.values()) <= 8.5 * 16 * 4096


@dequantize_kernels
def test_dequantize_by_way_of_shared_memory_has_no_bank_conflicts(calls):
    execution = count_dequantize(calls, 8, 4096, torch.bfloat16, mapping=3)
    shared = [access for access in execution.accesses if access.name == "shared"]
    assert shared
    assert all(access.wavefronts == access.ideal_wavefronts for access in shared)


@quantize_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_reads_each_weight_once(calls, dtype):
    spec = NF4Spec.for_weight(4096)
    weight, record = torch.ones(8, 4096, dtype=dtype), garbage(8, spec.pitch, dtype=torch.uint8)
    call = calls.quantize(8, spec, dtype, record=1 << 40)
    (execution,) = calls.run(call, weight=weight, record=record)
    loads = [access for access in execution.accesses if access.name == "weight"]
    assert sum(access.num_bytes for access in loads) == weight.nbytes
    codes = [access for access in execution.accesses if access.opcode.startswith("st.global.cs")]
    assert all(access.fills_sectors for access in codes)
    assert sum(access.num_bytes for access in codes) == 8 * spec.codes_bytes
    shared = [access for access in execution.accesses if access.name == "shared"]
    assert all(access.wavefronts == access.ideal_wavefronts for access in shared)


@linear_kernels
@pytest.mark.parametrize("num_inputs", [1, 7, 16, 40, 64])
def test_linear_reads_each_code_once(calls, num_inputs):
    spec = NF4Spec.for_weight(2048)
    tensors = {
        "record": make_finite_record((64,), spec),
        "inputs": torch.ones(num_inputs, 2048, dtype=torch.bfloat16),
        "out": garbage(num_inputs, 64, dtype=torch.bfloat16),
    }
    with calls.recorder.configured(num_processors=1):
        (execution,) = calls.run(calls.linear(64, spec, torch.bfloat16, num_inputs), **tensors)
    codes = [
        a for a in execution.accesses if a.name == "record" and re.search(r"\.v[48]\.", a.opcode)
    ]
    assert sum(access.num_bytes for access in codes) == 64 * spec.codes_bytes
    for access in execution.accesses:
        if access.name == "shared":
            # What goes on all the time has no conflicts of banks; the sums in the end, a few.
            most = 1 if ".v4." in access.opcode else 4
            assert access.wavefronts <= most * access.ideal_wavefronts
