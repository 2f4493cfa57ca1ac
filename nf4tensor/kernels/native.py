"""The compiled library: where it is, why it cannot be used, and how it registers.

Loads `_C.so` on the first question and computes nothing. Loading registers no kernel: `select.py`,
the only caller, decides. Whatever goes wrong is kept as text for `nf4tensor env`, since the
reference works without the library.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

from nf4tensor.errors import NF4TensorError

MAPPINGS = ("direct", "pair", "staged")


@dataclass(frozen=True)
class _Library:
    """The loaded library, or the reason why there is none."""

    handle: ctypes.CDLL | None
    reason: str | None


def unavailable_because() -> str | None:
    """Return why the compiled library cannot be used, or None when it can."""
    return _load().reason


def cuda_unavailable_because(capabilities: Sequence[tuple[int, int]] = ()) -> str | None:
    """Return why the compiled kernels for CUDA devices cannot be used, or None when they can.

    Args:
        capabilities: Of the devices in question, such as (9, 0).
    """
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    library = _load()
    if library.handle is not None and not hasattr(library.handle, "nf4tensor_register_cuda"):
        return "the library was compiled without nvcc, or with NF4TENSOR_CUDA=OFF"
    if library.handle is not None and capabilities:
        architectures = library.handle.nf4tensor_cuda_architectures().decode()
        for index, capability in enumerate(capabilities):
            if not any(_serves(name, capability) for name in architectures.split(",")):
                return (
                    "device {} has compute capability {}.{}, and the library was compiled for {}"
                ).format(index, *capability, architectures)
    return library.reason


def _serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Tell whether a device runs code for one of CMAKE_CUDA_ARCHITECTURES."""
    parts = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", architecture)
    if parts is None:  # a word such as "native": only a launch will tell
        return True
    number, suffix, kind = parts.groups()
    built = divmod(int(number), 10)
    if suffix == "a":  # of one processor, without the promises of others
        return built == capability
    if suffix == "f" or kind == "-real":  # machine code, for later processors of its generation
        return built[0] == capability[0] and built <= capability
    return built <= capability  # the driver compiles it for any later one


def register(device: str) -> None:
    """Register the compiled kernels for "cpu" or "cuda"; a second call changes nothing.

    Raises:
        RuntimeError: torch refused a kernel, after it printed the cause.
    """
    library = _load()
    assert library.handle is not None, f"register() without a library: {library.reason}"
    error = getattr(library.handle, f"nf4tensor_register_{device}")()
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


def tune_dequantize(mapping: str | None, max_blocks: int = 0) -> None:
    """Choose how the CUDA kernel spreads its stores, and how many blocks it may use at once.

    For benchmarks, and to decode beside a product: the default knows the device. Results are the
    same bits.

    Args:
        mapping: "direct", "pair" or "staged" (see csrc/cuda/kernels.h); None for the default.
        max_blocks: of 256 threads each; 0 for no limit.
    """
    index = 0 if mapping is None else 1 + MAPPINGS.index(mapping)
    _cuda_library().nf4tensor_tune_dequantize(index, max_blocks)


def fuse_linear(max_inputs: int | None) -> None:
    """Choose up to how many inputs CUDA products decode as they multiply; None for the default."""
    _cuda_library().nf4tensor_fuse_linear(-1 if max_inputs is None else max_inputs)


def _cuda_library() -> ctypes.CDLL:
    library = _load().handle
    assert library is not None
    assert cuda_unavailable_because() is None, cuda_unavailable_because()
    return library


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
        if hasattr(library, "nf4tensor_register_cuda"):
            library.nf4tensor_cuda_architectures.restype = ctypes.c_char_p
            library.nf4tensor_tune_dequantize.argtypes = [ctypes.c_int, ctypes.c_int64]
            library.nf4tensor_fuse_linear.argtypes = [ctypes.c_int64]
    except (OSError, AttributeError) as error:
        return _Library(None, f"failed to load {path}: {error.__cause__ or error}")
    return _Library(library, None)
