"""What a launch may touch: allocations in device memory, and the shared memory of its blocks.

Every access is checked: natural alignment, bounds, writes to what is read only, reads of shared
memory that nobody wrote, and threads that touch the same shared byte without a barrier between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx.parse import PtxError

# Where generic addresses of shared and local memory begin: no test places an allocation there.
WINDOWS = {"shared": 1 << 60, "local": 1 << 61}
_PAGE = 4096
_NEVER = -1


def check_alignment(addresses: np.ndarray, size: int) -> None:
    """Refuse addresses that are not multiples of the size."""
    wrong = addresses[addresses % size != 0]
    if wrong.size:
        raise PtxError(f"a misaligned access of {size} bytes at {int(wrong[0]):#x}")


def load(array: np.ndarray, offsets: np.ndarray, dtype: np.dtype, count: int) -> list[np.ndarray]:
    """Return `count` consecutive elements from each aligned offset, one array a position."""
    elements = array.view(dtype)
    first = offsets // dtype.itemsize
    return [elements[first + i] for i in range(count)]


def store(array: np.ndarray, offsets: np.ndarray, values: list[np.ndarray]) -> None:
    """Write consecutive elements to each aligned offset, given as `load` returns them.

    Raises:
        PtxError: Two threads write different values to the same place.
    """
    elements = array.view(values[0].dtype)
    first = offsets // values[0].itemsize
    for i, value in enumerate(values):
        elements[first + i] = value
        if (elements[first + i] != value).any():
            raise PtxError("threads write different values to the same place at once")


@dataclass(frozen=True)
class Allocation:
    """A range of addresses: `content` are its bytes, `backing` begins at `start`, page-aligned."""

    name: str
    address: int
    content: np.ndarray
    backing: np.ndarray
    start: int
    writable: bool


class Memory:
    """Device memory: a few allocations, at any 64-bit address that a test wants."""

    def __init__(self, allocations: Sequence[Allocation] = ()):
        self.allocations = list(allocations)

    def place(
        self, name: str, content: np.ndarray, address: int | None = None, *, writable: bool = False
    ) -> Allocation:
        """Copy an array's bytes to an address, or behind what is there.

        Args:
            name: Under which accesses are counted.
            content: Any array.
            address: In bytes; any, but the last allocation's bytes must lie below.
            writable: Else a store there is an error.
        """
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        end = max((a.address + a.content.size for a in self.allocations), default=0)
        if address is None:
            address = (end // _PAGE + 2) * _PAGE
        if address < end:
            raise ValueError(f"{name} would lie at {address:#x}, below the end of another")
        start = address // _PAGE * _PAGE
        skew = address - start
        backing = np.zeros(-(-(skew + data.size) // 32) * 32, np.uint8)
        backing[skew : skew + data.size] = data
        view = backing[skew : skew + data.size]
        self.allocations.append(Allocation(name, address, view, backing, start, writable))
        return self.allocations[-1]

    def find(self, addresses: np.ndarray, size: int) -> list[tuple[Allocation, np.ndarray]]:
        """Return which accesses of `size` bytes go to which allocation, as a mask of each.

        Raises:
            PtxError: One is misaligned, or not inside an allocation.
        """
        check_alignment(addresses, size)
        found, missing = [], np.ones(addresses.shape, bool)
        for allocation in self.allocations:
            first = allocation.address
            last = first + allocation.content.size - size
            inside = missing & (addresses >= first) & (addresses <= last)
            if inside.any():
                found.append((allocation, inside))
                missing &= ~inside
                if not missing.any():
                    return found
        raise PtxError(f"{size} bytes at {int(addresses[missing][0]):#x} are in no allocation")


class Shared:
    """The shared memory of every block, and who touched each byte when.

    Time is the number of an instruction of the launch. Two threads may touch a byte, one of them
    writing, if since the first of them both have passed a barrier of their block, or of their warp
    if they share it.
    """

    def __init__(self, num_blocks: int, size: int, threads_per_block: int):
        self._size = -(-size // 32) * 32
        self._threads_per_block = threads_per_block
        total = num_blocks * self._size
        self.content = np.zeros(total, np.uint8)
        self._written, self._read = (np.full(total, _NEVER, np.int32) for _ in range(2))
        self._writer, self._reader = (np.zeros(total, np.int32) for _ in range(2))
        num_threads = num_blocks * threads_per_block
        self._block_met, self._warp_met = (np.zeros(num_threads, np.int32) for _ in range(2))

    def meet(self, threads: np.ndarray, time: int, *, is_block: bool) -> None:
        """Note that threads have met at a barrier of their warps, or of their blocks."""
        self._warp_met[threads] = time
        if is_block:
            self._block_met[threads] = time

    def offsets(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return where in `content` accesses go.

        Raises:
            PtxError: One is misaligned or outside.
        """
        check_alignment(addresses, size)
        outside = addresses[(addresses < 0) | (addresses + size > self._size)]
        if outside.size:
            raise PtxError(f"shared memory has no {size} bytes at {int(outside[0]):#x}")
        return addresses + threads // self._threads_per_block * self._size

    def note(self, threads: np.ndarray, offsets: np.ndarray, size: int, time: int, *, writes: bool):
        """Check that others' accesses are over, and note these."""
        places = offsets[:, None] + np.arange(size)
        threads = threads[:, None]
        self._check(threads, places, self._written, self._writer)
        if writes:
            self._check(threads, places, self._read, self._reader)
            self._written[places], self._writer[places] = time, threads
            return
        if (self._written[places] == _NEVER).any():
            raise PtxError("a read of shared memory that nobody wrote")
        self._read[places], self._reader[places] = time, threads

    def _check(self, threads, places, touched, toucher) -> None:
        time, other = touched[places], toucher[places]
        block_met, warp_met = self._block_met[threads], self._warp_met[threads]
        met = np.where(other // 32 == threads // 32, warp_met, block_met)
        if ((other != threads) & (time > met)).any():
            raise PtxError("threads touch the same shared memory with no barrier between")
