"""The commands and the Python of docs/serve.md run, with a tiny model in place of each name."""

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import csd
from csd.cli import serve as cli
from csd.models.demo import toy
from csd.serve.http import names as field_names
from csd.serve.http.api import fields
from csd.serve.http.api import fields as unsupported
from csd.utils.lazy import pip_install

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/serve.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    model, tokenizer = toy()
    tokenizer.chat_template = "{% if tools %}tools {% endif %}" + tokenizer.chat_template
    for name in ("tiny", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        for part in (model, tokenizer):
            part.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def port(place):
    install, start = SHELL[0].splitlines()
    assert install == pip_install("serve")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "serve" in extras["optional-dependencies"]
    assert start.startswith("csd serve ")
    command = start.replace("--port 8000", "--port 0").split()[1:]
    process = subprocess.Popen(
        [sys.executable, "-m", "csd.cli.main", *command],
        cwd=place,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = None
    for line in process.stderr:
        if found := re.search(r"http://127.0.0.1:(\d+)", line):
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    yield found[1]
    process.terminate()
    process.wait(60)


def test_the_client_of_openai(port, capsys):
    pytest.importorskip("openai")
    names = {}
    exec(PYTHON[0].replace("localhost:8000", f"127.0.0.1:{port}"), names)
    assert len(names["texts"]) == 8
    assert float(capsys.readouterr().out.split()[0]) >= 1
    exec(PYTHON[1], names)
    arguments = capsys.readouterr().out
    call = names["answer"].choices[0].message.tool_calls[0]
    assert call.function.name == "add" and arguments == call.function.arguments + "\n"
    assert arguments.startswith("{")
    exec(PYTHON[2], names)
    answer = names["answer"]
    printed = capsys.readouterr().out
    assert printed.endswith(f"{answer.output_text} {answer.usage.output_tokens}\n")
    assert len(printed) > len(answer.output_text) + 3


def test_curl(port):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = SHELL[1].replace("localhost:8000", f"127.0.0.1:{port}")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.count('"index"') == 4


def test_the_engine_in_python(place, monkeypatch):
    monkeypatch.chdir(place)
    names = {"csd": csd}
    exec(PYTHON[3], names)
    assert [len(result) for result in names["results"]] == [4] * 3
    assert len(PYTHON) == 4 and len(SHELL) == 3


def test_the_table_names_every_field():
    table = PAGE[PAGE.index("| field | |") : PAGE.index("Any other field")]
    listed = set(re.findall(r"`([a-z_]+)[.`:]", table))
    served = set(field_names.SAMPLING)
    own = {*fields.COMMON, *fields.CHAT, *fields.COMPLETIONS}
    ignored = set(unsupported.IGNORED)
    for name in served | own | ignored:
        assert name in listed, name
    assert listed - {"include_usage"} <= served | own | ignored | {
        "csd",
        "token_ids",
        "prompt_token_ids",
    }


def test_the_table_names_every_field_of_a_response():
    table = PAGE[PAGE.index("### Responses") : PAGE.index("### Paths")]
    listed = set(re.findall(r"`([a-z_]+)[.`:]", table))
    alone = {*fields.RESPONSES} - {*fields.CHAT}
    assert alone <= listed and {*fields.INSTEAD_IN_RESPONSES} >= {"previous_response_id"} <= listed


def test_the_flags_that_it_names_exist():
    import argparse

    commands = argparse.ArgumentParser().add_subparsers()
    cli.add(commands)
    known = commands.choices["serve"]._option_string_actions
    for flag in re.findall(r"`(--[a-z-]+)", PAGE):
        assert flag in known, flag
