"""Audits: honest samples are equal, tampered ones and those of other models are found."""

import json
import math
from dataclasses import replace

import pytest
import torch
from checkpoints import build

import csd
from csd.cli.main import main
from csd.engine.traces.traces import read_traces, write_traces
from csd.evaluate.audit import audit, summary

PROMPTS = [[5, 17, 3, 60, 17, 3, 9], [4, 4, 8]]
ASKED = dict(num_samples=4, max_new_tokens=25, seed=7)
SETTINGS = {
    "plain": dict(),
    "hot": dict(temperature=2.5),
    "filters": dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1),
    "greedy": dict(temperature=0),
    "constraints": dict(no_repeat_ngram_size=2, presence_penalty=0.4, suppress_tokens=[3]),
}


def build_engine(dtype=torch.float64, **options):
    return csd.Engine(build("llama", dtype=dtype, **options))


@pytest.fixture(scope="module")
def engine():
    with build_engine() as made:
        yield made


def recorded(engine, folder, **asked):
    path = folder / "traces.jsonl"
    engine.generate(PROMPTS, record=str(path), budget=9, **ASKED, **asked)
    sampling = {k: v for k, v in asked.items() if k not in ("temperature", "first_sample")}
    return [*read_traces(path)], sampling


def audited(engine, traces, sampling):
    return [s for found in audit(engine, traces, **sampling) for s in found]


@pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS)
def test_honest_samples_are_equal(engine, tmp_path, asked):
    traces, sampling = recorded(engine, tmp_path, **asked)
    samples = audited(engine, traces, sampling)
    assert len(samples) == 8
    for sample in samples:
        assert sample.gaps == [0.0] * len(sample.tokens)


def test_a_token_that_was_exchanged_is_found(engine, tmp_path):
    traces, sampling = recorded(engine, tmp_path, temperature=0.9)
    tokens = traces[0].samples[2]
    tokens[5] = (tokens[5] + 1) % 97
    samples = audited(engine, traces, sampling)
    assert [s.index for s in samples if s.different(1e-6)] == [2]
    # what follows was not drawn behind it either, or only by chance
    assert samples[2].different(1e-6)[0] == 5


@pytest.mark.parametrize("change", ["temperature", "seed", "indices", "filter"])
def test_other_settings_are_found(engine, tmp_path, change):
    traces, sampling = recorded(engine, tmp_path, temperature=0.9)
    if change == "temperature":
        traces = [replace(t, temperature=1.4) for t in traces]
    elif change == "seed":
        traces = [replace(t, seed=8) for t in traces]
    elif change == "indices":
        traces = [replace(t, indices=[i + 1 for i in t.indices]) for t in traces]
    else:
        sampling = dict(top_k=2)
    samples = audited(engine, traces, sampling)
    figures = summary(samples, 1e-6)
    assert figures["different_share"] > 0.05
    assert figures["equal"] + figures["ties"] + figures["different"] == figures["tokens"]
    if change == "filter":
        assert math.inf in {gap for s in samples for gap in s.gaps}


def test_other_weights_are_found(engine, tmp_path):
    traces, sampling = recorded(engine, tmp_path)
    with build_engine(seed=1) as other:
        assert summary(audited(other, traces, sampling), 1e-6)["different_share"] > 0.3


def test_small_gaps_are_ties(engine, tmp_path):
    """Samples of float32 are ties or equal in float64."""
    with build_engine(torch.float32) as narrow:
        traces, sampling = recorded(narrow, tmp_path)
    assert summary(audited(engine, traces, sampling), 1e-3)["different"] == 0


def test_samples_that_are_not_consecutive(engine, tmp_path):
    traces, sampling = recorded(engine, tmp_path, first_sample=3)
    kept = [0, 2, 3]
    traces = [
        replace(t, samples=[t.samples[i] for i in kept], indices=[t.indices[i] for i in kept])
        for t in traces
    ]
    samples = audited(engine, traces, sampling)
    assert [s.index for s in samples] == [3, 5, 6] * 2
    assert not any(map(any, (s.gaps for s in samples)))
    with pytest.raises(ValueError, match="problem 0 must have a seed and indices"):
        audited(engine, [replace(traces[0], seed=None)], {})


def test_the_command(toy_folder, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    csd.generate(toy_folder, "a b", num_samples=3, max_new_tokens=12, seed=1, record=str(path))
    asked = ["audit", str(path), "--model", toy_folder]
    assert main([*asked, "--json", "--calibrate"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["different"] == 0 and figures["own_different_share"] == 0
    (trace,) = read_traces(path)
    trace.samples[1][4] ^= 1
    write_traces(path, [trace])
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "problem 0, sample 1: " in out and "first at 4" in out
