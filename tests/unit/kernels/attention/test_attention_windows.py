"""Windows, chunks, caps, sinks and short values in the kernels and the loop of tree attention."""

from functools import partial
from itertools import product

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.kernels.attention_cases import attention_case, laid_out
from helpers.targets import slow, values
from property_cases import CASES, PROPERTIES, no_farther_than_the_reference, property_case
from test_exact_attention import same_bits

from csd.kernels.attention import tree_attention, tree_attention_triton
from csd.kernels.attention.cpu import attention
from csd.kernels.attention.layer import LayerAttention
from csd.kernels.attention.reference import Properties, tree_attention_ref
from csd.kernels.attention.triton.exact import exact_attention_triton
from csd.kernels.attention.triton.first_keys import (
    FirstKeys,
    first_keys,
    first_keys_ref,
    first_keys_triton,
)
from csd.kernels.attention.triton.plan import (
    plan_attention,
    plan_attention_ref,
    plan_attention_triton,
)
from csd.kernels.ops import exact_triton, triton

pytestmark = pytest.mark.compiled


def on_gpu(attend):
    return lambda **case: attend(**laid_out(case))


KERNELS = {"kernel": on_gpu(tree_attention_triton), "exact": on_gpu(exact_attention_triton)}


# every property in a case with all kinds of sources, and all of them at once in the others
CALLS = [("groups-out-of-order", named) for named in PROPERTIES if named != "none"]
CALLS += [(name, "all") for name in CASES if name != CALLS[0][0]]


@pytest.mark.parametrize(
    "name,named",
    [
        pytest.param(*call, marks=() if call in CALLS else slow)
        for call in product(CASES, PROPERTIES)
    ],
)
def test_loop_in_float64(name, named):
    case, want = property_case(name, named)
    torch.testing.assert_close(attention.tree_attention(**case), want)


@pytest.mark.parametrize("named", ["cap", "sinks", "all"])
def test_loop_in_float32(named):
    case, want = property_case("groups-out-of-order", named, dtype=torch.float32)
    out = torch.full(want.shape, float("nan"))
    assert attention.tree_attention(**case, out=out) is out
    no_farther_than_the_reference(out, case, want)


@pytest.mark.parametrize("shares", [(1, 3), (2, 9)], ids=str)
def test_a_part_of_the_loop_may_begin_within_a_tree(monkeypatch, shares):
    """Its rows see less than the tree's root."""
    for name, named in (("groups-out-of-order", "window-7"), ("64-nodes", "window-1")):
        case, want = property_case(name, named)
        monkeypatch.setattr(attention, "shares", lambda *_: shares)
        torch.testing.assert_close(attention.tree_attention(**case), want)


@values
@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name,named", CALLS)
def test_kernels(name, named, attend, poison):
    case, want = property_case(name, named, dtype=torch.float32)
    no_farther_than_the_reference(attend(**case), case, want)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("heads,D,size", [((7, 1), 128, 64), ((2, 2), 64, 96)], ids=str)
def test_kernels_in_sixteen_bits(heads, D, size, attend, poison):
    case, want = property_case(
        "groups-out-of-order", "all", heads, torch.float16, D, value_dim=size, softcap=20.0
    )
    no_farther_than_the_reference(attend(**case), case, want)


EACH = pytest.mark.parametrize(
    "attend", [attention.tree_attention, *KERNELS.values()], ids=["loop", *KERNELS]
)


@pytest.mark.parametrize(
    "attend",
    [attention.tree_attention, *(pytest.param(f, marks=slow) for f in KERNELS.values())],
    ids=["loop", *KERNELS],
)
def test_another_property_gives_another_result(attend):
    """A border that is off by one, no sinks, another cap: what the tests above must notice."""
    case, want = property_case("groups-out-of-order", "all", dtype=torch.float32)
    for other in (dict(window=19), dict(window=21), dict(sinks=None), dict(softcap=2.1)):
        with pytest.raises(AssertionError, match="error"):
            no_farther_than_the_reference(attend(**case | other), case, want)


def behind(case, window):
    """The case with NaN in all pages that no row's window reaches, absent from the tables."""
    case = case | {x: case[x].clone() for x in ("prompt_pages", "slot_pages", "k_pages", "v_pages")}
    layout = laid_out(case)["layout"]
    pages = first_keys_ref(layout, window, None).page.tolist()
    tables = [*case["prompt_pages"], *case["slot_pages"]]
    for table, first in zip(tables, pages, strict=True):
        for page in table[:first].tolist():
            case["k_pages"][page] = case["v_pages"][page] = float("nan")
        table[:first] = -1
    assert sum(pages) > 3
    return case


@EACH
def test_pages_behind_every_window_are_not_read(attend):
    where = dict(trees=[{0: 3, 1: 2}, {2: 4}], prompt=[300, 80], committed=[70, 3, 210])
    case = attention_case(**where, heads=(2, 1), dtype=torch.float32) | {"window": 50}
    assert torch.equal(attend(**behind(case, 50)), attend(**case))


@pytest.mark.parametrize("programs", [1, 2, 9])
def test_any_number_of_programs(programs, poison):
    case, want = property_case("groups-out-of-order", "window-100", dtype=torch.float32)
    layout = laid_out(case)["layout"]
    work = plan_attention(layout, 6, 2, programs, window=100)
    got = tree_attention_triton(**laid_out(case), work=work)
    no_farther_than_the_reference(got, case, want)


@values
@pytest.mark.parametrize("reach", [(1, None), (7, None), (100, None), (None, 8), (None, 64)])
@pytest.mark.parametrize("name", CASES)
def test_first_keys(name, reach, poison):
    layout = laid_out(attention_case(**CASES[name], heads=(2, 1)))["layout"]
    want, got = first_keys_ref(layout, *reach), first_keys_triton(layout, *reach)
    rows, groups = layout.slot >= 0, layout.group_start.diff() > 0
    sources = torch.cat((groups, layout.slot_nodes > 0))
    for x, y, there in zip(got, want, (rows, rows, sources), strict=True):
        assert torch.equal(x[there], y[there])
    # and by the definition: each node of a path, each key before it
    for m in rows.nonzero()[:, 0].tolist():
        s, word = int(layout.slot[m]), int(layout.ancestors[m]) % 2**64
        g = int((layout.group_start[1:] <= m).sum())
        before = int(layout.prompt_len[g]) + int(layout.slot_len[s])
        at = before + word.bit_count() - 1
        window, chunk = reach[0] or 1 << 40, reach[1] or 1 << 40
        path = [j for j in range(64) if word >> j & 1]
        shown = [p for p in range(at + 1) if at - p < window and p // chunk == at // chunk]
        assert int(want.row[m, 0]) == shown[0]
        seen = int(want.seen[m]) % 2**64
        assert [j for j in range(64) if seen >> j & 1] == [
            j for i, j in enumerate(path) if before + i >= shown[0]
        ]


@pytest.mark.parametrize("programs", [1, 5])
def test_the_plan_begins_at_the_first_page_that_a_row_sees(programs):
    layout = laid_out(
        attention_case([{0: 3, 1: 2}, {2: 4}], [400, 80], [70, 3, 210], heads=(2, 1))
    )["layout"]
    page = first_keys_ref(layout, 90, None).page
    # 470 - 90 and 403 - 90 + 1, 290 - 90
    assert page.tolist() == [4, 2, 0, 0, 1]
    plain, work = (plan_attention_ref(layout, 2, 1, programs, x) for x in (None, page))
    got = plan_attention_triton(layout, 2, 1, window=90)
    assert torch.equal(got.program, plan_attention_ref(layout, 2, 1, page=page).program)
    units = [sum(int(x[4] - x[3]) for x in w.segment if x[0] >= 0) for w in (plain, work)]
    # of two tiles' prompts, and of the slots: what is left out
    assert units[0] - units[1] == 4 + 2 + 1
    low = {}
    for _, _, source, first, *_ in (x.tolist() for x in work.segment if x[0] >= 0):
        low[source] = min(low.get(source, 99), first)
    assert low == {0: 4, 2: 0, 3: 0, 4: 1}


def how(window=None, chunk=None, softcap=None, heads=6):
    sinks = torch.linspace(-2, 3, heads)
    return dict(window=window, chunk=chunk, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("generated", [18, 82, 210])
@pytest.mark.parametrize("reach", [dict(window=7), dict(window=100), dict(chunk=64)], ids=str)
def test_a_row_of_the_loop_has_the_same_bits_in_any_step(generated, reach):
    attend = partial(attention.tree_attention, **how(**reach, softcap=3.0))
    assert all(same_bits(generated, torch.float32, attend=attend))


def test_without_a_host_read():
    """A step's layers, with two windows, a cap and sinks: what a CUDA graph must hold."""
    case, _ = property_case("empty-committed", "none", dtype=torch.float32)
    layout = laid_out(case)["layout"]._asdict()
    layers = [
        case[x][None].expand(3, *[-1] * case[x].dim())
        for x in ("node_k", "node_v", "k_pages", "v_pages")
    ]
    sinks = torch.zeros(6)
    for ops in (triton(), exact_triton()):
        attend = LayerAttention(
            ops.tree_attention, *layers, layout, None, 0.4, plan=ops.plan_attention
        )
        want = []
        for mode in (torch.no_grad(), NoHostReads()):
            attend.works.clear()
            with mode:
                found = [
                    attend(0, case["q"], None, Properties(2, 16, 16, 0.4, window=7)),
                    attend(1, case["q"], None, Properties(2, 16, 16, 0.4, chunk=8, softcap=2.0)),
                    attend(2, case["q"], None, Properties(2, 16, 16, -0.4, window=7), sinks),
                ]
            # one work list for the two layers of one window
            assert len(attend.works) == 2
            want = want or found
            assert all(map(torch.equal, found, want))


def test_the_reference_reads_the_host():
    """The control of the test above."""
    case, _ = property_case("groups-out-of-order", "window-7", dtype=torch.float32)
    with pytest.raises(AssertionError, match="reads the device"), NoHostReads():
        q = case["q"]
        q[case["slot"] >= 0]


def test_operators():
    case, _ = property_case("groups-out-of-order", "all", dtype=torch.float32)
    for key in ("q", "node_k", "node_v", "k_pages", "v_pages"):
        case[key] = case[key].nan_to_num()
    properties = [case.pop(x, None) for x in ("window", "chunk", "softcap", "sinks")]
    named = dict(zip(("window", "chunk", "softcap", "sinks"), properties, strict=True))
    want = tree_attention_ref(**case, **named)
    torch.testing.assert_close(tree_attention(**laid_out(case), **named), want)
    out, op = torch.empty_like(want), torch.ops.csd
    torch.library.opcheck(op.tree_attention.default, (*case.values(), [], out, *properties))
    torch.library.opcheck(op.exact_attention.default, (*case.values(), [], out, *properties))
    layout = laid_out(case)["layout"]
    torch.library.opcheck(op.first_keys.default, (*layout, 20, None))
    assert isinstance(first_keys(layout, 20), FirstKeys)


def test_errors():
    case, _ = property_case("groups-out-of-order", "none", dtype=torch.float32)
    case = laid_out(case)
    for name, value, message in (
        ("window", 0, "window must be positive or None, got 0"),
        ("chunk", -3, "chunk must be positive or None, got -3"),
        ("softcap", 0.0, r"softcap must be positive or None, got 0\.0"),
        ("sinks", torch.zeros(5), r"sinks must have shape \(6,\), got \(5,\)"),
        (
            "work",
            plan_attention(case["layout"], 6, 2, window=7),
            "work must be made with the window=None and chunk=None",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tree_attention(**case | {name: value})
