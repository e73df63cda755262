"""Audits: honest samples are equal, tampered ones and those of other models are found."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.models.checkpoints import build
from helpers.oracles import grammar_oracle

import csd
from csd.cli.main import main
from csd.evaluate.audit import audit, summary
from csd.traces.traces import Trace, read_traces, write_traces

PROMPTS = [[5, 17, 3, 60, 17, 3, 9], [4, 4, 8]]
ASKED = dict(num_samples=4, max_new_tokens=25, seed=7)
SETTINGS = {
    "plain": dict(),
    "hot": dict(temperature=2.5),
    "filters": dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1),
    "typical": dict(temperature=1.3, top_k=30, typical_p=0.6),
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


ENDS = {
    "own": dict(stop_token_ids=[3, 15, 20, 49]),
    "others": dict(end_token_ids=[15, 3]),
    "none": dict(ignore_eos=True),
    "own alone": dict(ignore_eos=True, stop_token_ids=[3, 15, 20, 49]),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_end_tokens_are_those_that_the_samples_had(engine, tmp_path, ends):
    path = tmp_path / "traces.jsonl"
    asked = dict(min_new_tokens=12, temperature=1.3)
    engine.generate(PROMPTS, record=str(path), **ASKED, **asked, **ends)
    for again in ({}, ends):
        samples = audited(engine, [*read_traces(path)], dict(min_new_tokens=12) | again)
        assert not any(map(any, (s.gaps for s in samples)))
    # no sample came as far
    short = [replace(t, samples=[s[:5] for s in t.samples]) for t in read_traces(path)]
    samples = audited(engine, short, dict(min_new_tokens=12))
    assert {len(s.gaps) for s in samples} == {5} and not any(map(any, (s.gaps for s in samples)))


def test_functions_hold_behind_a_token_that_they_ban(engine, tmp_path):
    """Places that an exchanged token changes do not depend on the steps of an audit."""

    def no_pairs(ids, logits):
        return logits.scatter(1, ids[:, -1:], -math.inf)

    traces, _ = recorded(engine, tmp_path, logits_processor=no_pairs, ignore_eos=True)
    tokens = traces[0].samples[1]
    tokens[4], tokens[9] = tokens[3], tokens[8]
    traces = [replace(traces[0], samples=[tokens], indices=[1])]
    (found,) = audited(engine, traces, dict(logits_processor=no_pairs))
    pairs = [i for i in range(1, 25) if tokens[i] == tokens[i - 1]]
    assert {4, 9} <= {*pairs}
    assert [i for i, gap in enumerate(found.gaps) if gap == math.inf] == pairs


@pytest.mark.parametrize("exchanged", ["z", None], ids=["text", "end"])
def test_behind_a_token_that_its_grammar_bans_a_sample_is_audited(tmp_path, exchanged):
    pytest.importorskip("llguidance")
    from csd.models.demo import toy

    model, tokenizer = toy()
    path, asked = tmp_path / "traces.jsonl", dict(json_schema={"type": "array", "minItems": 20})
    with csd.Engine(model, tokenizer=tokenizer) as e:
        e.generate("a b", num_samples=3, max_new_tokens=40, seed=0, record=str(path), **asked)
        traces = [*read_traces(path)]
        assert not any(s.different(1e-6) for s in audited(e, traces, asked))
        # steps of an audit read fewer tokens than what follows
        other = tokenizer.eos_token_id if exchanged is None else tokenizer.encode(exchanged)[0]
        traces[0].samples[1][2] = other
        samples = audited(e, traces, asked)
    assert [s.index for s in samples if s.different(1e-6)] == [1]
    assert samples[1].different(1e-6)[0] == 2 and len(samples[1].gaps) == 40


def test_behind_another_spelling_all_tokens_are_allowed():
    """The text is spelled "abc", "de"; its letters take several steps of an audit."""
    pytest.importorskip("llguidance")
    letters = [grammar_oracle.PIECES.index(letter) for letter in "abcde" * 40]
    model = build("llama", dtype=torch.float64, vocab_size=97)
    trace = Trace(0, [5, 17], [letters], temperature=0, top=[], seed=0, indices=[0], stop_ids=[])
    with csd.Engine(model, tokenizer=grammar_oracle.Pieces()) as e:
        (sample,) = audited(e, [trace], dict(regex="(abcde){40}"))
    assert sample.gaps[0] == math.inf and max(sample.gaps[1:]) < math.inf


def test_two_samples_of_one_index_are_refused(engine, tmp_path):
    """One of them could hide behind the other."""
    traces, _ = recorded(engine, tmp_path)
    with pytest.raises(ValueError, match=r"problem 0 must have one sample per index, got ind"):
        audited(engine, [replace(traces[0], indices=[0, 1, 1, 2])], {})


def test_flags_of_samples_are_flags_of_their_audit():
    from csd.cli import audit as command
    from csd.cli.main import SAMPLE_FLAGS
    from csd.cli.trace import RECORD_FLAGS
    from csd.engine.options.params import RULES
    from csd.state.filters import FILTERS

    changing = {*FILTERS, *RULES, "min_new_tokens"} - {"temperature"}
    assert changing & {*SAMPLE_FLAGS, *RECORD_FLAGS} <= {*command.FLAGS}


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
    assert "problem 0, sample 1: " in out and "the first at position 4" in out
