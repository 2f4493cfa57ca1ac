"""What the machine can do, measured in the run whose kernels are compared with it.

`twin.cpp` is compiled for the processor at hand, once, into the cache folder. Benchmarks use
`measure` for their roofs and `twin` as a contestant of dequantize; `roofline.py` draws the roofs.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import harness
import torch

from nf4tensor import NF4Tensor

SOURCE = Path(__file__).with_name("twin.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
ROOF_BYTES = 128 << 20  # more than the caches of one core, and of most sockets
CODES_BYTES = 16  # what the twin reads at a time
CACHED_BYTES = 256 << 10  # of a decoded bfloat16 weight: half of a core's second cache, or less
MATMUL_SIZE = 1024
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "nf4_twin": (_POINTER, _INT64, _INT64, _POINTER, _INT64, _INT64, ctypes.c_int),
    "nf4_read": (_POINTER, _INT64, ctypes.c_int),
    "nf4_copy": (_POINTER, _POINTER, _INT64, ctypes.c_int),
    "nf4_multiply_add": (_INT64, ctypes.c_int),
}


def unavailable_because() -> str | None:
    """Return why there are no roofs and no twin, or None where there are."""
    return _load()[1]


def measure(threads: int, options) -> dict[str, float]:
    """Measure reading and copying in GB/s, and operations in GFLOP/s, on some threads.

    `fma` is float32 multiplies and adds in registers; the others are torch's products of square
    matrices, of which a processor with instructions for bfloat16 does more. Empty without a
    compiler.
    """
    library, _ = _load()
    if library is None:
        return {}
    num_bytes = (1 << 20) if options.quick else ROOF_BYTES
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    loops = 10**3 if options.quick else 10**5
    size = 64 if options.quick else MATMUL_SIZE
    contestants = {
        "read": lambda: library.nf4_read(source.data_ptr(), num_bytes, threads),
        "copy": lambda: library.nf4_copy(target.data_ptr(), source.data_ptr(), num_bytes, threads),
        "fma": lambda: library.nf4_multiply_add(loops, threads),
    }
    amounts = {"read": num_bytes, "copy": 2 * num_bytes, "fma": loops * 12 * 16 * 2 * threads}
    units = {"read": "read GB/s", "copy": "copy GB/s", "fma": "fma GFLOP/s"}
    for name in ("float32", "bfloat16"):
        # Emulated bfloat16 takes seconds for what float32 does in milliseconds.
        side = size if name == "float32" or has_quick_bfloat16() else size // 8
        left, right = (torch.ones(side, side, dtype=getattr(torch, name)) for _ in range(2))
        contestants[name] = partial(torch.nn.functional.linear, left, right)
        amounts[name], units[name] = 2 * side**3, f"{name} matmul GFLOP/s"
    times = harness.race(contestants, options.rounds, options.seconds)
    return {units[name]: amounts[name] / times[name]["q1_ms"] / 1e6 for name in contestants}


def present(found: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Leave out what could not be measured."""
    return {threads: roof for threads, roof in found.items() if roof}


def share(rate: float, roof: dict[str, float], name: str) -> str:
    """Say how close to a roof something is."""
    return f"ours is at {rate / roof[name]:.0%} of {name}" if roof else "no roofs measured"


def decoding(tensor: NF4Tensor, dtype: torch.dtype, threads: int, options) -> float:
    """Measure what decoding a weight takes without its memory, in milliseconds.

    A few of its rows, which stay in the caches of the cores, are decoded in place of all.
    """
    rows = min(tensor.shape[0], max(threads, threads * CACHED_BYTES // (2 * tensor.shape[1])))
    part = tensor[:rows].clone()
    out = torch.empty(part.shape, dtype=dtype)
    times = harness.race({"": partial(part.dequantize, out=out)}, 20 * options.rounds)
    return times[""]["median_ms"] * tensor.shape[0] / rows


@lru_cache(maxsize=1)
def has_quick_bfloat16() -> bool:
    """Say whether torch multiplies matrices of bfloat16 about as fast as of float32."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.ones(256, 256, dtype=dtype) for _ in range(2))
        times[dtype] = harness.race({"": lambda a=left, b=right: a @ b}, 3)[""]["median_ms"]
    return times[torch.bfloat16] < 2 * times[torch.float32]


def twin(record: torch.Tensor, out: torch.Tensor, threads: int) -> Callable[[], object] | None:
    """Return a call that reads a record and writes `out` as dequantize does, decoding nothing.

    Args:
        record: uint8 `[rows, pitch]`.
        out: `[rows, columns]`, columns a multiple of 32. It is stored past the caches where it is
            larger than they are.
        threads: how many; they are OpenMP's, as those of torch.

    Returns:
        None where there is no compiler.
    """
    library, _ = _load()
    if library is None:
        return None
    rows, columns = out.shape
    assert columns % 32 == out.data_ptr() % 64 == 0, "the twin has no code for a rest"
    out_step = 2 * CODES_BYTES * out.element_size()
    pitch, out_pitch = record.shape[1], columns * out.element_size()
    return lambda: library.nf4_twin(
        record.data_ptr(), pitch, rows, out.data_ptr(), out_pitch, out_step, threads
    )


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return None, f"no C++ compiler ({compiler}); install one (Debian: apt-get install g++)"
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        return None, f"{compiler} {' '.join(FLAGS)} failed on {SOURCE.name}: {said}"
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = None
    return library, None


def _compiled(compiler: str) -> Path:
    """Return the library, compiled if source, flags or processor are new."""
    key = " ".join((SOURCE.read_text(), compiler, *FLAGS, str(harness.environment()["processor"])))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nf4tensor"
    path = root / f"twin-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            fresh = Path(folder) / path.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            fresh.replace(path)  # another process may be at it too
    return path
