"""The compiled library: where it is, why it cannot be used, and how it registers.

Loads `_C.so` on the first question and computes nothing. Loading registers no kernel: `select.py`,
the only caller, decides. Whatever goes wrong is kept as text for `nf4tensor env`, since the
reference works without the library.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

from nf4tensor.errors import NF4TensorError

CPU_OPS = frozenset(
    {"quantize", "quantize_into", "dequantize", "dequantize_into", "linear", "matmul"}
)


@dataclass(frozen=True)
class _Library:
    """The loaded library, or the reason why there is none."""

    handle: ctypes.CDLL | None
    reason: str | None


def unavailable_because() -> str | None:
    """Return why the compiled library cannot be used, or None when it can."""
    return _load().reason


def register_cpu() -> None:
    """Register the compiled kernels for the CPU; a second call changes nothing.

    Raises:
        RuntimeError: torch refused a kernel, after it printed the cause.
    """
    library = _load()
    assert library.handle is not None, f"register_cpu() without a library: {library.reason}"
    error = library.handle.nf4tensor_register_cpu()
    if error != 0:
        raise RuntimeError(
            f"torch {torch.__version__} refused the compiled kernels (error {error}, cause above): "
            "set NF4TENSOR_BACKEND=reference, or rebuild nf4tensor"
        )


def isa() -> str:
    """Return the instruction set whose kernels are in use, such as "avx2" (see `select.py`)."""
    library = _load()
    assert library.handle is not None, f"isa() without a library: {library.reason}"
    return str(library.handle.nf4tensor_isa().decode())


def use_isa(name: str) -> None:
    """Use the kernels of an instruction set from now on; their results are the same bits.

    Raises:
        NF4TensorError: The build or the processor does not have it.
    """
    library = _load()
    assert library.handle is not None, f"use_isa() without a library: {library.reason}"
    if library.handle.nf4tensor_use_isa(name.encode()) != 0:
        raise NF4TensorError(
            f"instruction set {name!r}: this build or this processor does not have it; "
            f"the best one here is {isa()}: unset NF4TENSOR_ISA"
        )


def use_panels(use: bool | None) -> None:
    """Choose whether products decode panels for torch's own matmul; None: where that is faster.

    For tests and benchmarks: the default knows the processor and the number of inputs.
    """
    library = _load()
    assert library.handle is not None, f"use_panels() without a library: {library.reason}"
    library.handle.nf4tensor_use_panels(-1 if use is None else int(use))


def release_workspace() -> int:
    """Free the memory that products on the CPU keep from call to call.

    Safe at any time, from any thread: what a running product uses is left alone.

    Returns:
        How many bytes were freed.
    """
    library = _load().handle
    return 0 if library is None else int(library.nf4tensor_release_workspace())


def _candidates() -> list[Path]:
    # Not beside this file: an editable install keeps _C.so in site-packages and the .py files in
    # the source. The package has both as its search path.
    package = find_spec(__name__.partition(".")[0])
    folders = (package and package.submodule_search_locations) or []
    return [path for folder in folders for path in sorted(Path(folder).glob("_C*.so"))]


@lru_cache(maxsize=1)
def _load() -> _Library:
    candidates = _candidates()
    if not candidates:
        return _Library(
            None,
            "not built: no working C++ compiler at install time (pip install -v shows more)",
        )
    path = candidates[0]
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
        # Absent from a library of another version, such as one left by an older editable install.
        library.nf4tensor_register_cpu.restype = ctypes.c_int
        library.nf4tensor_isa.restype = ctypes.c_char_p
        library.nf4tensor_use_isa.argtypes = [ctypes.c_char_p]
        library.nf4tensor_use_panels.argtypes = [ctypes.c_int]
        library.nf4tensor_release_workspace.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        return _Library(None, f"failed to load {path}: {error.__cause__ or error}")
    return _Library(library, None)
