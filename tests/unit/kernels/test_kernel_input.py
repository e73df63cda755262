"""A tensor of another layout, type or device than a public kernel function takes is refused.

Kernels would read such memory as something else and say nothing.
"""

import random
from copy import copy, deepcopy

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.attention_cases import attention_case, laid_out
from helpers.kernels.commit_cases import commit_case
from helpers.kernels.draft_cases import CONFIG, random_graph, random_slots
from helpers.kernels.elementwise_cases import rotary_case
from helpers.kernels.insert_cases import random_rows, tensors
from helpers.kernels.merge_cases import merge_case
from helpers.kernels.tree_cases import random_logits, trees

from csd.kernels.attention import tree_attention
from csd.kernels.attention.commit_kv import commit_kv
from csd.kernels.attention.layout import ROWS, TreeLayout
from csd.kernels.attention.triton.merge import merge_partials
from csd.kernels.attention.triton.plan import plan_attention, plan_attention_ref
from csd.kernels.draft import _draft_tree, draft_tree
from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotary, rotate
from csd.kernels.layers.swiglu import silu_mul, swiglu
from csd.kernels.table import _graph_insert, graph_insert
from csd.kernels.table.observe import _observe, observe
from csd.kernels.verify import _verify, verify, verify_ref
from csd.kernels.verify.advance_slots import _advance_slots, advance_slots
from csd.kernels.verify.snapshot import _snapshot, snapshot


def attention():
    shape = dict(trees=[{1: 7}, {0: 3}], prompt=[70, 5], committed=[2, 65])
    case = attention_case(**shape, heads=(4, 2), dtype=torch.float32)
    return case | {"out": torch.empty_like(case["q"])}


def attend(**case):
    return tree_attention(**laid_out(case))


def plan():
    case = attention()
    return {name: case[name] for name in ROWS.names} | dict(heads=4, kv_heads=2)


def planned(heads, kv_heads, **rows):
    none = dict.fromkeys(TreeLayout._fields)
    return plan_attention(TreeLayout(**none | rows), heads, kv_heads)


def norm():
    return dict(x=torch.randn(3, 8), weight=torch.randn(8), eps=1e-5, residual=torch.randn(3, 8))


def rotated():
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    return dict(q=q, k=k, cos=torch.randn(3, 8), sin=torch.randn(3, 8))


def gated():
    return dict(gate=torch.randn(3, 8), up=torch.randn(3, 8))


FUNCTIONS = {
    "tree_attention": (attend, attention),
    "plan_attention": (planned, plan),
    "merge_partials": (merge_partials, lambda: merge_case(3)),
    "commit_kv": (commit_kv, lambda: commit_case([0, 63], [3, 1])),
    "rms_norm": (rms_norm, norm),
    "rotary": (rotary, lambda: rotary_case(3, 4, 2, 8, torch.float32, fused=False)),
    "rotate": (rotate, rotated),
    "silu_mul": (silu_mul, gated),
    "swiglu": (swiglu, lambda: dict(gate_up=torch.randn(3, 8))),
}
# read with strides of their own, or of any floating-point type
ANY_LAYOUT = {("rms_norm", "x"), ("rms_norm", "residual")}
ANY_DTYPE = {("merge_partials", "out"), ("swiglu", "gate_up")}


def every_other(x):
    """The same values, a place apart."""
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def other_dtype(x):
    return x.half() if x.is_floating_point() else x.float()


def refused(call, arguments):
    # where it is what the others are compared with, another is named
    with pytest.raises(ValueError, match=r"must (be|have)") as error:
        call(**arguments)
    return str(error.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors(function):
    run, make = FUNCTIONS[function]
    case = make()
    run(**case)
    for name, x in case.items():
        if not isinstance(x, torch.Tensor):
            continue
        if (function, name) not in ANY_LAYOUT:
            assert name in refused(run, case | {name: every_other(x)})
        if (function, name) not in ANY_DTYPE:
            refused(run, case | {name: other_dtype(x)})
        if sum(isinstance(y, torch.Tensor) for y in case.values()) > 1:
            refused(run, case | {name: x.to("meta")})


def test_a_result_whose_rows_lie_apart_is_refused():
    """The kernel writes rows one behind the other."""
    case = attention()
    out = torch.zeros(10, 8, 16)[:, :4]
    assert out[:1].is_contiguous()
    message = refused(attend, case | {"out": out})
    assert message == "out must be contiguous, got strides (128, 16, 1)"


def test_a_work_list_of_other_rows_is_refused():
    case = attention()
    work = plan_attention_ref(laid_out(case)["layout"], 4, 2)
    attend(**case, work=work)
    short = work._replace(merge=work.merge[1:])
    message = refused(attend, case | {"work": short})
    assert message == "work.merge must have shape (10, 4), got (9, 4)"


@pytest.mark.parametrize("programs", [0, -1])
def test_a_work_list_needs_programs(programs):
    with pytest.raises(ValueError, match=f"programs must be at least 1, got {programs}"):
        plan_attention(laid_out(attention())["layout"], 4, 2, programs)


def verified():
    pool, slots = trees(3)
    return pool, slots, random_logits(pool.rows, 97)


def drafted():
    rng = random.Random(1)
    return random_graph(rng).table(), random_slots(rng, 5)


def taken(operator, *records):
    """Fields that the operator takes, by the name of their record."""
    operands = [operand for operand in operator.operands if not isinstance(operand, str)]
    return {o.name: (record, o.names) for o, record in zip(operands, records, strict=True)}


def verify_case():
    pool, slots, logits = verified()
    return lambda: verify(logits, pool, slots), taken(_verify, pool, slots)


def advance_case():
    pool, slots, logits = verified()
    verdict = verify_ref(logits, pool, slots)
    return lambda: advance_slots(slots, verdict), taken(_advance_slots, slots, verdict)


def observe_case():
    pool, slots, logits = verified()
    verdict = verify_ref(logits, pool, slots)
    fields = taken(_observe, pool, slots, verdict)
    return lambda: observe(pool, slots, verdict, CONFIG), fields


def snapshot_case():
    pool, slots, logits = verified()
    verdict = verify_ref(logits, pool, slots)
    return lambda: snapshot(pool, verdict), taken(_snapshot, pool, verdict)


def draft_case():
    table, slots = drafted()
    return lambda: draft_tree(table, slots, 20, CONFIG), taken(_draft_tree, table, slots)


def insert_case():
    table, _ = drafted()
    rows = tensors(random_rows(random.Random(2), 4))
    live = torch.tensor([1])
    call = lambda: graph_insert(table, *rows, live, CONFIG.orders)  # noqa: E731
    return call, taken(_graph_insert, table)


RECORDS = (verify_case, advance_case, observe_case, snapshot_case, draft_case, insert_case)


def test_rows_to_insert_may_have_any_layout():
    table, _ = drafted()
    other = deepcopy(table)
    rows = (*tensors(random_rows(random.Random(2), 4)), torch.tensor([1]))
    graph_insert(table, *rows, CONFIG.orders)
    graph_insert(other, *(every_other(x) for x in rows), CONFIG.orders)
    assert_equal_fields(other, table)
    for i, x in enumerate(rows):
        for bad in (x[None], x.half(), x.to("meta")):
            with pytest.raises(ValueError, match=r"must (be|have)"):
                graph_insert(table, *rows[:i], bad, *rows[i + 1 :], CONFIG.orders)


@pytest.mark.parametrize("make", RECORDS, ids=lambda f: f.__name__)
def test_records(make):
    call, records = make()
    call()
    for of, (record, names) in records.items():
        before = copy(record)
        for name in names:
            x = getattr(before, name)
            for bad in (every_other(x), x[None], x.to("meta"), x.to(torch.complex64)):
                if bad.shape == x.shape == (1,) and not bad.is_meta and bad.dtype == x.dtype:
                    # one element lies nowhere apart
                    continue
                setattr(record, name, bad)
                message = refused(call, {})
                # the others are compared with the first of a record
                assert f"{of}.{name} must" in message or name == names[0], message
            setattr(record, name, x)
    call()
