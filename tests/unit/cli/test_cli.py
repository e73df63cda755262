"""The command line."""

import json
from argparse import Namespace

import pytest
import torch

import csd
from csd.cli.main import Printed, _show, main
from csd.engine.generate import engine_for
from csd.engine.results.stats import Stats
from csd.evaluate.resumable_results import ResumedFile
from csd.utils.files import WholeFile

pytestmark = pytest.mark.quick


def sample_command(model):
    words = "-n 3 --max-new-tokens 12 --temperature 0.7 --seed 1 --budget 8 --json"
    return ["sample", model, "What is 2 + 3?", *words.split()]


def test_sample_prints_one_json_object(toy_folder, capsys):
    code = main(sample_command(toy_folder))
    out = capsys.readouterr().out
    csd.release()
    assert code == 0
    assert len(out.splitlines()) == 1
    result = json.loads(out)
    assert len(result["texts"]) == len(result["tokens"]) == 3
    assert all(len(t) == len(p) for t, p in zip(result["tokens"], result["logprobs"], strict=True))
    assert set(result["finish_reasons"]) <= {"stop", "length"}
    assert result["seed"] == 1
    assert result["stats"]["tokens"] == sum(map(len, result["tokens"]))


@pytest.mark.parametrize(("texts", "voted"), [("7 x", True), ("7 x y", False), ("x y", False)])
def test_a_vote_is_shown_where_half_of_the_samples_have_an_answer(texts, voted, capsys):
    samples = [
        csd.Sample(i, text, [1], [-1.0], [-1.0], "stop") for i, text in enumerate(texts.split())
    ]
    for reason in ("stop", "length"):
        samples[-1].finish_reason = reason
        for live in (False, True):
            out = csd.Samples(samples, 0, [], Stats())
            _show(out, None, Namespace(json=False), Printed(live), None)
            shown = capsys.readouterr().out
            assert ("--- vote: 7" in shown) == voted
            assert ("--- no vote: " in shown) == (not voted and reason == "length")
            assert shown.count("--- sample ") == len(samples)


def test_a_pipe_gets_each_sample_as_it_ends(toy_folder, capsys, monkeypatch):
    """A line as drawing begins, and whole samples before the last has ended; then the figures."""
    seen = []

    def watched(engine, call):
        started = capsys.readouterr()
        assert "drawing 3 samples" in started.err and started.out == ""
        for _, sample in samples(engine, call):
            yield 0, sample
            seen.append((sample.index, capsys.readouterr().out))

    samples = csd.Engine.samples
    monkeypatch.setattr(csd.Engine, "samples", watched)
    assert main([word for word in sample_command(toy_folder) if word != "--json"]) == 0
    csd.release()
    assert sorted(index for index, _ in seen) == [0, 1, 2]
    assert all(text.startswith(f"--- sample {index} (") for index, text in seen)
    end = capsys.readouterr().out
    assert "--- sample" not in end and "; seed 1" in end


def test_errors_are_one_line(capsys, tmp_path):
    assert main(["sample", str(tmp_path), "x"]) == 2
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "M", " "], "prompt must not be empty"),
        (["sample", "M", "x", "--budget", "x"], "--budget: must be 'auto' or a whole number"),
        (["sample", "M", "x", "-t", "0.7"], "csd sample: error: unrecognized arguments: -t"),
        (["sample", "M", "x", "--dtype", "half-way"], "dtype must be a torch.dtype or its name"),
        (["eval", "none.jsonl", "--model", "M"], "csd: none.jsonl: No such file or directory"),
        (["report", "none.json"], "csd: none.json: No such file or directory"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_name_what_is_wrong(words, message, capsys):
    try:
        assert main(words) == 2
    except SystemExit as error:
        assert error.code == 2
    assert message in capsys.readouterr().err


def test_a_file_in_no_folder_is_named_as_given(tmp_path):
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError) as caught:
        WholeFile(path)
    assert caught.value.filename == str(path)


def test_an_interrupted_recording_goes_on(toy_folder, tmp_path, capsys, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abc"))
    add = ResumedFile.add

    def interrupted(results, rows):
        add(results, rows)
        raise KeyboardInterrupt

    def record(name):
        words = ["record", toy_folder, str(prompts), "-o", str(tmp_path / name)]
        code = main([*words, "-n", "2", "--max-new-tokens", "6"])
        csd.release()
        return code

    assert record("whole.jsonl") == 0
    with monkeypatch.context() as patch:
        patch.setattr(ResumedFile, "add", interrupted)
        assert record("part.jsonl") == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert not (tmp_path / "part.jsonl").exists()
    assert record("part.jsonl") == 0
    assert (tmp_path / "part.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_ctrl_c_prints_what_was_drawn(toy_folder, capsys, monkeypatch):
    def interrupted(engine, prompt, callback=None, **options):
        def stop(*args):
            raise KeyboardInterrupt

        return prepare(engine, prompt, callback=stop, **options)

    prepare = csd.Engine.prepare
    monkeypatch.setattr(csd.Engine, "prepare", interrupted)
    words = ["sample", toy_folder, "Say 1.", "-n", "3", "--max-new-tokens", "12", "--json"]
    assert main(words) == 130
    csd.release()
    shown = capsys.readouterr()
    assert "interrupted" in shown.err
    assert json.loads(shown.out)["finish_reasons"].count("cancelled") > 0


def test_dtype_by_its_name(toy_folder, capsys):
    words = ["sample", toy_folder, "Say 1.", "--max-new-tokens", "4", "--json", "--seed", "1"]
    assert main([*words, "--dtype", "float64"]) == 0
    printed = json.loads(capsys.readouterr().out)
    prompt = [{"role": "user", "content": "Say 1."}]
    out = csd.generate(
        toy_folder, prompt, num_samples=8, max_new_tokens=4, seed=1, dtype=torch.float64
    )
    engine = engine_for(toy_folder, dtype="float64")
    assert engine is engine_for(toy_folder, dtype=torch.float64)
    assert engine.dtype == torch.float64 and out.tokens == printed["tokens"]
    csd.release()


def test_history_is_read_and_added_to(toy_folder, capsys, tmp_path):
    path = tmp_path / "history.jsonl"
    command = [*sample_command(toy_folder), "--history", str(path)]
    outputs = []
    for _ in range(2):
        assert main(command) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    csd.release()
    assert outputs[0]["tokens"] == outputs[1]["tokens"]
    assert [f["stats"]["accepted"]["history"] > 0 for f in outputs] == [False, True]
    assert [json.loads(x)["samples"] for x in path.read_text().splitlines()] == [
        outputs[0]["tokens"],
        outputs[0]["tokens"],
    ]
    path.write_text("no trace\n")
    assert main(command) == 2
    assert "history.jsonl, line 1: the trace is not JSON" in capsys.readouterr().err
