"""What the kernels are run with, for the tests that ask for it."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from nf4tensor.kernels import native
from tests.kernels.compiled import usable_isas
from tests.kernels.ptx.calls import Calls
from tests.kernels.ptx.launches import Recorder


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest):
    """Each instruction set in turn."""
    best = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(best)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled_calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The CUDA kernels that the session's tests ask for; compilers run while tests do."""
    folder = tmp_path_factory.mktemp("ptx")
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    params = (spec.params for spec in specs if spec is not None)
    wanted = dict.fromkeys(choice["calls"] for choice in params if "calls" in choice)
    with ThreadPoolExecutor(2) as pool:
        recorder = pool.submit(Recorder, folder)
        yield {kernels: pool.submit(Calls, *kernels, recorder, folder) for kernels in wanted}


@pytest.fixture
def calls(request: pytest.FixtureRequest, compiled_calls) -> Calls:
    """The kernels of an op and an architecture, which `kernels_of` of ptx/calls.py chooses."""
    return compiled_calls[request.param].result()


@pytest.fixture
def triton_interpreter():
    """Triton's interpreter; numpy, which computes in it, warns of what the kernels mean to do."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton.py runs this in its own process"
    with np.errstate(all="ignore"):
        yield
