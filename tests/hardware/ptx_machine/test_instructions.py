"""Single instructions, as the PTX manual says, and races written by hand."""

import numpy as np
import pytest
from ptx.machine import Kernel
from ptx.races import MemoryFault
from ptx.text import parse
from ptx.warps import Divergence

pytestmark = pytest.mark.stand_in

HEAD = """
.visible .entry kernel(
	.param .u64 x,
	.param .u64 y
)
.reqntid {threads}
{{
	ld.param.u64 %rd1, [x];
	ld.param.u64 %rd2, [y];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd2, %rd3;
{body}
	ret;
}}
"""


def run(body, threads=32, programs=1, shared=0, seed=0):
    """x and y [64] after a kernel that has their addresses in %rd1 and %rd2, its thread in %r1, its
    program in %r2, and the address of the thread's y in %rd4."""
    x, y = np.zeros((2, 64), np.uint32)
    places = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in (x, y)]
    kernel = Kernel(parse(HEAD.format(threads=threads, body=body)))
    kernel.launch((programs, 1, 1), [a.ctypes.data for a in (x, y)], places, shared, seed)
    return x, y


def bits(number, kind="f"):
    return "0f" + np.float32(number).tobytes()[::-1].hex().upper()


@pytest.mark.parametrize(
    ("instruction", "want"),
    [
        ("bfe.u32 %r9, 0xf0000001, 28, 8", 0xF),
        ("bfe.s32 %r9, 0xf0000001, 28, 8", 0xFFFFFFFF),
        ("bfe.s32 %r9, 0x00000ab0, 4, 4", 0xFFFFFFFB),
        ("bfe.u32 %r9, 0x00000ab0, 4, 8", 0xAB),
        ("bfe.u32 %r9, 0xffffffff, 40, 4", 0),
        ("bfe.u32 %r9, 0xffffffff, 3, 0", 0),
        ("shl.b32 %r9, 3, 31", 0x80000000),
        ("shl.b32 %r9, 3, 32", 0),
        ("shr.u32 %r9, 0x80000000, 40", 0),
        ("shr.s32 %r9, 0x80000000, 40", 0xFFFFFFFF),
        ("mul.hi.s32 %r9, -2, 3", 0xFFFFFFFF),
        ("mul.hi.u32 %r9, 0xffffffff, 0xffffffff", 0xFFFFFFFE),
        ("div.s32 %r9, -7, 2", 0xFFFFFFFD),
        ("rem.s32 %r9, -7, 2", 0xFFFFFFFF),
        ("max.relu.s32 %r9, -3, -2", 0),
        ("min.relu.s32 %r9, 3, 2", 2),
        ("popc.b32 %r9, 0xf0f", 8),
        ("prmt.b32 %r9, 0x33221100, 0x77665544, 0x5410", 0x55441100),
        ("prmt.b32 %r9, 0x000000ff, 0, 0x4448", 0xFF),
        ("add.s32 %r9, 0x7fffffff, 1", 0x80000000),
        (f"max.f32 %r9, {bits(0.0)}, {bits(-0.0)}", 0),
        (f"min.f32 %r9, {bits(0.0)}, {bits(-0.0)}", 0x80000000),
        (f"max.f32 %r9, {bits(np.nan)}, {bits(1.0)}", 0x3F800000),
        (f"cvt.rzi.s32.f32 %r9, {bits(np.nan)}", 0),
        (f"cvt.rzi.s32.f32 %r9, {bits(-1.9)}", 0xFFFFFFFF),
        (f"cvt.rzi.s32.f32 %r9, {bits(1e20)}", 0x7FFFFFFF),
        (f"cvt.rzi.u32.f32 %r9, {bits(-5)}", 0),
        ("cvt.rzi.s32.f64 %r9, 0d7FF8000000000000", 0x80000000),
        (f"cvt.rn.bf16x2.f32 %r9, {bits(1.0)}, {bits(2.0)}", 0x3F804000),
        (f"cvt.rn.f16x2.f32 %r9, {bits(1.0)}, {bits(2.0)}", 0x3C004000),
        ("cvt.u32.u64 %r9, 0x123456789", 0x23456789),
        (f"mul.f32 %r9, {bits(2.0**-100)}, {bits(2.0**-30)}", 1 << 19),
        (f"mul.ftz.f32 %r9, {bits(2.0**-100)}, {bits(2.0**-30)}", 0),
        ("selp.b32 %r9, 5, 6, 0", 6),
        ("mov.b64 %rd9, 0x100000002;\nmov.b64 {%r8, %r9}, %rd9", 1),
        ("{ .reg .b32 a; .reg .b32 b; mov.b32 a, 1; mov.b32 b, 2; add.u32 %r9, a, b; }", 3),
        ("rcp.rn.f64 %rd9, 0d4008000000000000;\nmov.b64 {%r9, _}, %rd9", 0x55555555),
        ("rcp.approx.ftz.f64 %rd9, 0d4008000000000000;\nmov.b64 {%r9, _}, %rd9", 0),
        ("rcp.approx.ftz.f64 %rd9, 0d4028000000000000;\nmov.b64 {_, %r9}, %rd9", 0x3FB55555),
        ("mov.b16 %rs1, 0xffff;\nmul.hi.u16 %rs2, %rs1, %rs1;\ncvt.u32.u16 %r9, %rs2", 0xFFFE),
        ("mov.b16 %rs1, 0x80;\ncvt.s32.s8 %r9, %rs1", 0xFFFFFF80),
        ("redux.sync.add.s32 %r9, 2, 0xffffffff", 64),
        ("redux.sync.max.s32 %r9, %r1, 0xffffffff", 31),
        ("shfl.sync.idx.b32 %r9, %r1, 5, 31, -1", 5),
    ],
    ids=lambda x: x.splitlines()[-1].strip()[:44] if isinstance(x, str) else "",
)
def test_an_instruction(instruction, want):
    _, y = run(f"{instruction};\nst.global.b32 [%rd4+0], %r9;")
    assert hex(y[0]) == hex(want)


@pytest.mark.parametrize(
    ("compare", "want"),
    [
        ("eq", "100"),
        ("ne", "010"),
        ("lt", "010"),
        ("geu", "101"),
        ("neu", "011"),
        ("ltu", "011"),
        ("nan", "001"),
        ("num", "110"),
    ],
)
def test_comparisons_with_nan(compare, want):
    got = ""
    for other in (1.0, 2.0, np.nan):
        body = f"setp.{compare}.f32 %p1, {bits(1.0)}, {bits(other)};\nselp.b32 %r9, 1, 0, %p1;"
        got += str(run(f"{body}\nst.global.b32 [%rd4+0], %r9;")[1][0])
    assert got == want


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("bfly.b32 %r9, %r1, 3, 31, -1", lambda t: t ^ 3),
        ("up.b32 %r9, %r1, 2, 0, -1", lambda t: t - 2),
        ("down.b32 %r9, %r1, 2, 31, -1", lambda t: t + 2),
        ("idx.b32 %r9, %r1, 40, 31, -1", lambda t: 8),
    ],
)
def test_shuffles(shuffle, source):
    _, y = run(f"shfl.sync.{shuffle};\nst.global.b32 [%rd4+0], %r9;")
    assert y[:32].tolist() == [source(t) if 0 <= source(t) < 32 else t for t in range(32)]


@pytest.mark.parametrize(
    "instruction",
    [
        "add.sat.f32 %r9, %r1, %r1",
        "add.rz.f32 %r9, %r1, %r1",
        "cvt.rz.f32.f64 %r9, %rd1",
        "cvt.sat.u8.s32 %r9, %r1",
        "bar.sync 1, 32",
        "prmt.b32.f4e %r9, %r1, %r1, 1",
        "fma.rn.relu.f32 %r9, %r1, %r1, %r1",
        "vote.sync.any.pred %p1, %p2, -1",
    ],
)
def test_unknown_instructions_are_refused(instruction):
    with pytest.raises(NotImplementedError, match=r"here|barrier"):
        run(f"{instruction};")


def test_threads_of_a_warp_that_are_apart_cannot_exchange():
    body = "setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $end;\nredux.sync.add.s32 %r9, 1, -1;\n$end:"
    with pytest.raises(Divergence, match=r"redux\.sync"):
        run(body)


CHANGE = "setp.eq.s32 %p1, %r2, {who};\nmov.b32 %r5, 7;\n@%p1 st.global.b32 [%rd1+0], %r5;\n"
ADD = "atom.global.gpu.relaxed.add.u32 %r6, [%rd1+0], 1;\n"
READ = "ld.global.b32 %r3, [%rd1+0];\n"


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize("first", [READ, "mov.b32 %r4, 5;\nst.global.b32 [%rd1+0], %r4;\n", ADD])
def test_one_of_several_programs_changes_what_all_touched(first, who, seed):
    for body in (first + CHANGE.format(who=who), CHANGE.format(who=who) + first):
        with pytest.raises(MemoryFault, match="nothing keeps them apart"):
            run(body, programs=4, seed=seed)


@pytest.mark.parametrize("seed", [None, 0])
def test_atomic_operations_and_reads_are_apart(seed):
    with pytest.raises(MemoryFault, match="nothing keeps them apart"):
        run(READ + ADD, programs=2, seed=seed)
    assert run(ADD, programs=4, seed=seed)[0][0] == 4 * 32


EXCHANGE = (
    "shl.b32 %r7, %r1, 2;\nst.shared.b32 [%r7+0], %r1;\n{barrier}\nxor.b32 %r8, %r7, 128;\n"
    "ld.shared.b32 %r3, [%r8+0];\nst.global.b32 [%rd4+0], %r3;"
)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_shared_memory_needs_a_barrier(seed):
    _, y = run(EXCHANGE.format(barrier="bar.sync 0;"), threads=64, shared=256, seed=seed)
    assert y.tolist() == [t ^ 32 for t in range(64)]
    with pytest.raises(MemoryFault, match="nothing keeps them apart"):
        run(EXCHANGE.format(barrier=""), threads=64, shared=256, seed=seed)


def test_a_copy_comes_when_it_was_waited_for():
    body = (
        "st.global.b32 [%rd1+0], 9;\nshl.b32 %r7, %r1, 4;\nadd.s64 %rd5, %rd1, 0;\n"
        "setp.eq.s32 %p1, %r1, 0;\nmov.b32 %r8, 0x77;\n@%p1 st.shared.b32 [%r7+0], %r8;\n"
        "cp.async.cg.shared.global [ %r7 + 0 ], [ %rd5 + 0 ], 0x10, 16;\ncp.async.commit_group;\n"
        "{wait}ld.shared.b32 %r3, [%r7+0];\n@%p1 st.global.b32 [%rd4+0], %r3;"
    )
    assert run(body.format(wait=""), shared=512)[1][0] == 0x77
    assert run(body.format(wait="cp.async.wait_group 1;\n"), shared=512)[1][0] == 0x77
    assert run(body.format(wait="cp.async.wait_group 0;\n"), shared=512)[1][0] == 9
