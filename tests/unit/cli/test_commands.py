"""The command's help, version and examples, and the formats of what it prints."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.runs.trace_file import trace_file

import csd
from csd.cli.common import MODEL, VERSION
from csd.cli.main import main, make_parser
from csd.engine.options import GenerateOptions
from csd.utils.arguments import options_of

pytestmark = pytest.mark.quick

COMMANDS = sorted(make_parser()[1].choices)


def test_version_and_bare_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"csd {csd.__version__}\n"
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\b", shown, re.MULTILINE) for name in COMMANDS)
    with pytest.raises(SystemExit) as caught:
        main(["--n", "3"])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse_defaults_and_a_page(name, capsys):
    parser, commands = make_parser()
    shown = commands.choices[name].format_help()
    examples = re.findall(r"^  (csd .*)$", shown, re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])[1:]
        assert parser.parse_args(words).command == name
    page = re.search(r"documentation: (docs/.*)$", shown, re.MULTILINE)[1]
    assert (Path(__file__).parents[3] / page).is_file()
    for action in commands.choices[name]._actions:
        assert action.help, action.dest
        # a shell's user has no objects of Python
        assert not re.search(r"\bout[.\[]|csd\.[A-Z]|\bNone\b|(?<!=)\bTrue\b|\bdict\b", action.help)
        given = action.default not in (None, argparse.SUPPRESS, [])
        if given and not isinstance(action.default, bool):
            help = re.sub(r"\s+", " ", shown)
            assert f"(default: {action.default})" in help or "default" in action.help


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_takes_a_model_names_the_demo(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("hub name") == text.count(MODEL)


def test_flags_of_all_commands_are_in_one_order():
    own = (
        "history",
        "dtype",
        "decoder",
        "prior",
    )  # some commands have flags of theirs with these names
    names = [name for name in options_of(GenerateOptions) if name not in own]
    known = ["--" + name.replace("_", "-") for name in names]
    for name, parser in make_parser()[1].choices.items():
        places = [known.index(flag) for flag in parser._option_string_actions if flag in known]
        assert places == sorted(places) and (places or name in ("report", "plot")), name


def documented_keys():
    """Returns the keys of each format by docs/formats.md and docs/generate.md."""
    pages = Path(__file__).parents[3] / "docs"
    sections = re.split(r"^## `(\w+)`$", (pages / "formats.md").read_text(), flags=re.MULTILINE)
    key = re.compile(r"^\| `(\w+)` \| ", re.MULTILINE)
    keys = {
        name: {*key.findall(text)}
        for name, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    result = (pages / "generate.md").read_text().partition("## Keys of a result")[2]
    keys["sample"] |= {*key.findall(result.partition("\n## ")[0])}
    return keys


def test_outputs_have_the_documented_keys(toy_folder, tmp_path, capsys):
    keys = documented_keys()
    optional = {"sample": {"characters"}, "audit": {"bits_equal", "own_different_share"}}

    def check(name, output):
        assert [*output.items()][:2] == [("schema", f"csd.{name}"), ("version", VERSION)]
        check_keys(name, output.keys() - {"schema", "version"})

    def check_keys(name, shown):
        assert shown <= keys[name] and keys[name] - shown <= optional.get(name, set())

    traces = str(tmp_path / "t.jsonl")

    def printed(*words):
        assert main([*words]) == 0
        return json.loads(capsys.readouterr().out)

    check(
        "sample",
        printed(
            "sample",
            toy_folder,
            "a b",
            "-n",
            "2",
            "--max-new-tokens",
            "6",
            "--budget",
            "4",
            "--seed",
            "1",
            "--json",
            "--drafts",
            "--record",
            traces,
        ),
    )
    for line in Path(traces).read_text().splitlines():
        check_keys("trace", json.loads(line).keys())
    check("replay", printed("replay", traces, "--nodes", "0", "2", "--json"))
    check("audit", printed("audit", traces, "--model", toy_folder, "--json"))
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    out = tmp_path / "r.jsonl"
    found = printed(
        "eval",
        str(problems),
        "--model",
        toy_folder,
        "-n",
        "2",
        "--max-new-tokens",
        "6",
        "--budget",
        "4",
        "-o",
        str(out),
        "--quiet",
    )
    check("summary", found)
    assert found == json.loads(out.with_suffix(".summary.json").read_text())
    csd.release()


def test_replay_with_a_model_answers_in_one_sentence(toy_folder, tmp_path, capsys, monkeypatch):
    text = [i % 7 for i in range(40)]
    path = str(trace_file(tmp_path / "t.jsonl", {"prompt_ids": [5, 6, 0], "samples": [text, text]}))
    assert main(["replay", path, "--nodes", "0", "8", "--model", toy_folder]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"csd would (draw these samples [\d.]+ times as fast|gain nothing)", last)
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"rows": [1, 100], "seconds": [1.0, 1.0]}))
    assert main(["replay", path, "--nodes", "0", "8", "--cost", str(cost)]) == 0
    assert "times as fast as one token per step, with at most 8 drafted" in capsys.readouterr().out
    cost.write_text(json.dumps({"rows": [1, 2], "seconds": [1.0, 50.0]}))
    assert main(["replay", path, "--nodes", "8", "--cost", str(cost)]) == 0
    assert "no faster" in capsys.readouterr().out
    assert main(["replay", path, "--cost", str(cost), "--model", toy_folder]) == 2
    csd.release()
