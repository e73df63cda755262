"""A wrong operation fails the check of that operation, in every dtype and whatever it returns."""

from dataclasses import replace

import pytest
import torch
from helpers.targets import few

from csd.doctor import SMALL, Check, CheckSizes, run
from csd.doctor.cases import run_states
from csd.doctor.compare import UNCOMPARED, compared, mapped, tensors
from csd.engine.call import RunSettings
from csd.engine.engine import Engine
from csd.kernels.ops import STEP_OPERATIONS, FusedOp, reference, triton
from csd.models.demo import random_decoder

pytestmark = pytest.mark.compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = CheckSizes(prompt=150, prefill_chunk=64, tokens=12, rows=16)
FUSED = {
    "decide": ("verify", "advance_slots", "snapshot"),
    "insert_observed": ("observe", "graph_insert"),
}
NAMES = [*(n for n in STEP_OPERATIONS if n not in UNCOMPARED), *FUSED]
# what computes with floats
KERNELS = ["rms_norm", "rotary", "swiglu", "tree_attention", "verify", "decide"]
PLANS = {"tree_attention": {"work": None}}
CALLS = 2  # of each operation, the last ones


def recorded(calls, name, function):
    def call(*args, **options):
        calls.setdefault(name, []).append(mapped((args, options), torch.clone))
        del calls[name][:-CALLS]
        return function(*args, **options)

    return call


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def calls(request):
    """Arguments of the operations of a few samples, by operation."""
    found, plain = {}, reference()
    each = {name: recorded(found, name, getattr(plain, name)) for name in STEP_OPERATIONS}
    ops = replace(plain, **each)
    decoder = random_decoder(SMALL, "cpu", request.param)
    # each call's arguments are copied: caches and a graph of the samples' own size
    sizes = dict(max_slots=4, prefill_chunk=64, prefix_cache=0.0)
    with Engine(decoder, static=False, exact=False, **sizes) as engine:
        engine.ops = ops
        fused = {
            name: FusedOp(
                tuple(getattr(ops, part) for part in parts),
                recorded(found, name, getattr(plain, name)),
            )
            for name, parts in FUSED.items()
        }
        # parts alone, then what does their work, then all rows, then none but the roots
        whole = replace(ops, fused=fused)
        rows = replace(ops, verify=ops.verify_all)
        for own, nodes in ((ops, 16), (whole, 16), (rows, 16), (ops, 0)):
            engine.ops = own
            requests = SIZES.requests(SMALL.vocab)
            settings = RunSettings(nodes, speculate=nodes > 0, drafter=run.small_graph)
            for _ in engine.run(requests, settings):
                pass
        run.force(engine, requests, SIZES.requests(SMALL.vocab))
    run_states(ops, torch.device("cpu"), request.param)
    return found


def wrong(function):
    """`function` with floats times 1.3 and the next integers, in what it returns or writes."""

    def call(*args, **options):
        before = tensors(mapped((args, options), torch.clone))
        result = function(*args, **options)
        after = tensors((args, options))
        written = [b for a, b in zip(before, after, strict=True) if not torch.equal(a, b)]
        outputs = [*tensors(result), *written]
        floats = [x for x in outputs if x.is_floating_point() and bool((x != 0).any())]
        for x in floats or outputs:
            x.mul_(1.3) if x.is_floating_point() else x.add_(1)
        return result

    return call


@few(2)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_passes_and_times_1_3_fails(name, calls):
    own = triton()
    kernel = own.fused[name].fn if name in own.fused else getattr(own, name)
    plain = replace(reference(), verify=reference().verify_all)
    for change in (lambda x: x, wrong):
        row = Check(name)
        args, options = mapped(calls[name][-1], torch.clone)
        # the references' work list is another
        compared(change(kernel), getattr(plain, name), row)(*args, **options | PLANS.get(name, {}))
        assert row.passed is (change is not wrong), row


@few(12)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_times_1_3_fails(name, calls):
    function = getattr(reference(), name)
    for change in (lambda x: x, wrong):
        row = Check(name.removesuffix("_all"))
        for args, options in mapped(calls[name], torch.clone):
            compared(change(function), function, row)(*args, **options)
        assert row.passed is (change is not wrong), row


def full_pages_broken(attend):
    """Attention whose loop over full pages gives scores of 0 and sevenfold values."""

    def call(q, node_k, node_v, k_pages, v_pages, *rest, **options):
        k, v = k_pages.clone(), v_pages.clone()
        pages, lengths = options["prompt_pages"], options["prompt_len"]
        for ids, length in zip(pages.tolist(), lengths.tolist(), strict=True):
            for page in ids[: length // 64]:
                k[page], v[page] = 0, v[page] * 7
        return attend(q, node_k, node_v, k, v, *rest, **options)

    return call


@few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_that_is_wrong_in_full_pages_fails(dtype, monkeypatch):
    ops = reference()
    broken = replace(ops, tree_attention=full_pages_broken(ops.tree_attention))
    for place in ("engine.resources.model", "doctor.run"):
        monkeypatch.setattr(f"csd.{place}.choose", lambda *_: broken)
    report = run.check("cpu", dtype, sizes=replace(SIZES, tokens=2))
    assert "tree_attention" in {c.name for c in report.failed}, report.table()
