"""Run a few lines of PTX on arrays, for the interpreter's own tests."""

from collections.abc import Sequence

import numpy as np

from tests.kernels.ptx.execute import Execution, Launch
from tests.kernels.ptx.memory import Memory
from tests.kernels.ptx.parse import Module
from tests.kernels.ptx.registers import DTYPES

_TEMPLATE = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry snippet({parameters})
{{
.reg .pred %p<8>;
.reg .b16 %rs<24>;
.reg .b32 %r<24>;
.reg .b64 %rd<24>, %address;
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""


def run(
    body: str,
    *arrays: np.ndarray,
    threads: int = 32,
    blocks: int = 1,
) -> tuple[list[np.ndarray], Execution]:
    """Run a kernel with %rd0, %rd1 and so on pointing to copies of the arrays, %r0 the thread.

    Returns:
        What the arrays then are, and the execution with its counts.
    """
    places = range(len(arrays))
    text = _TEMPLATE.format(
        parameters=", ".join(f".param .u64 a{i}" for i in places),
        loads="\n".join(f"ld.param.u64 %rd{i}, [a{i}];" for i in places),
        body=body,
    )
    memory = Memory()
    allocations = [memory.place(f"a{i}", arrays[i], writable=True) for i in places]
    arguments = tuple(a.address.to_bytes(8, "little") for a in allocations)
    launch = Launch("snippet", blocks, threads, arguments)
    execution = Execution(Module(text), launch, memory).run()
    return [
        allocation.content.view(array.dtype).reshape(array.shape)
        for allocation, array in zip(allocations, arrays, strict=True)
    ], execution


def _register(kind: str, index: int) -> str:
    prefix = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}[DTYPES[kind].itemsize]
    return f"{prefix}{index}"


def apply(
    opcode: str, sources: Sequence[str], result: str, *columns: Sequence, more: str = ""
) -> np.ndarray:
    """Run one instruction on columns of values, a thread each.

    Args:
        opcode: With its modifiers.
        sources: The types of its source registers.
        result: The type of its result.
        columns: A value a thread for each source, of its type.
        more: Operands behind the sources.
    """
    count = -(-len(columns[0]) // 32) * 32
    arrays = [
        np.resize(np.asarray(c, DTYPES[k]), count) for c, k in zip(columns, sources, strict=True)
    ]
    lines, names = [], []
    for i, kind in enumerate((*sources, result)):
        size = DTYPES[kind].itemsize
        address = f"mad.wide.u32 %address, %r0, {size}, %rd{i};"
        name = _register(kind, 12 + i)
        if i < len(sources):
            lines += [address, f"ld.global.u{8 * size} {name}, [%address];"]
            names.append(name)
        else:
            operands = ", ".join([name, *names] + [more] * bool(more))
            lines += [
                f"{opcode} {operands};",
                address,
                f"st.global.u{8 * size} [%address], {name};",
            ]
    after, _ = run("\n".join(lines), *arrays, np.zeros(count, DTYPES[result]), threads=count)
    return after[-1][: len(columns[0])]
