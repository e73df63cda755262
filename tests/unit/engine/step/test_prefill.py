"""Prompts are read in chunks between the steps of the samples in flight, and change no sample."""

from dataclasses import replace

import pytest
import torch
from helpers.models import checkpoints
from helpers.models.scripted import PrefixSum, counting, engine
from helpers.runs.engine_cases import plain, prompts
from helpers.targets import few

import csd
from csd.engine.step import prefill
from csd.engine.step.step import Step
from csd.graph import consensus

STATIC = pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])


@pytest.fixture
def events(monkeypatch):
    """Events of engines, in order: the tokens of a chunk that is read, or "step"."""
    found = []
    read, forward = prefill.read_prompts, Step.forward

    def watched_read(step, parts):
        found.extend(len(part.tokens) for part in parts)
        return read(step, parts)

    def watched_forward(self, pool):
        found.append("step")
        return forward(self, pool)

    monkeypatch.setattr(prefill, "read_prompts", watched_read)
    monkeypatch.setattr(Step, "forward", watched_forward)
    return found


@few(3)
@STATIC
@pytest.mark.parametrize("budget", [0, 9])
@pytest.mark.parametrize(("max_slots", "chunk"), [(1, 16), (3, 16), (3, 64), (4, 1000)])
def test_tokens_are_those_of_plain_sampling(static, budget, max_slots, chunk):
    """Seven prompts wait for few slots; their lengths fall on both sides of chunks and pages."""
    model = PrefixSum(sharpness=8.0)
    asked = [p[:n] for p, n in zip(prompts(7, 300), (1, 65, 300, 17, 16, 130, 2), strict=True)]
    e = engine(model, max_slots=max_slots, prefill_chunk=chunk, static=static)
    out = csd.generate(
        e, asked, num_samples=2, max_new_tokens=30, seed=7, budget=budget, stop_token_ids=[3]
    )
    for prompt, result in zip(asked, out, strict=True):
        for sample in result:
            assert sample.tokens == plain(model, prompt, 7, sample.index, 30, end_ids=(3,))


@STATIC
def test_chunks_change_no_token_of_a_model(static):
    model = checkpoints.build("llama", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    asked = [torch.randint(97, (n,), generator=generator).tolist() for n in (5, 320, 200, 40)]
    runs = []
    for chunk in (4096, 48):
        with csd.Engine(model, max_slots=3, static=static, prefill_chunk=chunk) as e:
            options = dict(num_samples=2, max_new_tokens=12, seed=1, temperature=0.8, budget=8)
            runs.append(csd.generate(e, asked, **options))
    assert [r.tokens for r in runs[0]] == [r.tokens for r in runs[1]]


def cycle(events, asked, **options):
    """Counts from each prompt's last token up to 31 and from 0 to 5, a step a token."""
    e = engine(counting(32), prefill_chunk=16, **options)
    out = csd.generate(e, asked, max_new_tokens=40, stop_token_ids=[5], budget=0, seed=0)
    assert all(r.finish_reasons == ["stop"] for r in out)
    return list(events)


@STATIC
def test_samples_in_flight_step_between_chunks(static, events):
    """The first sample ends after five steps; the second goes on while the third's is read."""
    got = cycle(events, [[0], [6], [9] * 100 + [6]], max_slots=2, static=static, lag=0)
    chunks = [x for n in (16,) * 6 for x in (n, "step")] + [4]
    assert got[: 5 + len(chunks)] == ["step"] * 5 + chunks
    assert set(got[5 + len(chunks) :]) == {"step"}


def test_nobody_waits_where_nothing_runs(events):
    """Before the first step, and where the only slot is free."""
    asked = [[9] * 40 + [3], [9] * 20 + [4]]
    assert cycle(events, asked, max_slots=2) == [16, 16, 8, 16, 4, "step", "step"]
    events.clear()
    got = cycle(events, asked, max_slots=1)
    assert got == [16, 16, 8, "step", "step", 16, 4, "step"]


def test_short_prompts_share_a_chunk(events):
    """In the order they were given, no more tokens between two steps than a chunk has."""
    asked = [[4], [4], [4], [6], [9] * 5 + [4], [9] * 7 + [4], [9] * 6 + [4], [9] * 2 + [4]]
    got = cycle(events, asked, max_slots=4)
    assert got[:8] == ["step", 5, 7, "step", 6, 2, "step", "step"]
    again = cycle(events, asked, max_slots=4)[len(got) :]
    assert again == got


def test_a_call_that_ends_while_a_prompt_is_read(events):
    """Its pages are free again, and the engine draws as if nothing had been."""
    e = engine(counting(32), max_slots=3, prefill_chunk=16)
    asked = [[4], [2], [6], [9] * 100 + [7]]
    options = dict(max_new_tokens=40, stop_token_ids=[5], budget=0, seed=0)
    stream = csd.stream(e, asked, **options)
    assert [next(stream)[0] for _ in range(2)] == [0, 1]
    assert events == ["step", 16, "step", 16, "step"]
    stream.close()
    out = csd.generate(e, asked, **options)
    assert [r.tokens[0][-1] for r in out] == [5] * 4
    assert [len(r.tokens[0]) for r in out] == [1, 3, 31, 30]


def test_a_long_prompt_goes_into_the_graph_as_it_is_read(events, monkeypatch):
    """Pieces have 512 tokens whatever the chunks: the same graph, and no step waits for all."""
    insert = consensus.graph_insert_ref
    made = []

    def watched(table, group_key, *rows):
        if int(table.step) < 3:
            # a row a token, and one for nine
            events.append(("entered", group_key.shape[0] * 9 // 10))
        insert(table, group_key, *rows)

    prompt = torch.randint(32, (1301,), generator=torch.Generator().manual_seed(3)).tolist()
    tables = []
    for chunk in (300, 48, 4096):
        e = engine(PrefixSum(sharpness=8.0), prefill_chunk=chunk)
        e.ops = replace(e.ops, graph_insert=watched)
        made.append(csd.generate(e, prompt, num_samples=2, max_new_tokens=9, seed=1, budget=8))
        tables.append(e.caches.drafter.table)
    got = events[: events.index("step")]
    whole, rest = ("entered", 512), ("entered", 276)
    assert got == [300, 300, whole, 300, 300, whole, 100, rest]
    assert made[0].tokens == made[1].tokens == made[2].tokens
    for name in (
        "entry_group",
        "entry_tokens",
        "entry_total",
        "entry_stamp",
        "succ_token",
        "succ_weight",
        "succ_source",
        "step",
    ):
        want, *others = (getattr(t, name) for t in tables)
        assert all(torch.equal(x, want) for x in others), name


def test_bad_chunks_are_refused():
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        engine(PrefixSum(), prefill_chunk=0)
