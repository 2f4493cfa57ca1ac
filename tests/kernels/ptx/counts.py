"""What the memory accesses of each instruction add up to, warp by warp, as hardware splits them.

A warp's access to global memory costs the 32-byte sectors and the 128-byte lines that it touches.
One to shared memory is done in wavefronts: 128 bytes, of 32 banks one word each.
"""

from dataclasses import dataclass

import numpy as np

SECTOR, LINE = 32, 128
BANKS, WORD = 32, 4
WARP = 32


@dataclass
class Access:
    """Sums over the warp accesses of one instruction to one allocation, or to shared memory.

    `num_bytes` counts an address once a warp, however many lanes ask for it. `wavefronts` are of
    shared memory only, `ideal_wavefronts` what they would be without conflicts of banks.
    """

    opcode: str
    name: str
    accesses: int = 0
    num_bytes: int = 0
    sectors: int = 0
    lines: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0

    @property
    def is_store(self) -> bool:
        """Whether the instruction writes."""
        return self.opcode.startswith(("st", "red", "atom"))

    @property
    def fills_sectors(self) -> bool:
        """Whether every sector that a warp touches is wanted whole."""
        return self.num_bytes == SECTOR * self.sectors

    def add_global(self, warps: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Count aligned accesses of `size` bytes, at most a sector, by threads of warps."""
        unique_warps, unique_addresses = _distinct(warps, addresses)
        self.accesses += np.unique(unique_warps).size
        self.num_bytes += size * unique_addresses.size
        sector_warps, sectors = _distinct(unique_warps, unique_addresses // SECTOR)
        self.sectors += sectors.size
        self.lines += _distinct(sector_warps, sectors // (LINE // SECTOR))[1].size

    def add_shared(self, warps: np.ndarray, lanes: np.ndarray, offsets: np.ndarray, size: int):
        """Count accesses of `size` bytes: the lanes of 128 bytes go together."""
        lanes_at_once = min(WARP, BANKS * WORD // size)
        phases = warps * WARP + lanes // lanes_at_once
        num_words = max(size // WORD, 1)
        words = (offsets // WORD)[:, None] + np.arange(num_words)
        word_phases, words = _distinct(np.repeat(phases, num_words), words.ravel())
        _, start, index = np.unique(word_phases, return_index=True, return_inverse=True)
        conflicts = np.bincount(index * BANKS + words % BANKS, minlength=start.size * BANKS)
        self.accesses += np.unique(warps).size
        self.num_bytes += size * _distinct(warps, offsets)[1].size
        self.wavefronts += int(conflicts.reshape(-1, BANKS).max(1).sum())
        self.ideal_wavefronts += start.size


def _distinct(groups: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different pairs of a group and a value, in order."""
    first = values.min()
    span = int(values.max() - first) + 1
    pairs = np.unique(groups * span + (values - first))
    return pairs // span, pairs % span + first
