"""What the interpreter refuses, and what it counts, on a few lines of PTX."""

import numpy as np
import pytest

from tests.kernels.ptx.execute import Execution, Launch
from tests.kernels.ptx.memory import Memory
from tests.kernels.ptx.parse import Module, PtxError
from tests.kernels.ptx.snippets import run

WORDS = np.arange(2048, dtype=np.uint32)
SHARED = ".shared .align 16 .b8 pool[8192];"


def load_of(stride: int, size: int = 4) -> str:
    """A load whose lanes are `stride` bytes apart."""
    target = {4: "u32 %r1", 8: "v2.u32 {%r1, %r2}", 16: "v4.u32 {%r1, %r2, %r3, %r4}"}[size]
    kind, registers = target.split(" ", 1)
    return f"mad.wide.u32 %address, %r0, {stride}, %rd0; ld.global.{kind} {registers}, [%address];"


@pytest.mark.parametrize(
    ("stride", "size", "num_bytes", "sectors", "lines"),
    [
        (4, 4, 128, 4, 1),
        (0, 4, 4, 1, 1),
        (16, 4, 128, 16, 4),
        (32, 4, 128, 32, 8),
        (128, 16, 512, 32, 32),
        (16, 16, 512, 16, 4),
        (16, 8, 256, 16, 4),
    ],
)
def test_sectors_and_lines(stride, size, num_bytes, sectors, lines):
    _, execution = run(load_of(stride, size), WORDS, threads=64)
    (access,) = execution.accesses
    warps = 2 if stride else 1
    assert access.accesses == 2
    counts = access.num_bytes, access.sectors, access.lines
    assert counts == (2 * num_bytes, 2 * sectors, 2 * lines), warps
    assert access.fills_sectors == (num_bytes == 32 * sectors)
    assert not access.is_store


def place_of(stride: int) -> str:
    """Let %rd9 be where a lane is in shared memory, `stride` bytes from the next."""
    return f"mul.wide.u32 %rd9, %r0, {stride}; mov.u64 %rd8, pool; add.s64 %rd9, %rd9, %rd8;"


@pytest.mark.parametrize(
    ("stride", "size", "wavefronts", "ideal"),
    [
        (4, 4, 1, 1),
        (8, 4, 2, 1),
        (12, 4, 1, 1),
        (128, 4, 32, 1),
        (8, 8, 2, 2),
        (16, 16, 4, 4),
        (32, 16, 8, 4),
        (1, 1, 1, 1),
        (2, 2, 1, 1),
    ],
)
def test_wavefronts(stride, size, wavefronts, ideal):
    names = {16: "v4.u32 [%rd9], {%r0, %r0, %r0, %r0}", 8: "v2.u32 [%rd9], {%r0, %r0}"}
    store = names.get(size, f"u{8 * size} [%rd9], %r0")
    _, execution = run(f"{SHARED} {place_of(stride)} st.shared.{store};", WORDS)
    (access,) = execution.accesses
    assert (access.wavefronts, access.ideal_wavefronts) == (wavefronts, ideal)


def test_lanes_that_read_the_same_word_take_one_wavefront():
    body = f"{SHARED} setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [pool], %r0;"
    _, execution = run(body + "bar.warp.sync -1; ld.shared.u32 %r1, [pool];", WORDS)
    access = execution.accesses[-1]
    assert (access.wavefronts, access.ideal_wavefronts, access.num_bytes) == (1, 1, 4)


def test_thread_instructions_are_counted():
    body = "setp.lt.u32 %p1, %r0, 8; @!%p1 bra DONE; add.u32 %r1, %r0, 1; DONE:"
    _, execution = run(body, WORDS, threads=64)
    assert execution.thread_instructions["add.u32"] == 8
    assert execution.thread_instructions["bra"] == 64


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r1, [%rd0+2];", "a misaligned access of 4 bytes"),
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0+8];", "a misaligned access of 16 bytes"),
        ("ld.global.u32 %r1, [%rd0+8192];", "4 bytes at 0x4000 are in no allocation"),
        ("ld.global.u32 %r1, [%rd0+-4];", "are in no allocation"),
        ("ld.shared.u32 %r1, [pool+8192];", "shared memory has no 4 bytes at 0x2000"),
        ("ld.shared.u32 %r1, [pool];", "a read of shared memory that nobody wrote"),
        ("st.shared.u32 [pool], %r0;", "threads write different values to the same place"),
        ("st.global.u32 [%rd0], %r0;", "threads write different values to the same place"),
        ("bar.sync 1;", "barriers other than 0"),
        ("mov.u32 %r1, %clock;", "%clock is no operand that is known"),
        ("add.u32 %r1, %r2, %rs1;", "%rs1 is no u32"),
    ],
)
def test_refusals(body, message):
    with pytest.raises(PtxError, match=message.replace("(", r"\(")):
        run(SHARED + body, WORDS)


UNEVEN = "setp.lt.u32 %p1, %r0, 8;"


@pytest.mark.parametrize(
    "body",
    [
        f"{UNEVEN} @%p1 bra DONE; bar.sync 0; DONE: bar.sync 0;",
        f"{UNEVEN} @%p1 bra DONE; bar.warp.sync 0xffffffff; DONE: bar.sync 0;",
        f"{UNEVEN} @%p1 ret; bar.warp.sync 0xffffffff;",
        f"{UNEVEN} @%p1 ret; shfl.sync.idx.b32 %r1, %r0, 9, 31, 0xffffffff;",
        f"{UNEVEN} @%p1 vote.sync.any.pred %p2, %p1, 0xffffffff;",
    ],
)
def test_a_barrier_that_some_never_reach(body):
    with pytest.raises(PtxError, match="reached by part of its threads"):
        run(body, WORDS)


def test_some_lanes_may_meet_by_themselves_and_threads_may_end_early():
    body = f"""
        {UNEVEN}
        @%p1 bra FEW;
        bra DONE;
        FEW: shfl.sync.bfly.b32 %r0, %r0, 1, 31, 0xff;
        DONE: @!%p1 ret;
        bar.sync 0;
        mad.wide.u32 %address, %r0, 4, %rd0; st.global.u32 [%address], 9;
    """
    (after,), _ = run(body, WORDS, threads=64)
    assert (after[:8] == 9).all()
    assert (after[8:] == WORDS[8:]).all()


def test_a_shuffle_from_a_lane_that_is_not_there():
    body = f"{UNEVEN} @%p1 shfl.sync.idx.b32 %r1, %r0, 9, 31, 0xff;"
    with pytest.raises(PtxError, match="asks a lane that is not there"):
        run(body, WORDS)


def test_a_write_after_another_threads_read_needs_a_barrier():
    fill = f"{SHARED} {place_of(4)} st.shared.u32 [%rd9], %r0; bar.sync 0; xor.b32 %r1, %r0, 32;"
    read = "mul.wide.u32 %rd7, %r1, 4; add.s64 %rd7, %rd7, %rd8; ld.shared.u32 %r2, [%rd7];"
    write = "st.shared.u32 [%rd9], %r2;"
    with pytest.raises(PtxError, match="with no barrier between"):
        run(fill + read + write, WORDS, threads=64)
    with pytest.raises(PtxError, match="with no barrier between"):
        # That of a warp is not enough: lane 0 reads what lane 32 wrote.
        run(fill + read + "bar.warp.sync -1;" + write, WORDS, threads=64)
    run(fill + read + "bar.sync 0;" + write, WORDS, threads=64)


TEXT = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry store(.param .u64 to, .param .u32 value)
{
.reg .b32 %r<4>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [to]; ld.param.u32 %r1, [value];
mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd2, %r2, 0x10000000; add.s64 %rd1, %rd1, %rd2;
st.global.u32 [%rd1], %r1;
ret;
}
"""


def test_some_blocks_of_a_launch_and_a_window_of_a_huge_array():
    memory = Memory()
    start = 1 << 40
    window = memory.place("out", np.zeros(1, np.uint32), start + 20 * 0x10000000, writable=True)
    launch = Launch("store", 32, 32, (start.to_bytes(8, "little"), (7).to_bytes(4, "little")))
    Execution(Module(TEXT), launch, memory, range(20, 21)).run()
    assert window.content.view(np.uint32) == 7
    with pytest.raises(PtxError, match="in no allocation"):
        Execution(Module(TEXT), launch, memory, range(19, 21)).run()


def test_shared_memory_of_a_module_is_of_the_kernels_that_use_it():
    both = TEXT.replace("store(", "other(").split(".address_size 64")[1]
    text = TEXT.replace(".visible", f"{SHARED} .visible") + both
    module = Module(text.replace("ret;", "st.shared.u32 [pool], 1; ret;", 1))
    assert module.kernels["store"].shared.offsets == {"pool": 0}
    assert not module.kernels["other"].shared.offsets


def test_what_is_read_only_stays_so():
    memory = Memory()
    place = memory.place("weight", np.zeros(1, np.uint32)).address.to_bytes(8, "little")
    launch = Launch("store", 1, 32, (place, bytes(4)))
    with pytest.raises(PtxError, match="a store to weight, which is read only"):
        Execution(Module(TEXT), launch, memory).run()


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch("load", 1, 32, ()), "the module has no kernel load"),
        (Launch("store", 1, 32, (bytes(8),)), r"store takes arguments of \[8, 4\] bytes"),
        (Launch("store", 1, 33, (bytes(8), bytes(4))), "33 threads are no whole warps"),
    ],
)
def test_launches_that_do_not_fit(launch, message):
    with pytest.raises(PtxError, match=message):
        Execution(Module(TEXT), launch, Memory())


def test_allocations_do_not_overlap():
    memory = Memory()
    memory.place("first", WORDS, 1 << 20)
    with pytest.raises(ValueError, match="below the end of another"):
        memory.place("second", WORDS, (1 << 20) + 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ret;\n}", "ret;\n", "a brace is never closed"),
        ("ret;\n}", "ret\n}", "no statement of PTX"),
        (".param .u64 to", ".param .texref to", ".texref is no type that is known"),
        (".visible", ".global .surfref x; .visible", ".surfref is no type that is known"),
        (".visible", ".global .b64 x[1] = {generic(y)}; .visible", "no numbers"),
        (".reg .b64 %rd<4>;", ".reg .b64 %r<4>;", "%r0 is declared twice, with two types"),
    ],
)
def test_text_that_is_no_ptx(old, new, message):
    assert old in TEXT
    with pytest.raises(PtxError, match=message):
        Module(TEXT.replace(old, new))
