"""Logs of other systems as trace files."""

import json

import pytest

from csd.cli.main import main
from csd.models.demo import toy
from csd.traces.traces import read_traces

pytestmark = pytest.mark.quick

CHAT = [{"role": "user", "content": "a b"}]


def imported(folder, tmp_path, *rows, flags=()):
    log, out = tmp_path / "log.jsonl", tmp_path / "traces.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.unlink(missing_ok=True)
    code = main(["import", str(log), "--model", folder, "-o", str(out), *flags])
    return code, [*read_traces(out)] if code == 0 else []


def test_logs_become_traces(toy_folder, tmp_path):
    tokenizer = toy()[1]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    code, found = imported(
        toy_folder,
        tmp_path,
        {"prompt": "a b", "completions": ["c d", "e"], "temperature": 0.5},
        {"messages": CHAT, "choices": [{"message": {"content": "c"}}, {"text": "d e"}]},
        {
            "prompt": "x",
            "prompt_token_ids": [5, 6],
            "outputs": [{"text": "c", "token_ids": [7, 8]}],
        },
        {"question": "a b", "completions": [[9, 10]]},
        flags=["--temperature", "0.7"],
    )
    assert code == 0
    assert [t.samples for t in found] == [
        [[*ids("c d"), *end], [*ids("e"), *end]],
        [[*ids("c"), *end], [*ids("d e"), *end]],
        [[7, 8]],
        [[9, 10]],
    ]
    assert [t.temperature for t in found] == [0.5, 0.7, 0.7, 0.7]
    # a text is a user's message where the tokenizer has a template
    chat = found[1].prompt
    assert found[0].prompt == found[3].prompt == chat and found[2].prompt == [5, 6]
    assert [t.problem for t in found] == [0, 1, 2, 3]
    assert main(["replay", str(tmp_path / "traces.jsonl"), "--nodes", "4"]) == 0


@pytest.mark.parametrize(
    "row, message",
    [
        ({"completions": ["a"]}, "line 1 must have one of prompt_token_ids, messages, prompt"),
        ({"prompt": "a"}, "must have a list of completions under completions, choices, outputs"),
        ({"prompt": "a", "completions": []}, "must have a list of completions"),
        ({"prompt": "a", "completions": [{"logprobs": 1}]}, "must have completions of a string"),
        ({"prompt": "a", "completions": [[10**7]]}, "must lie in the vocabulary"),
        ({"prompt": "a", "completions": ["b"], "temperature": -1}, "temperature must lie in"),
        ({"prompt": 3, "completions": ["b"]}, "prompt must be a str"),
    ],
)
def test_errors_name_the_line(toy_folder, tmp_path, capsys, row, message):
    assert imported(toy_folder, tmp_path, row)[0] == 2
    error = capsys.readouterr().err
    assert message in error and "log.jsonl line 1" in error
    assert not (tmp_path / "traces.jsonl").exists()


def test_what_is_there_is_not_replaced(toy_folder, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["import", "x", "--model", toy_folder, "-o", str(tmp_path / "out")]) == 2
    assert "out must be a new file" in capsys.readouterr().err
    assert main(["import", "x", "--model", str(tmp_path), "-o", str(tmp_path / "n")]) == 2
