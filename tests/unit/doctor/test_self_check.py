"""`csd doctor` passes here, and names an operation that is wrong."""

import json
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.targets import slow

from csd.cli.main import main
from csd.doctor import SMALL, CheckSizes, run
from csd.doctor import compare as operations
from csd.doctor.cases import CASES, run_properties
from csd.doctor.compare import Difference, differences, tensors
from csd.doctor.report import Check, Report
from csd.engine.results.result import Sample
from csd.kernels.layers.rms_norm import rms_norm_ref
from csd.kernels.ops import FusedOp, reference
from csd.models import exact_products
from csd.utils.phases import showing

TINY = CheckSizes(prompt=70, prefill_chunk=64, tokens=4, rows=16)


def check(device, dtype=torch.float32, sizes=TINY, **options):
    return run.check(device, dtype, sizes=sizes, **options)


def spoil_integers(result):
    result.token[:1] += 1


def spoil_floats(result):
    result[0, 0] *= 1.5


WRONG = {
    "rms_norm": lambda r: spoil_floats(r[0]),
    "tree_attention": lambda r: r[0, 0].mul_(1.5),
    "swiglu": spoil_floats,
    "draft_tree": spoil_integers,
}


@pytest.fixture
def spoiled(monkeypatch):
    """spoiled(name): that operation gives wrong results from its second call on."""

    def spoil(name, call=None):
        right, calls = getattr(reference(), name), []

        def wrong(*args, **options):
            result = right(*args, **options)
            calls.append(1)
            if len(calls) > 1:
                WRONG[name](result) if call is None else call()
            return result

        ops = replace(reference(), **{name: wrong})
        for place in ("engine.resources.model", "doctor.run"):
            monkeypatch.setattr(f"csd.{place}.choose", lambda *_: ops)

    return spoil


def noting_copies(patch):
    """Bytes of each shape that a check copies."""
    copied, to_cpu = {}, operations.to_cpu

    def noted(x):
        copied[tuple(x.shape)] = x.numel() * x.element_size()
        return to_cpu(x)

    patch.setattr(operations, "to_cpu", noted)
    return copied


@pytest.fixture(scope="module")
def passed():
    """A check in float32: its report, the bytes of each shape that it copies, and its lines."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stderr(StringIO()) as lines,
        showing(True),
    ):
        copied = noting_copies(patch)
        report = check("cpu")
    return SimpleNamespace(report=report, copied=copied, lines=lines.getvalue().splitlines())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_this_machine_passes(dtype, passed):
    report = passed.report if dtype == torch.float32 else check("cpu", dtype)
    assert not report.failed, report.table()
    names = {"verify", "draft_tree", "prompt_attention", "reached: pools of 16 rows"}
    names |= {f"tree_attention with {case}" for case in CASES}
    assert names <= {c.name for c in report.checks}
    exact = dtype == torch.float32
    assert ("steps of fixed shape" in {c.name for c in report.checks}) is exact
    assert all(c.worst <= 1 for c in report.checks)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=slow)])
def test_the_embedding_is_not_copied(exact, passed, monkeypatch):
    """A large one has gigabytes, and every pass reads a few rows of it."""
    copied = passed.copied
    if exact:
        copied = noting_copies(monkeypatch)
        assert not check("cpu", exact=True).failed
    assert (TINY.rows, SMALL.hidden) in copied
    assert (SMALL.vocab, SMALL.hidden) not in copied


@pytest.mark.parametrize("written", [False, True], ids=["read wrongly", "written"])
def test_rows_of_the_embedding_are_compared(written):
    table, rows = torch.randn(9, 4), torch.tensor([3, -1, 8], dtype=torch.int32)

    def wrong(x, weight, eps, rows):
        result = rms_norm_ref(x, weight, eps, rows=rows if written else rows.flip(0))
        if written:
            x[8] += 1
        return result

    for own, passes in ((rms_norm_ref, True), (wrong, False)):
        row = Check("rms_norm")
        operations.compared(own, rms_norm_ref, row)(table, torch.ones(4), 1e-5, rows=rows)
        assert row.passed == passes, row


@slow
def test_engines_with_exact_are_checked_in_low_precision(monkeypatch):
    report = check("cpu", torch.bfloat16, exact=True)
    assert not report.failed, report.table()
    assert "drafted against plain tokens" in {c.name for c in report.checks}

    def by_rows(product, blocks, x, weight, bias):
        # larger steps have other logits, near enough for each operation alone
        return product(x, weight, bias) * (1 + 0.2 * (x.shape[0] > 3))

    monkeypatch.setattr(exact_products, "in_blocks", by_rows)
    # which the loops of products do not go through
    monkeypatch.setattr(run, "pack", lambda decoder: None)
    monkeypatch.setattr("csd.kernels.layers.cpu.linear.multiplies", lambda dtype: False)
    failed = {c.name for c in check("cpu", torch.bfloat16, exact=True).failed}
    # a padded step is larger too
    assert "drafted against plain tokens" in failed
    assert failed <= {"drafted against plain tokens", "steps of fixed shape"}


PROPERTIES = {
    "a window": dict(window=None),
    "a window shorter than a path": dict(window=4),
    "chunks": dict(chunk=None),
    "a cap": dict(softcap=None),
    "sinks": dict(sinks=None),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_that_attention_leaves_out_is_named(name):
    right, change = reference().tree_attention, PROPERTIES[name]
    (field,) = change

    def wrong(*args, **options):
        # plain calls have none of these
        drops = options.get(field) is not None
        return right(*args, **options | (change if drops else {}))

    checks = {case: Check(f"tree_attention with {case}") for case in CASES}
    attention = {case: operations.compared(wrong, right, row) for case, row in checks.items()}
    run_properties(reference(), SMALL, torch.device("cpu"), torch.float32, attention)
    failed = [case for case, row in checks.items() if not row.passed]
    # a case without the property is computed right; all cases have sinks
    assert name in failed and all(field in CASES[case] or field == "sinks" for case in failed)


# what else spoils them is tested above
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=slow if x in ("swiglu", "rms_norm") else ()) for x in WRONG]
)
def test_a_wrong_operation_is_named(name, spoiled):
    spoiled(name)
    report = check("cpu")
    assert report.failed[0].name == name, report.table()
    assert f"{name} " in report.table() and "FAILED" in report.table()


def test_layers_in_one_call_have_the_bits_of_their_operations(monkeypatch):
    ops = reference()

    def whole(decoder, *args):
        result = decoder.forward(*args, ops)
        result[0, 0] += 1e-3
        return result

    parts = ops.rms_norm, ops.rotary, ops.swiglu, ops.tree_attention
    wrong = replace(ops, fused={"forward": FusedOp(parts, whole)})
    for place in ("engine.resources.model", "doctor.run"):
        monkeypatch.setattr(f"csd.{place}.choose", lambda *_: wrong)
    failed = check("cpu").failed
    assert [c.name for c in failed[:1]] == ["forward"] and "bits differ" in failed[0].error


@pytest.mark.parametrize("name", ["decide", "insert_observed"])
def test_launches_that_do_the_work_of_several_operations_are_checked(name, monkeypatch):
    """References in the place of kernels, of which one makes something of its own."""
    ops, calls = reference(), []

    def whole(*args):
        result = getattr(ops, name)(*args)
        calls.append(1)
        if len(calls) > 2:
            # the verdict's samples, or the table's weights
            (result[0].sample if result else args[0].succ_weight).view(-1)[:1] += 1
        return result

    own = {
        "decide": (ops.verify, ops.advance_slots, ops.snapshot),
        "insert_observed": (ops.observe, ops.graph_insert),
    }
    wrong = replace(ops, fused={name: FusedOp(own[name], whole)})
    for place in ("engine.resources.model", "doctor.run"):
        monkeypatch.setattr(f"csd.{place}.choose", lambda *_: wrong)
    failed = check("cpu").failed
    assert failed[0].name == name and "1 of" in failed[0].error and len(calls) > 2


def test_an_operation_that_raises_is_named(spoiled):
    def fault():
        raise ValueError("misaligned address")

    spoiled("verify", fault)
    failed = check("cpu").failed
    assert [c.error for c in failed if c.name == "verify"] == ["ValueError: misaligned address"]


def test_the_command(capsys, spoiled, monkeypatch, toy_folder):
    monkeypatch.setattr(run, "CheckSizes", lambda: TINY)
    flags = ["doctor", "--device", "cpu", "--dtype", "float32", "--json"]
    assert main([*flags, "--heads", "3", "--kv-heads", "2"]) == 2
    assert "heads must be a multiple of kv_heads" in capsys.readouterr().err
    # a model's own sizes
    checked = []
    monkeypatch.setattr("csd.cli.doctor.check", lambda *_, config, **how: checked.append(config))
    with pytest.raises(AttributeError):
        main([*flags, toy_folder, "--vocab", "77"])
    sizes = json.loads((Path(toy_folder) / "config.json").read_text())
    (config,) = checked
    assert config.heads == sizes["num_attention_heads"] and config.vocab == 77
    assert config.kv_heads == sizes["num_key_value_heads"]
    monkeypatch.setattr("csd.cli.doctor.check", run.check)
    spoiled("swiglu")
    assert main(flags) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and found["reports"][0]["versions"]["torch"] == torch.__version__


def test_a_launch_that_fails_names_its_kernel():
    from csd.kernels.layers.triton.elementwise import swiglu_kernel

    row = Check("swiglu", 1)
    try:
        # Triton takes none of this
        swiglu_kernel[(1,)](nothing=None)
    except Exception as error:
        row.fail(error)
    assert row.error.startswith("swiglu_kernel: "), row.error


def test_unreached_loops_fail():
    # four slots have at most 256
    report = check("cpu", sizes=replace(TINY, tokens=2, rows=257))
    assert [c.name for c in report.failed] == ["reached: pools of 257 rows"], report.table()
    assert "never reached" in report.table()


def drawn(tokens, logprobs, temperature=1.0):
    request = TINY.requests(499)[1]
    request.params = request.params.replace(temperature=temperature)
    for i in request.samples:
        values = [[*tokens], [*logprobs], [*logprobs]] if i == 1 else [[1], [0.0], [0.0]]
        request.progress.finished[i] = Sample(i, None, *values, "length")
    return request


def test_difference_is_the_first_different_token():
    a, b = drawn([3, 4, 5], [-1, -2, -3], 0.0), drawn([3, 9, 7], [-1, -2.5, -3], 0.0)
    assert differences([a], [a]) == []
    assert differences([a], [b]) == [Difference(1, 1, 1, 0.5)]
    assert differences([a], [drawn([3], [-1])])[0].gap == float("inf")
    # the noise of both tokens counts
    assert differences([drawn([4], [-1])], [drawn([9], [-1])])[0].gap > 0.01


@pytest.mark.parametrize("gap, exact", [(1e-9, False), (3.0, False), (1e-9, True)], ids=str)
def test_a_tie_of_two_tokens_is_a_line_and_no_refusal(gap, exact, monkeypatch):
    monkeypatch.setattr(run, "differences", lambda *_: [Difference(1, 2, 3, gap)])
    monkeypatch.setattr(run._Runs, "_draw", lambda *_, **__: [])
    device, dtype = torch.device("cpu"), torch.float32
    runs = run._Runs(SMALL, device, dtype, None, exact, TINY, reference())
    runs._want, runs._coverage.largest_logit = TINY.requests(SMALL.vocab), 30.0
    report = Report("CPU", "float32", "reference", {})
    runs.compare_tokens(report)
    assert [c.name for c in report.checks] == [
        "steps of fixed shape",
        "drafted against plain tokens",
    ]
    if gap < 1 and not exact:
        assert not report.failed and "a tie of two tokens decided sample 2" in report.table()
    else:
        assert "from token 3 on" in report.failed[0].error


def test_tensors_of_records_are_found():
    found = tensors(({"a": torch.ones(1)}, [torch.zeros(2), 3], None))
    assert [x.shape[0] for x in found] == [1, 2]


def test_a_line_is_printed_for_each_operation_at_its_first_comparison(passed, capsys, spoiled):
    """While later calls run, so that a check of a minute is not silent; flushed, for a pipe."""
    own = [line for line in passed.lines if line.endswith(": ok")]
    compared = {c.name for c in passed.report.checks if not c.name.startswith("reached: ")}
    assert {line.split(": ")[1] for line in own} == compared and len(own) == len(compared)
    spoiled("swiglu")
    with showing(True):
        assert check("cpu").failed
    lines = capsys.readouterr().err.splitlines()
    # the second call is wrong
    assert lines.index("csd: swiglu: ok") < lines.index("csd: swiglu: FAILED")
    assert lines.count("csd: swiglu: FAILED") == 1
    with showing(False):
        check("cpu")
    assert capsys.readouterr().err == ""


def test_caches_have_the_checks_own_size(passed):
    """Each comparison copies its arguments, so none may be as large as a free machine allows."""
    # tables of the graph, of 8,192 contexts with 16 tokens and 16 successors
    assert max(passed.copied.values()) <= run.CONTEXTS * 16 * 8


def test_later_calls_are_compared_at_intervals():
    right, seen = rms_norm_ref, []

    def oracle(*args):
        seen.append(1)
        return right(*args)

    row = Check("rms_norm")
    call = operations.compared(right, oracle, row)
    for _ in range(operations.FIRST + 4 * operations.EVERY):
        call(torch.randn(2, 4), torch.ones(4), 1e-5)
    assert row.passed and len(seen) == operations.FIRST + 4
    assert row.calls == operations.FIRST + 4 * operations.EVERY
