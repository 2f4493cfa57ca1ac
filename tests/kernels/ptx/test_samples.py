"""What nvcc makes of small kernels, interpreted, against numpy."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.ptx.execute import Execution, Launch
from tests.kernels.ptx.launches import compile_ptx, needs_nvcc
from tests.kernels.ptx.memory import Memory
from tests.kernels.ptx.parse import Module, PtxError

SAMPLES = Path(__file__).with_name("samples.cu")
pytestmark = needs_nvcc


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return compile_ptx(SAMPLES, tmp_path_factory.mktemp("ptx"), 90)


def run(
    module: Module, kernel: str, shape: tuple[int, int], *arguments: np.ndarray | bytes
) -> tuple[list[np.ndarray], Execution]:
    """Launch (blocks, threads) with arrays, which are copied and returned, and values."""
    memory, encoded, arrays = Memory(), [], []
    for i, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            allocation = memory.place(f"a{i}", argument, writable=True)
            arrays.append((allocation, argument))
            encoded.append(allocation.address.to_bytes(8, "little"))
        else:
            encoded.append(argument)
    execution = Execution(module, Launch(kernel, *shape, tuple(encoded)), memory).run()
    results = [a.content.view(old.dtype).reshape(old.shape) for a, old in arrays]
    return results, execution


def int32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def test_threads_that_branch_apart_come_together(samples):
    starts = np.random.default_rng(0).integers(1, 3000, 1000, np.uint32)
    starts[:3] = 1, 2, 77031

    def steps_of(n: int) -> int:
        for step in range(200):
            if n == 1:
                return step
            n = n // 2 if n % 2 == 0 else 3 * n + 1
        return 200 if n == 1 else -1

    (_, steps), execution = run(
        samples, "Collatz", (3, 128), starts, np.zeros(1000, np.int32), int32(1000)
    )
    assert steps.tolist() == [steps_of(n) for n in starts.tolist()]
    # A warp stores together what its lanes found after more or fewer steps.
    (store,) = (access for access in execution.accesses if access.is_store)
    assert (store.accesses, store.num_bytes) == (32, 4000)


def test_tables_and_parameters_by_index(samples):
    index = np.random.default_rng(1).integers(0, 256, 64, np.uint8)
    factors = np.array([3, 1 << 20, 7, 12345], np.uint32)
    options = factors.tobytes() + bytes([2]) + bytes(7) + (36).to_bytes(8, "little")
    (_, out), _ = run(samples, "LookUp", (1, 64), index, np.zeros(100, np.float32), options)
    primes = np.array([2, 3, 5, 7, 11, 13, 17, 19], np.uint32)
    words = primes[index % 8] * factors[index % 4] >> 2
    assert (out[36:] == words.astype(np.float32) + np.float32(0.5) + index % 4).all()
    assert not out[:36].any()


def test_local_arrays(samples):
    values = np.random.default_rng(2).integers(0, 256, (32, 50), np.uint8)
    (_, counts), _ = run(
        samples, "Histogram", (1, 32), values, int32(50), np.zeros((32, 16), np.uint16)
    )
    assert (counts == [np.bincount(row % 16, minlength=16) for row in values]).all()


def test_sums_in_shared_memory(samples):
    values = np.random.default_rng(3).standard_normal((3, 128), np.float32)
    (_, sums), _ = run(samples, "SumOfBlock", (3, 128), values, np.zeros(3, np.float32))
    expected = values.copy()
    for half in (64, 32, 16, 8, 4, 2, 1):
        expected[:, :half] += expected[:, half : 2 * half]
    assert (sums == expected[:, 0]).all()


def test_a_missing_barrier_is_found(tmp_path):
    source = tmp_path / "samples.cu"
    source.write_text("#define NO_BARRIER\n" + SAMPLES.read_text(encoding="utf-8"))
    module = compile_ptx(source, tmp_path, 90)
    with pytest.raises(PtxError, match=r"SumOfBlock.*with no barrier between"):
        run(module, "SumOfBlock", (1, 128), np.ones(128, np.float32), np.zeros(1, np.float32))


def test_lanes_exchange(samples):
    values = np.random.default_rng(4).integers(0, 1000, 64, np.uint32)
    (_, out), _ = run(samples, "Exchange", (1, 64), values, np.zeros((64, 10), np.uint32))
    lane = np.arange(32)
    for v, actual in zip(values.reshape(2, 32), out.reshape(2, 32, 10), strict=True):
        eighth = np.where(lane % 8 < 7, lane + 1, lane)

        def mask(chosen: np.ndarray) -> int:
            return sum(1 << int(i) for i in np.flatnonzero(chosen))

        expected = [
            v[v % 32],
            v[np.where(lane < 3, lane, lane - 3)],
            v[np.where(lane > 26, lane, lane + 5)],
            v[lane ^ 9],
            v[eighth.clip(max=31)],
            np.full(32, mask(v % 3 == 0)),
            np.full(32, int((v % 16 == 7).any()) + 2 * int((v != 7).all())),
            [mask(v % 4 == x % 4) for x in v],
            np.full(32, v.max()),
            np.where(v % 2 == 0, mask(v % 2 == 0), 0),
        ]
        assert (actual.T == np.array(expected)).all()


def test_atomic_additions(samples):
    keys = np.random.default_rng(5).integers(0, 100, 96, np.uint32)
    (_, counts, places), _ = run(
        samples, "Count", (1, 96), keys, np.zeros(9, np.uint32), np.zeros(96, np.uint32)
    )
    assert (counts[:8] == 2 * np.bincount(keys % 8, minlength=8)).all()
    assert counts[8] == keys[::2].sum()
    for key in range(8):
        mine = np.sort(places[keys % 8 == key])
        assert (mine == 2 * np.arange(mine.size)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["Bf16", "F16"])
def test_tensor_cores(samples, dtype):
    generator = torch.Generator().manual_seed(6)
    # Products of 8-bit integers and their sums are exact in every order.
    a = torch.randint(-255, 256, (16, 16), generator=generator).to(dtype)
    b = torch.randint(-255, 256, (16, 8), generator=generator).to(dtype)
    arrays = [matrix.view(torch.int16).numpy() for matrix in (a, b)]
    kernel = "ProductBf16" if dtype == torch.bfloat16 else "ProductF16"
    (_, _, c), execution = run(samples, kernel, (1, 32), *arrays, np.zeros((16, 8), np.float32))
    assert (c == (a.double() @ b.double() + 1).numpy()).all()
    shared = [access for access in execution.accesses if access.name == "shared"]
    # Rows of A are 32 bytes apart: eight of them reach each bank twice.
    assert [(access.wavefronts, access.ideal_wavefronts) for access in shared] == [
        (4, 4),
        (2, 2),
        (8, 4),
        (2, 2),
    ]


def test_widths(samples):
    generator = np.random.default_rng(7)
    bytes_ = generator.integers(-128, 128, 32, np.int8)
    pairs = generator.integers(-999, 999, (32, 2), np.int16)
    quads = generator.standard_normal((32, 4), np.float32)
    (_, _, _, out, turned, low), execution = run(
        samples,
        "Widths",
        (1, 32),
        bytes_,
        pairs,
        quads,
        *(np.zeros(32, np.int32), np.zeros((32, 4), np.float32), np.zeros(32, np.uint8)),
    )
    expected = bytes_ + pairs[:, 0].astype(np.int32) * pairs[:, 1]
    assert (out == expected).all()
    assert (turned == quads[:, ::-1]).all()
    assert (low == expected.astype(np.uint8)).all()
    assert any(re.search(r"\.v4\.f32", access.opcode) for access in execution.accesses)
