"""Many prompts through few slots: who is drawn when changes drafts, not samples."""

import json

import pytest
from helpers.models.scripted import VOCAB, PrefixSum, engine
from helpers.runs.engine_cases import plain
from helpers.runs.trace_file import trace_file

import csd
from bench.studies.drafting import queue
from csd.engine.scheduler import Scheduler

pytestmark = pytest.mark.bench

PROMPTS = [[5 + i, 6, 7] for i in range(7)]


@pytest.fixture
def placed(monkeypatch):
    """(prompt, sample, samples of it in flight, prompts in flight), as samples get their slots."""
    seen = []
    assign = Scheduler.assign

    def watched(scheduler, request, s):
        found = assign(scheduler, request, s)
        busy = {id(r.request) for r in scheduler.owners if r is not None}
        seen.append((request.index, found.index, len(request.live), len(busy)))
        return found

    monkeypatch.setattr(Scheduler, "assign", watched)
    return seen


def draw(together, slots=4, samples=8, **options):
    model = PrefixSum(sharpness=8.0)
    with engine(model, max_slots=slots, together=together) as e:
        asked = dict(num_samples=samples, max_new_tokens=12, seed=3, stop_token_ids=[4])
        return model, csd.generate(e, PROMPTS, **asked | options)


@pytest.mark.parametrize("together", [None, 1, 3, 8, 99])
def test_samples_do_not_depend_on_it(together):
    model, out = draw(together)
    for prompt, result in zip(PROMPTS, out, strict=True):
        assert [s.index for s in result] == list(range(8))
        for sample in result:
            assert sample.tokens == plain(model, prompt, 3, sample.index, 12, end_ids=(4,))


@pytest.mark.parametrize(
    ("together", "most", "first"),
    [(None, 1, [0, 1, 2, 3]), (2, 2, [0, 0, 1, 1]), (3, 3, [0, 0, 0, 1])],
)
def test_so_many_of_a_prompt_at_once_while_others_wait(placed, together, most, first):
    draw(together)
    assert sorted(row[:2] for row in placed) == [(p, i) for p in range(7) for i in range(8)]
    last = max(i for i, row in enumerate(placed) if row[1] == 0)
    # until the last prompt is begun
    assert {row[2] for row in placed[:last]} == set(range(1, most + 1))
    assert [row[0] for row in placed[:4]] == first
    # of each prompt the samples come in their order
    for p in range(7):
        assert [row[1] for row in placed if row[0] == p] == list(range(8))


def test_one_prompt_fills_every_slot(placed):
    model = PrefixSum()
    with engine(model, max_slots=6) as e:
        csd.generate(e, [1, 2], num_samples=8, max_new_tokens=5, seed=1)
    assert [row[2] for row in placed[:6]] == [1, 2, 3, 4, 5, 6]


def test_the_last_prompts_fill_the_slots_that_others_leave(placed):
    draw(1, slots=16, samples=4)
    # seven prompts, sixteen slots: nothing waits, so none is left empty
    assert len({row[:2] for row in placed[:16]}) == 16 and placed[15][3] == 7


@pytest.mark.parametrize("together", [0, -1, 1.5, True])
def test_errors_name_the_argument(together):
    with pytest.raises((TypeError, ValueError), match=r"together must be .* got"):
        engine(PrefixSum(), together=together)


def test_a_prompt_that_is_read_in_chunks_keeps_its_place(placed):
    model = PrefixSum(sharpness=8.0)
    asked = [[i % VOCAB for i in range(90)], [7], [8, 9]]
    with engine(model, max_slots=2, together=1, prefill_chunk=16) as e:
        out = csd.generate(e, asked[::-1], num_samples=3, max_new_tokens=9, seed=2)
    for prompt, result in zip(asked[::-1], out, strict=True):
        assert result.tokens == [plain(model, prompt, 2, i, 9) for i in range(3)]
    assert max(row[3] for row in placed) == 2


def test_bench_later_samples_draft_from_finished_ones(tmp_path, capsys):
    sentences = [[(7 * p + 3 * j + j * j) % 60 for j in range(30)] for p in range(6)]
    out = tmp_path / "out.json"
    rows = [{"prompt_ids": [61, p], "samples": [s] * 4} for p, s in enumerate(sentences)]
    path = trace_file(tmp_path / "same.jsonl", *rows)
    options = ["--slots", "4", "--together", "4", "1", "--json", str(out)]
    queue.main([str(path), *options])
    found = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    all_at_once, one = found["rows"]["same"]
    assert (all_at_once["together"], one["together"]) == (4, 1)
    # equal samples side by side show each other nothing; a finished one shows everything
    assert all_at_once["tau"] < 1.5 and one["tau"] > 2.5
    assert all_at_once["prompts a step"] == 1 and one["prompts a step"] > 3
    assert one["steps"] < 0.6 * all_at_once["steps"]
