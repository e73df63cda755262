"""Steps that commit a recorded trace's tokens, whatever the model says."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.checkpoints import build
from helpers.runs.engine_cases import PROMPTS, assert_same_samples

import csd
from bench.e2e import forced_cpu
from bench.lib.forced import Forced, cut, forced_requests, forcing
from bench.lib.shapes import SHAPES, random_model
from csd.engine.call import RunSettings
from csd.traces.traces import Trace, read_traces

pytestmark = pytest.mark.bench

NEW = 24


class ShowsThePath:
    """A verify that hides the top 8 of every row that was not accepted."""

    def __init__(self, verify):
        self.verify = verify

    def __call__(self, logits, pool, slots):
        out = self.verify(logits, pool, slots)
        off = torch.ones(pool.rows, dtype=torch.bool)
        off[out.accept_row[out.accept_row >= 0].long()] = False
        out.top_token[off], out.top_prob[off] = -1, 0
        return out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A live run, what it took, and its traces."""
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    with csd.Engine(build("llama").double(), max_slots=4) as engine:
        shows = ShowsThePath(engine.ops.verify)
        engine.ops = replace(engine.ops, verify=shows, verify_all=shows)
        out = engine.generate(
            PROMPTS,
            num_samples=3,
            max_new_tokens=NEW,
            temperature=0.7,
            seed=4,
            budget=9,
            first_sample=2,
            record=path,
        )
    return out, list(read_traces(path)), path


def run(engine, traces, **options):
    jobs = forced_requests(traces, **options)
    with forcing(engine, traces):
        for _ in engine.run(jobs, RunSettings(budget=9)):
            pass
    return [job.result() for job in jobs]


def test_the_same_model_takes_the_same_steps(recorded):
    live, traces, _ = recorded
    assert sum(sum(out.stats.accepted.values()) for out in live) > 5
    with csd.Engine(build("llama").double(), max_slots=4) as engine:
        forced = run(engine, traces, max_new_tokens=NEW)
    assert_same_samples(forced, live)
    for got, want in zip(forced, live, strict=True):
        assert [s.index for s in got] == [2, 3, 4]
        assert got.stats.steps == want.stats.steps
        assert got.stats.tokens_per_step == want.stats.tokens_per_step
        assert got.stats.nodes_proposed == want.stats.nodes_proposed
        assert got.stats.accepted == want.stats.accepted
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            # the float32 logarithm of a float32 probability
            eps = torch.finfo(torch.float32).eps
            near = [abs(x - y) < 3 * eps for x, y in zip(a, b, strict=True) if y > -3]
            assert all(near)
            assert near


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("prompt_tokens", [0, 150])
def test_another_model_commits_the_trace(recorded, prompt_tokens, static):
    live, traces, _ = recorded
    model = random_model(replace(SHAPES["tiny"], vocab=512), dtype=torch.float32)
    with csd.Engine(model, max_slots=4, static=static) as engine:
        forced = run(engine, traces, prompt_tokens=prompt_tokens)
        # without the block the model speaks for itself
        jobs = forced_requests(traces)
        list(engine.run(jobs, RunSettings()))
    for got, want, trace in zip(forced, live, traces, strict=True):
        assert got.tokens == want.tokens
        assert len(got.prompt_ids) == max(prompt_tokens, len(trace.prompt))
        # only drafts of the true path are accepted, so the steps are those of the recording
        if not prompt_tokens and not static:
            assert got.stats.tokens_per_step == want.stats.tokens_per_step
    assert [job.result().tokens for job in jobs] != [out.tokens for out in live]


def test_a_sample_ends_where_its_recording_does(recorded):
    _, traces, _ = recorded
    short = [replace(t, samples=[s[: 5 + i] for i, s in enumerate(t.samples)]) for t in traces]
    model = random_model(replace(SHAPES["tiny"], vocab=512), dtype=torch.float32)
    with csd.Engine(model, max_slots=4) as engine:
        forced = run(engine, short, samples=2, max_new_tokens=NEW)
    for got, trace in zip(forced, short, strict=True):
        assert got.tokens == trace.samples[:2]
        assert got.finish_reasons == ["stop", "stop"]


def test_a_cut_trace_has_a_part_of_everything(recorded):
    _, (trace, *_), _ = recorded
    part = cut(trace, 2, 5)
    assert part.samples == [sample[:5] for sample in trace.samples[:2]]
    assert part.top == [top[:5] for top in trace.top[:2]] and part.indices == [2, 3]
    assert cut(trace, 9) == trace and cut(replace(trace, top=None), 1).top is None


def test_forced_on_a_cpu(recorded, tmp_path, capsys):
    """A row for each budget; its steps are those that the recorded samples decide."""
    *_, path = recorded
    file = tmp_path / "forced.json"
    forced_cpu.main(
        [
            str(path),
            "--shape",
            "tiny",
            "--samples",
            "2",
            "3",
            "--nodes",
            "auto",
            "9",
            "--pairs",
            "1",
            "--prompts",
            "2",
            "--tokens",
            "12",
            "--dtype",
            "float32",
            "--json",
            str(file),
        ]
    )
    found = json.loads(file.read_text())
    rows = {(row["samples"], row["nodes"]): row for row in found["rows"]}
    assert [*rows] == [(2, "auto"), (2, "9"), (3, "auto"), (3, "9")] and found["prompts"] == 2
    for row in rows.values():
        assert row["low"] <= row["csd/no drafts"] <= row["high"] and row["no drafts tok/s"] > 0
    assert rows[3, "9"]["tau"] > 1
    assert "csd/no drafts" in capsys.readouterr().out


def test_verify_reads_nothing_off_the_device(recorded):
    """Shapes do not depend on values, so a CUDA graph can hold it."""
    from csd.kernels.verify import verify
    from csd.state.pool import Pool
    from csd.state.slots import Slots

    forced = Forced(verify, recorded[1], "cpu")
    pool, slots = Pool.empty(6, 4, 4, 8), Slots.empty(4, 512, NEW, 8)
    verdict = verify(torch.randn(6, 512), pool, slots)
    forced._verify = lambda *args: verdict
    with NoHostReads() as watched:
        forced(torch.randn(6, 512), pool, slots)
    assert watched.seen


def test_traces_must_have_a_seed():
    with pytest.raises(ValueError, match="has no seed"):
        forced_requests([Trace(3, [1, 2], [[4]], 0.7, None)])


def test_traces_of_the_benchmarks_are_whole():
    from bench.lib.record import PROMPTS as OURS
    from bench.lib.record import TRACES

    asked = {p["id"]: p for p in map(json.loads, OURS.read_text().splitlines())}
    traces = list(read_traces(TRACES))
    assert len({t.problem for t in traces}) == len(traces) == len(asked)
    assert sum(len(t.samples) == 64 for t in traces) == 3
    for trace in traces:
        want = asked[trace.problem]
        assert trace.temperature == want["temperature"]
        assert len(trace.samples) == len(trace.top) == want["samples"]
        for tokens, top in zip(trace.samples, trace.top, strict=True):
            assert len(tokens) == len(top) > 0
