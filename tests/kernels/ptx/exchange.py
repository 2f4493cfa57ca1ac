"""Instructions that threads of a warp or a block do together."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.ptx.moves import REDUCTIONS, SharedAccess, address_reader
from tests.kernels.ptx.opcodes import Bound, Opcode, instruction, vector
from tests.kernels.ptx.parse import PtxError
from tests.kernels.ptx.registers import DTYPES, Select, canonical
from tests.kernels.ptx.rounding import from_bfloat16

if TYPE_CHECKING:
    from tests.kernels.ptx.execute import Execution

WARP = 32


@instruction("bar", "barrier")
def _bar(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    is_warp = bool(opcode.take("warp"))
    opcode.take("cta")
    opcode.need("sync")
    opcode.take("aligned")
    if not is_warp and tuple(operands) != ("0",):
        raise PtxError("barriers other than 0, or of some threads, are not known")

    def run(select: Select) -> None:
        threads = execution.threads(select)
        execution.shared.meet(threads, execution.time, is_block=not is_warp)

    if not is_warp:
        return Bound(run, "block")
    return Bound(run, "warp", execution.registers.reader(operands[0], "u32"))


def _source_lanes(
    mode: str, lanes: np.ndarray, pick: np.ndarray, clamp: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return each thread's source lane and whether it is in range, as the PTX manual has it."""
    pick, segment, limit = pick & 31, clamp >> 8 & 31, clamp & 31
    first = lanes & segment
    last = first | (limit & ~segment)
    source = {
        "up": lanes - pick,
        "down": lanes + pick,
        "bfly": lanes ^ pick,
        "idx": first | (pick & ~segment),
    }[mode]
    inside = source >= last if mode == "up" else source <= last
    return np.where(inside, source, lanes), inside


@instruction("shfl")
def _shfl(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    opcode.need("sync")
    mode, kind = opcode.need("idx", "up", "down", "bfly"), opcode.type()
    target, _, inside_target = operands[0].partition("|")
    registers = execution.registers
    read = registers.reader(operands[1], kind)
    picks, clamps = (registers.reader(operand, "s32") for operand in operands[2:4])
    write, write_inside = (
        registers.writer(name or "_", type_)
        for name, type_ in ((target, kind), (inside_target, "pred"))
    )

    def run(select: Select) -> None:
        threads = execution.threads(select)
        lanes = execution.lanes[threads]
        source, inside = _source_lanes(mode, lanes, picks(select), clamps(select))
        givers = threads - lanes + source
        values = np.zeros(execution.num_threads, DTYPES[kind])
        is_here = np.zeros(execution.num_threads, bool)
        values[select], is_here[select] = read(select), True
        if not is_here[givers].all():
            raise PtxError("a shuffle asks a lane that is not there")
        write(select, values[givers])
        write_inside(select, inside)

    return Bound(run, "warp", registers.reader(operands[4], "u32"))


@instruction("vote", "activemask")
def _vote(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    registers = execution.registers
    if opcode.name == "activemask":
        opcode.need("b32")
        write = registers.writer(operands[0], "u32")
        return Bound(lambda select: write(select, execution.lane_masks(execution.threads(select))))
    opcode.need("sync")
    mode, kind = opcode.need("any", "all", "uni", "ballot"), opcode.need("pred", "b32")
    read, mask = registers.reader(operands[1], "pred"), registers.reader(operands[2], "u32")
    write = registers.writer(operands[0], kind)

    def run(select: Select) -> None:
        threads = execution.threads(select)
        votes = execution.lane_masks(threads, np.broadcast_to(read(select), threads.shape))
        members = execution.lane_masks(threads)
        result = {
            "any": votes != 0,
            "all": votes == members,
            "uni": (votes == members) | (votes == 0),
            "ballot": votes,
        }[mode]
        write(select, result)

    return Bound(run, "warp", mask)


@instruction("match")
def _match(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    opcode.need("any")
    opcode.need("sync")
    kind = opcode.type()
    read = execution.registers.reader(operands[1], kind)
    write = execution.registers.writer(operands[0], "u32")

    def run(select: Select) -> None:
        threads = execution.threads(select)
        values = np.broadcast_to(read(select), threads.shape)
        masks = np.empty(threads.shape, np.uint32)
        for value in np.unique(values):
            same = values == value
            masks[same] = execution.lane_masks(threads, same)[same]
        write(select, masks)

    return Bound(run, "warp", execution.registers.reader(operands[2], "u32"))


@instruction("redux")
def _redux(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    opcode.need("sync")
    operate, kind = REDUCTIONS[opcode.need(*REDUCTIONS)], opcode.type()
    read = execution.registers.reader(operands[1], kind)
    write = execution.registers.writer(operands[0], kind)

    def run(select: Select) -> None:
        threads = execution.threads(select)
        values = np.broadcast_to(read(select), threads.shape)
        warps, first = np.unique(execution.warps[threads], return_index=True)
        totals = operate.reduceat(values, first)
        write(select, totals[np.searchsorted(warps, execution.warps[threads])])

    return Bound(run, "warp", execution.registers.reader(operands[2], "u32"))


def _all_lanes(select: Select) -> np.ndarray:
    return np.uint32(0xFFFFFFFF)


@instruction("mma")
def _mma(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    """Sums in float64, rounded once: the hardware's order and rounding are its own."""
    for modifier in ("sync", "aligned", "m16n8k16", "row", "col", "f32"):
        opcode.need(modifier)
    kind = opcode.need("bf16", "f16")
    opcode.need(kind)
    opcode.need("f32")
    registers = execution.registers
    read_a, read_b = (
        [registers.reader(name, "u32") for name in vector(operand)] for operand in operands[1:3]
    )
    read_c = [registers.reader(name, "f32") for name in vector(operands[3])]
    write = [registers.writer(name, "f32") for name in vector(operands[0])]
    widen = from_bfloat16 if kind == "bf16" else lambda bits: bits.view(np.float16)

    def words(readers: Sequence[Callable], select: Select, size: int) -> np.ndarray:
        """Fragments [warp, group, place, word]: of lane 4 * group + place."""
        columns = [np.broadcast_to(read(select), (size,)) for read in readers]
        return np.stack(columns, -1).reshape(-1, 8, 4, len(readers))

    def halves(values: np.ndarray) -> np.ndarray:
        """Words [..., word] to the two numbers of each [..., word, 2]."""
        pairs = np.ascontiguousarray(values).view(np.uint16).reshape(*values.shape, 2)
        return widen(pairs).astype(np.float64)

    def run(select: Select) -> None:
        size = execution.threads(select).size
        # Rows group and group + 8 alternate, then the upper half of k: [w, g, p, k/8, row/8, 2].
        a = halves(words(read_a, select, size)).reshape(-1, 8, 4, 2, 2, 2)
        a = a.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)
        b = halves(words(read_b, select, size)).transpose(0, 1, 3, 2, 4).reshape(-1, 8, 16)
        # Each lane has two columns of row group, then of row group + 8: [w, g, p, row/8, 2].
        product = (a @ b.transpose(0, 2, 1)).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
        sums = words(read_c, select, size) + product.reshape(-1, 8, 4, 4)
        for i, write_sum in enumerate(write):
            write_sum(select, canonical(sums[..., i].astype(np.float32).ravel()))

    return Bound(run, "warp", _all_lanes)


@instruction("ldmatrix")
def _ldmatrix(execution: "Execution", opcode: Opcode, operands: Sequence[str]) -> Bound:
    """Eight rows of 16 bytes a matrix; lane l gives the address of row l % 8 of matrix l / 8."""
    for modifier in ("sync", "aligned", "m8n8"):
        opcode.need(modifier)
    count = int(opcode.need("x1", "x2", "x4")[1:])
    is_transposed = bool(opcode.take("trans"))
    opcode.need("shared", "shared::cta")
    opcode.need("b16")
    access = SharedAccess(execution, opcode)
    addresses = address_reader(execution, operands[1])
    writers = [execution.registers.writer(name, "u32") for name in vector(operands[0])]

    def run(select: Select) -> None:
        threads = execution.threads(select)
        asks = execution.lanes[threads] < 8 * count
        offsets = access.offsets(threads[asks], addresses(select)[asks], 16, writes=False)
        rows = execution.shared.content[offsets[:, None] + np.arange(16)].view(np.uint16)
        matrices = rows.reshape(-1, count, 8, 8)
        if is_transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, WARP)
        for i, write in enumerate(writers):
            write(select, words[:, i].ravel())

    return Bound(run, "warp", _all_lanes)
