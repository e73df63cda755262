"""The study of the source paper's open checks, its control, and what it measures with."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.models.scripted import PrefixSum, engine
from helpers.targets import few, slow

import csd
from bench.studies.paper import __main__ as study
from bench.studies.paper.agreement import own_tau
from bench.studies.paper.box import Box
from bench.studies.paper.copying import copying
from bench.studies.paper.live import record, true_noise
from bench.studies.paper.measure import figures, likeness, replayed
from bench.studies.paper.record_study import TASKS, TRACES, prompts
from csd.models.demo import toy
from csd.traces.traces import Trace, read_traces

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The file of a quick run, which has the time it needs."""
    path = tmp_path_factory.mktemp("study") / "study.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "BUDGETS", dict.fromkeys(study.BUDGETS, math.inf))
        assert study.main(["--json", str(path), "--quick"]) == 0
    return path


def rows_of(path, section):
    return json.loads(path.read_text())["sections"][section]["rows"]


@slow
def test_every_section_writes_its_results(quick, tmp_path, capsys):
    found = json.loads(quick.read_text())["sections"]
    assert set(found) == set(study.BUDGETS)
    assert all(section["rows"] for section in found.values())
    pytest.importorskip("matplotlib")
    # what is there is not measured again, only drawn
    before = quick.read_text()
    assert study.main(["--json", str(quick), "--quick", "--plots", str(tmp_path)]) == 0
    assert quick.read_text() == before
    names = json.loads(capsys.readouterr().out.splitlines()[-1])["plots"]
    assert len(names) == 3 and all((tmp_path / name).stat().st_size > 1000 for name in names)


def test_strictness_resumes_after_an_interruption(tmp_path, monkeypatch):
    path, counts = tmp_path / "study.json", []
    for seconds in (-1, math.inf, math.inf):
        monkeypatch.setattr(study, "BUDGETS", {"strictness": seconds})
        assert study.main(["--json", str(path), "--quick"]) == 0
        section = json.loads(path.read_text())["sections"]["strictness"]
        counts.append(len(section["rows"]))
        assert section["whole"] == (seconds > 0)
        assert any("left out" in note for note in section["notes"]) == (seconds < 0)
    # the drafters it is measured against, then two settings
    assert counts == [2, 4, 4]
    rows = rows_of(path, "strictness")
    assert len({(r["trace"], r["drafter"], r["knob"], r["value"]) for r in rows}) == 4


@slow
def test_csd_keeps_the_diversity_that_the_control_loses(quick):
    rows = {row["verifier"]: row for row in rows_of(quick, "diversity")}
    plain = rows["plain"]
    for name in ("csd", "paper's tree, loose", "paper's tree, strict"):
        assert rows[name]["equal_to_plain"] == 1
        assert rows[name]["prefix"] == plain["prefix"]
    assert rows["csd"]["tau"] > 1
    assert rows["min(1, q/q_sibling), two in flight"]["prefix"] > plain["prefix"]


@slow
def test_families(quick):
    rows = {row["family"]: row for row in rows_of(quick, "families")}
    assert rows["llama"]["equal_to_plain"] == 1
    assert "'t5' is an encoder-decoder" in rows["t5"]["message"]


def test_sections_without_time_list_omitted_rows():
    box = Box(seconds=-1)
    assert list(box.while_time("things", range(3))) == []
    assert box.notes == ["3 of 3 things left out: no time left"]


def test_the_control_copies_a_sibling_that_has_finished():
    """One in flight after another: each finds the first, and the ratio is 1 all along.

    The last token is behind the last draft, so it is a sample's own.
    """
    model = PrefixSum(sharpness=1.0)
    options = dict(num_samples=4, max_new_tokens=12, seed=2, temperature=1.0)
    one = engine(model, max_slots=1)
    plain = csd.generate(one, [3, 1], speculate=False, **options)
    assert len(set(map(tuple, plain.tokens))) == 4
    with copying(one) as drafter:
        out = csd.generate(one, [3, 1], drafter=drafter, budget=16, **options)
    assert [t[:11] for t in out.tokens] == [plain.tokens[0][:11]] * 4
    # and afterwards the engine does not
    assert csd.generate(one, [3, 1], budget=8, **options).tokens == plain.tokens


def test_likeness():
    same = likeness([[1, 2, 3]] * 3, ["so 4"] * 3)
    assert same == {"distinct": 1, "prefix": 3, "runs": 0, "answers": 1, "entropy": 0}
    text = list(range(20))
    # 9 runs of 12 tokens a sample; the third has its own from the 13th token on
    assert likeness([text, [7, *text[:19]], [*text[:12], *[9] * 8]])["runs"] == pytest.approx(
        (8 + 8 + 1) / 27
    )
    apart = likeness([[1, 2, 3], [1, 2, 4], [2, 2, 3]], ["so 4", "so 5", "so 5"])
    assert apart["distinct"] == 3 and apart["answers"] == 2
    assert apart["prefix"] == pytest.approx(2 / 3)
    assert apart["entropy"] == pytest.approx(0.9183, abs=1e-4)


def cycles(period, count=6):
    """Samples of one problem that go round the same numbers, each from a place of its own."""
    text = [100 * period + i % period for i in range(60)]
    return Trace(period, [1, 2, 3], [text[s : s + 30] for s in range(count)], 0.7, None)


def test_foreign_siblings_are_not_counted_and_do_not_help():
    traces = [cycles(17), cycles(19), cycles(23)]
    kept = own_tau(traces, "consensus", 0, 3)["tau"]
    pooled = figures(
        replayed(
            [replace(t, samples=t.samples[a : a + 3]) for t in traces for a in (0, 3)],
            "consensus",
            3,
            8,
        )
    )
    assert kept == pytest.approx(pooled["tau"])
    alone = own_tau(traces, "consensus", 2, 3)["tau"]
    assert 1 < alone < kept


def test_a_recordings_true_noise_draws_it():
    model, tokenizer = toy()
    options = (3, 20, 0.7)
    _, trace = record(csd.Engine(model, tokenizer=tokenizer), "Count.", *options)
    noise = true_noise(trace)
    found = 0
    for s, (tokens, tops) in enumerate(zip(trace.samples, trace.top, strict=True)):
        for i, (token, (ids, probs)) in enumerate(zip(tokens, tops, strict=True)):
            if token in ids:
                where = torch.tensor([s]), torch.tensor([i]), torch.tensor([ids])
                score = noise(*where)[0] + torch.tensor(probs).double().log()
                assert ids[int(score.argmax())] == token
                found += 1
    assert found > 30


@few(1)
@pytest.mark.parametrize("nodes", [4, 8])
def test_consensus_is_not_below_prompt_lookup_without_agreement(nodes):
    """Open writing at temperature 1.3, with the target's probabilities and without."""
    traces = [t for t in read_traces(TRACES) if str(t.problem).startswith("writing/")]
    traces = [t for t in traces if t.temperature == 1.3][:3]
    assert likeness(traces[0].samples)["distinct"] == 8
    lookup = figures(replayed(traces, "prompt-lookup", 8, nodes))["tau"]
    counts = [replace(t, top=None) for t in traces]
    for known in (traces, counts):
        assert figures(replayed(known, "consensus", 8, nodes))["tau"] >= lookup


def test_the_committed_traces_hold_every_task():
    names = [str(t.problem) for t in read_traces(TRACES)]
    for task in TASKS:
        asked = prompts(task)
        assert len(asked) >= 10
        assert {f"{task}/{i}@0.7" for i in range(len(asked))} <= set(names)
    assert len(names) == len(set(names))
