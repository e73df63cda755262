"""Result files of csd eval: cut ones go on, damaged and foreign ones keep every byte."""

import json

import pytest

from csd.evaluate import evaluation as evaluate


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbered(problem, texts=("a",)) -> dict:
    """A row of a results file."""
    return dict(
        problem=problem,
        answer="7",
        vote=None,
        vote_correct=False,
        answers=[None],
        correct=[False],
        finish_reasons=["stop"],
        error=None,
        texts=list(texts),
        tokens=1,
        steps=1,
        seconds=0.5,
    )


FOREIGN = [
    '{"prompt": "mine"}\n{"prompt": "its last line has no end"}',
    "a note",
    '{"settings": {"mine": true}}',
    "",
]


@pytest.mark.parametrize("text", FOREIGN, ids=["lines", "a line", "like ours", "empty"])
def test_a_file_that_is_not_a_runs_keeps_every_byte(tmp_path, text):
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    if text:
        with pytest.raises(ValueError, match="is not a results file of csd eval"):
            evaluate.Results(path, {"model": "a"})
        assert path.read_text() == text
    else:
        evaluate.Results(path, {"model": "a"}).close()


def test_every_torn_write_goes_on(tmp_path):
    """A file is cut after each of its bytes, as a kill may leave it."""
    path, settings = tmp_path / "torn.jsonl", {"model": "a"}
    rows = [numbered(0, ["\u2028 é"]), numbered(1)]
    results = evaluate.Results(path, settings)
    results.add(rows)
    results.close()
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        results = evaluate.Results(path, settings)
        whole = max(sum(end <= size for end in ends) - 1, 0)
        assert results.rows == rows[:whole]
        results.add(rows[whole:])
        results.close()
        assert path.read_bytes() == data


def test_damaged_files_name_the_line(tmp_path):
    path = tmp_path / "damaged.jsonl"
    for text, message in [
        ('{"settings": {}}\n{"problem": 1}\n', "line 2 must have problem 0, got 1"),
        ('{"settings": {}}\n{"problem"\n', "line 2 is not JSON"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            evaluate.Results(path, {})
        assert path.read_text() == text


def test_a_run_that_drew_nothing_does_not_bind_the_next(tmp_path):
    path = tmp_path / "typo.jsonl"
    evaluate.Results(path, {"model": "smolm2"}).close()
    results = evaluate.Results(path, {"model": "smollm2"})
    assert results.rows == []
    results.add([numbered(0)])
    results.close()
    assert lines(path) == [{"settings": {"model": "smollm2"}}, numbered(0)]
    with pytest.raises(ValueError, match="model 'smollm2', now 'other'"):
        evaluate.Results(path, {"model": "other"})
