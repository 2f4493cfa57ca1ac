"""Run a kernel: all threads at once, those with the lowest program counter first.

Threads that branched apart so come together again. Who must wait for others, at a barrier or to
exchange registers, is parked until they have come; if they never do, that is an error.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

# The instructions enter themselves.
from tests.kernels.ptx import arithmetic, bits, convert, exchange, moves  # noqa: F401
from tests.kernels.ptx.counts import WARP, Access
from tests.kernels.ptx.memory import Memory, Shared
from tests.kernels.ptx.opcodes import Bound, bind
from tests.kernels.ptx.parse import Kernel, Module, PtxError
from tests.kernels.ptx.registers import Registers, Select

_ALL = slice(None)
_JUMPS = ("bra", "ret", "exit")


@dataclass(frozen=True)
class Launch:
    """A launch as the driver gets it; `arguments` are the bytes of each."""

    kernel: str
    num_blocks: int
    threads_per_block: int
    arguments: tuple[bytes, ...]


class Execution:
    """What running some blocks of a launch takes, and what it counts.

    Args:
        module: The kernel's.
        launch: What is started.
        memory: What it may touch.
        blocks: Which of its blocks run; all if None.
    """

    def __init__(self, module: Module, launch: Launch, memory: Memory, blocks: range | None = None):
        blocks = range(launch.num_blocks) if blocks is None else blocks
        if launch.kernel not in module.kernels:
            raise PtxError(f"the module has no kernel {launch.kernel}")
        self.kernel: Kernel = module.kernels[launch.kernel]
        self.num_threads = len(blocks) * launch.threads_per_block
        if launch.threads_per_block % WARP:
            raise PtxError(f"{launch.threads_per_block} threads are no whole warps")
        self._block_size = launch.threads_per_block
        index = np.arange(self.num_threads)
        self.lanes, self.warps = index % WARP, index // WARP
        self._blocks = index // self._block_size
        self._index = index
        self._is_alive = np.ones(self.num_threads, bool)

        self.memory = Memory(memory.allocations)
        self.shared = Shared(len(blocks), self.kernel.shared.size, self._block_size)
        self.local_stride = -(-self.kernel.local.size // WARP) * WARP
        self.local = np.zeros(self.num_threads * self.local_stride, np.uint8)
        self.parameters = self._lay_out(launch.arguments)
        special = self._special_registers(launch, blocks)
        self.registers = Registers(self.kernel, special, self._place_symbols(module))

        self.time = 0
        self.thread_instructions: Counter[str] = Counter()
        self._accesses: dict[tuple[int, str], Access] = {}
        self._code: list[Bound | None] = []
        for pc, what in enumerate(self.kernel.code):
            is_jump = what.opcode.split(".")[0] in _JUMPS
            self._code.append(None if is_jump else bind(self, what, pc))
        self._predicates = [
            self.registers.reader("!" * what.negated + what.predicate, "pred")
            if what.predicate
            else None
            for what in self.kernel.code
        ]
        # Program counter -> threads, in order; and those that wait there for others.
        self._fronts: dict[int, np.ndarray] = {0: index}
        self._parked: dict[int, np.ndarray] = {}

    # What instructions use.

    def threads(self, select: Select) -> np.ndarray:
        """Return the indices of the selected threads."""
        return self._index[select]

    def access(self, pc: int, text: str, name: str) -> Access:
        """Return the counter of an instruction's accesses to something."""
        return self._accesses.setdefault((pc, name), Access(text, name))

    def lane_masks(self, threads: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return for each thread the mask of lanes of its warp that are there, and chosen."""
        bit = np.ldexp(1.0, self.lanes[threads])  # exact, and bincount adds floats
        warps = self.warps[threads]
        masks = np.bincount(warps, bit if chosen is None else bit * chosen)
        return masks[warps].astype(np.uint32)

    # Results.

    @property
    def accesses(self) -> list[Access]:
        """Every instruction that touched memory, in the order of the code."""
        return [access for _, access in sorted(self._accesses.items(), key=lambda item: item[0])]

    def run(self) -> "Execution":
        """Run to the end.

        Raises:
            PtxError: The kernel does what it must not.
        """
        with np.errstate(all="ignore"):
            while self._fronts or self._parked:
                if not self._fronts:
                    self._wake()
                pc = min(self._fronts)
                self._advance(pc, self._fronts.pop(pc))
        return self

    def _advance(self, pc: int, threads: np.ndarray) -> None:
        """Run threads until they jump, wait, or come to where others are."""
        limit = min(self._fronts, default=len(self._code))
        while threads.size and pc < limit:
            active = self._active(pc, threads)
            what = self.kernel.code[pc]
            self.time += 1
            self.thread_instructions[what.opcode] += threads.size
            bound = self._code[pc]
            try:
                if bound is None:
                    self._jump(pc, threads, active)
                    return
                if bound.scope:
                    active, threads = self._gather(pc, bound, active, threads)
                if active.size:
                    bound.run(_ALL if active.size == self.num_threads else active)
            except PtxError as error:
                raise PtxError(f"{self.kernel.name}, instruction {pc}, {what}: {error}") from error
            pc += 1
        self._arrive(pc, threads)

    def _active(self, pc: int, threads: np.ndarray) -> np.ndarray:
        predicate = self._predicates[pc]
        return threads if predicate is None else threads[predicate(threads)]

    def _arrive(self, pc: int, threads: np.ndarray) -> None:
        if threads.size and pc >= len(self._code):
            raise PtxError(f"{self.kernel.name} runs past its end")
        if threads.size:
            others = self._fronts.get(pc)
            self._fronts[pc] = threads if others is None else np.union1d(threads, others)

    def _jump(self, pc: int, threads: np.ndarray, active: np.ndarray) -> None:
        what = self.kernel.code[pc]
        if what.opcode.startswith("bra"):
            self._arrive(self.kernel.labels[what.operands[0]], active)
        else:
            self._is_alive[active] = False
        if active.size < threads.size:
            self._arrive(pc + 1, np.setdiff1d(threads, active, assume_unique=True))

    # Threads that wait for others.

    def _gather(
        self, pc: int, bound: Bound, active: np.ndarray, threads: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the threads whose others have come too, and all that may go on; park the rest."""
        if active.size == self.num_threads:
            complete = self._is_complete(bound, active)
            if complete.all():
                return active, threads
        parked = self._parked.pop(pc, np.empty(0, self._index.dtype))
        waiting = np.union1d(active, parked)
        complete = self._is_complete(bound, waiting)
        if not complete.all():
            self._parked[pc] = waiting[~complete]
        passing = np.setdiff1d(threads, active, assume_unique=True)
        ready = waiting[complete]
        return ready, np.union1d(passing, ready)

    def _is_complete(self, bound: Bound, threads: np.ndarray) -> np.ndarray:
        """Say of each thread whether all that it waits for are among the threads."""
        if bound.scope == "block":
            here = np.bincount(self._blocks[threads], minlength=self._blocks[-1] + 1)
            alive = np.bincount(self._blocks[self._is_alive], minlength=here.size)
            return (here == alive)[self._blocks[threads]]
        here, wanted = self.lane_masks(threads), bound.mask(threads)
        if (wanted >> self.lanes[threads].astype(np.uint32) & 1 == 0).any():
            raise PtxError("a lane that its own mask does not name")
        return here & wanted == wanted

    def _wake(self) -> None:
        """Let parked threads look again: threads for which they wait may have ended."""
        before = {pc: threads.size for pc, threads in self._parked.items()}
        for pc, threads in list(self._parked.items()):
            bound = self._code[pc]
            complete = self._is_complete(bound, threads)
            if complete.any():
                del self._parked[pc]
                self._arrive(pc, threads)
        if not self._fronts:
            stuck = {str(self.kernel.code[pc]): count for pc, count in before.items()}
            raise PtxError(f"{self.kernel.name}: reached by part of its threads: {stuck}")

    # What a launch begins with.

    def _lay_out(self, arguments: tuple[bytes, ...]) -> np.ndarray:
        frame, sizes = self.kernel.parameters, self.kernel.parameter_sizes
        if [len(argument) for argument in arguments] != sizes:
            raise PtxError(f"{self.kernel.name} takes arguments of {sizes} bytes")
        content = np.zeros(-(-frame.size // WARP) * WARP, np.uint8)
        for offset, argument in zip(frame.offsets.values(), arguments, strict=True):
            content[offset : offset + len(argument)] = np.frombuffer(argument, np.uint8)
        return content

    def _place_symbols(self, module: Module) -> dict[str, int]:
        frames = (self.kernel.parameters, self.kernel.shared, self.kernel.local)
        symbols = {name: offset for frame in frames for name, offset in frame.offsets.items()}
        for variable in module.variables:
            content = np.frombuffer(variable.content, np.uint8)
            symbols[variable.name] = self.memory.place(variable.name, content).address
        return symbols

    def _special_registers(self, launch: Launch, blocks: range) -> dict[str, np.ndarray]:
        values = {
            "%tid.x": self._index % self._block_size,
            "%ctaid.x": self._blocks + blocks.start,
            "%ntid.x": np.full(self.num_threads, self._block_size),
            "%nctaid.x": np.full(self.num_threads, launch.num_blocks),
            "%laneid": self.lanes,
        }
        return {name: value.astype(np.uint32) for name, value in values.items()}
