"""Receipts of records: an audit compares to the bit where record and machine are portable."""

import json
from dataclasses import replace

import pytest
from helpers.runs import machines

import csd
from csd.cli import audit as command
from csd.cli.main import main
from csd.evaluate.audit import has_same_bits
from csd.models.fused.held import weights_hash
from csd.traces.receipt import bits_hash
from csd.traces.traces import read_traces, write_traces

PROMPTS = [[5, 17, 3, 60, 17, 3, 9], [4, 4, 8]]


@pytest.fixture(scope="module")
def engine():
    made = csd.Engine(machines.decoder_of("llama"))
    if made.exact_on != "every x86 CPU":
        pytest.skip("the loops of an x86 CPU with AVX2 and FMA")
    return made


@pytest.fixture
def record(engine, tmp_path):
    """A record's path, and the samples of its first prompt."""
    path = tmp_path / "traces.jsonl"
    drawn = engine.generate(PROMPTS, num_samples=3, max_new_tokens=20, seed=3, record=str(path))
    return path, list(drawn[0])


def audited(monkeypatch, capsys, engine, path, *flags):
    monkeypatch.setattr(command, "engine_for", lambda *args, **options: engine)
    assert main(["audit", str(path), "--model", "tiny", *flags]) == 0
    return capsys.readouterr().out


def test_a_record_has_a_receipt(engine, record):
    path, samples = record
    first, second = read_traces(path)
    receipt = first.receipt
    assert receipt["model"] == second.receipt["model"] == weights_hash(engine.decoder)
    assert receipt["exact_on"] == "every x86 CPU" and receipt["dtype"] == "float32"
    assert receipt["logprobs"] == [bits_hash(s.logprobs) for s in samples]
    assert {"torch", "numpy", "numba"} <= receipt["versions"].keys()


def test_equal_bits_are_shown(engine, record, monkeypatch, capsys):
    figures = json.loads(audited(monkeypatch, capsys, engine, record[0], "--json"))
    assert figures["compared"] == "bits" and figures["bits_equal"] is True
    assert figures["samples"] == 6 and figures["tie"] == 0
    figures = json.loads(
        audited(monkeypatch, capsys, engine, record[0], "--json", "--samples", "2")
    )
    assert figures["samples"] == 2 and figures["bits_equal"] is True


@pytest.mark.parametrize("change", ["token", "log-probability", "weights"])
def test_the_first_difference_is_named(engine, record, monkeypatch, capsys, change):
    path, _ = record
    traces = [*read_traces(path)]
    if change == "token":
        traces[1].samples[2][5] = (traces[1].samples[2][5] + 1) % 320
    elif change == "log-probability":
        traces[1].top[2][5][1][0] *= 1 + 2**-23
        traces[1].receipt["logprobs"][2] = "0" * 32
    else:
        engine = csd.Engine(machines.decoder_of("qwen3"))
    write_traces(path, traces)
    text = audited(monkeypatch, capsys, engine, path)
    lines = text.splitlines()
    if change == "weights":
        assert "the first difference is at position 0" in lines[0]
        assert any(line.startswith("model: ") for line in lines)
        return
    assert lines[0].startswith("problem 1, sample 2: the first difference is at position 5, token ")
    assert lines[1].startswith("  record: ") and lines[2].startswith("  here: ")
    assert "the receipts are equal" in lines
    assert "bits_equal  False" in text


def test_without_receipts_scores_are_compared(engine, record, monkeypatch, capsys):
    path, _ = record
    traces = [replace(trace, receipt=None) for trace in read_traces(path)]
    assert not has_same_bits(engine, traces)
    write_traces(path, traces)
    figures = json.loads(audited(monkeypatch, capsys, engine, path, "--json"))
    assert figures["compared"] == "scores" and figures["tie"] == 1e-3
    assert figures["equal"] == figures["tokens"] and "bits_equal" not in figures


def test_a_receipt_without_a_hash_for_each_sample_is_refused(record):
    path, _ = record
    line = next(read_traces(path)).to_dict()
    line["receipt"]["logprobs"].pop()
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"must have 3 entries in 'receipt\.logprobs', got 2"):
        next(read_traces(path))
