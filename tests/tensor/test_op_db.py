"""Every operator that torch tests, with 4-bit arguments: the dense result, or a clear error.

The tables are shown by `pytest -s`, and by `python -m tests.tensor.op_table`.
"""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.testing import make_tensor
from torch.testing._internal.opinfo.core import SampleInput

from nf4tensor import NF4Tensor
from tests.tensor import op_table
from tests.tensor.op_trials import ALL, QUICK


def test_one_call_of_every_operator():
    table = op_table.run(QUICK)
    print(f"\n{table}")
    assert not table.faults, table
    assert table.total["equal"] > 1000
    assert table.total["equal"] > 2 * table.total["refused"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_operator():
    table = op_table.run(ALL)
    print(f"\n{table}")
    assert not table.faults, table
    assert table.total["equal"] > 2 * table.total["refused"]


def operator(function) -> SimpleNamespace:
    """Return what `op_db` has, for a function of one matrix."""
    sample = SampleInput(make_tensor(4, 32, dtype=torch.float32, device="cpu"))
    return SimpleNamespace(
        name=function.__name__,
        formatted_name=function.__name__,
        op=function,
        dtypes=(torch.float32,),
        aliases=(),
        method_variant=None,
        inplace_variant=None,
        supports_autograd=False,
        supports_out=False,
        sample_inputs=lambda *args, **kwargs: [sample],
    )


def test_faults_are_seen_and_the_rest_goes_on():
    def wrong(tensor):
        return tensor.abs() if isinstance(tensor, NF4Tensor) else tensor

    def unclear(tensor):
        return tensor.no_such_name if isinstance(tensor, NF4Tensor) else tensor

    def writing(tensor):
        if isinstance(tensor, NF4Tensor):
            tensor.record.zero_()
        return tensor.shape

    def crash(tensor):
        os.kill(os.getpid(), signal.SIGSEGV)

    def right(tensor):
        return tensor + 1

    table = op_table.run(QUICK, [operator(f) for f in (wrong, unclear, writing, crash, right)])
    assert list(dict.fromkeys(fault.partition(",")[0] for fault in table.faults)) == [
        "wrong: wrong",
        "unclear: unclear",
        "wrong: writing",
        "crash: crash",
    ]
    assert table.operators["equal"] == {"right"}
