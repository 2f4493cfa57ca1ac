"""Run a few lines of PTX on arrays, for the interpreter's own tests."""

import random
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


ORDERED = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


def compare(opcode: str, kind: str, x, y) -> list[int]:
    """Run a setp and return its two predicates as bits 0 and 1."""
    prefix = "%rd" if bits_of(kind) == 64 else "%r"
    size = bits_of(kind) // 8
    body = f"""
        mad.wide.u32 %address, %r0, {size}, %rd0; ld.global.b{8 * size} {prefix}10, [%address];
        mad.wide.u32 %address, %r0, {size}, %rd1; ld.global.b{8 * size} {prefix}11, [%address];
        setp.ne.b32 %p3, %r0, 5;
        {opcode} %p1|%p2, {prefix}10, {prefix}11{", %p3" if ".and" in opcode else ""};
        selp.u32 %r12, 1, 0, %p1; selp.u32 %r13, 2, 0, %p2; or.b32 %r12, %r12, %r13;
        mad.wide.u32 %address, %r0, 4, %rd2; st.global.u32 [%address], %r12;
    """
    out = np.zeros(len(x), np.uint32)
    return run(body, np.asarray(x), np.asarray(y), out, threads=len(x))[0][2].tolist()


def bits_of(kind: str) -> int:
    return 8 * DTYPES[kind].itemsize


def signed(value: int, kind: str) -> int:
    """Read a word as its type does."""
    top = 1 << bits_of(kind)
    value %= top
    return value - top if kind[0] == "s" and value >= top // 2 else value


def integers(kind: str, count: int = 400, small: int = 0) -> list[int]:
    """Draw words of all sizes, or below `small`, with the extremes."""
    generator = random.Random(f"{kind} {small}")
    if small:
        return [generator.randrange(small) for _ in range(count)]
    width = bits_of(kind)
    edges = [0, 1, 2, (1 << width - 1) - 1, 1 << width - 1, (1 << width) - 1]
    drawn = [generator.getrandbits(generator.randint(1, width)) for _ in range(count)]
    words = [generator.choice([drawn[i], edges[i % len(edges)]]) for i in range(count)]
    return [signed(word, kind) for word in words]


def floats(count: int = 600, seed: int = 0) -> np.ndarray:
    """Draw float32 of all sizes, with NaNs, infinities, zeros and subnormals."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 1 << 32, count, np.uint32)
    edges = [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001]
    edges += [0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0xFFFFFFFF]
    values[generator.random(count) < 0.4] = 0
    values = np.where(values == 0, generator.choice(np.array(edges, np.uint32), count), values)
    near = generator.random(count) < 0.3
    # Neighbours of 1, whose sums and products round in every way.
    values[near] = 0x3F800000 + generator.integers(-999, 999, int(near.sum()))
    return values.view(np.float32)
