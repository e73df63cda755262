"""The notebook for a reader's GPU, as far as a machine without one runs it."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench.gpu.__main__ import SHOWN
from bench.gpu.__main__ import main as bench_main
from bench.gpu.plan import MINUTES
from csd.cli.main import main as csd_main

ROOT = Path(__file__).parents[3]
CELLS = json.loads((ROOT / "examples" / "gpu.ipynb").read_text())["cells"]
CODE = ["".join(c["source"]) for c in CELLS if c["cell_type"] == "code"]


def cell(name):
    """Source of the one cell that assigns or defines `name`."""
    (found,) = (s for s in CODE if re.search(rf"^(?:def )?{name}\b(?: =|\()", s, re.MULTILINE))
    return found


def commands():
    """Arguments of each call run(sys.executable, ..), with names as their own text."""
    calls = [n for s in CODE for n in ast.walk(ast.parse(s)) if isinstance(n, ast.Call)]
    return [
        [a.value if isinstance(a, ast.Constant) else ast.unparse(a) for a in call.args[1:]]
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "run"
    ]


def test_it_is_saved_without_outputs():
    saved = [c for c in CELLS if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in saved)


def test_its_commands_take_their_options(capsys):
    install, doctor, bench = commands()
    assert install[:3] == ["-m", "pip", "install"]
    assert doctor[:3] == ["-m", "csd.cli.main", "doctor"] and bench[:3] == ["-m", "bench", "gpu"]
    assert int(bench[bench.index("--minutes") + 1]) in MINUTES
    for main, arguments in ((csd_main, doctor[2:]), (bench_main, bench[3:])):
        with pytest.raises(SystemExit) as ended:
            main([*(a for a in arguments[:1] if a == "doctor"), "--help"])
        shown = capsys.readouterr().out
        options = {a for a in arguments if a.startswith("--")}
        assert not ended.value.code and options
        assert all(option in shown for option in options)


def test_its_table_has_columns_of_the_benchmark():
    scope = {}
    exec(cell("COLUMNS").rpartition("\n\ndata = ")[0], scope)
    assert set(scope["COLUMNS"]) <= set(SHOWN)
    row = dict.fromkeys(SHOWN, 1.23456) | {"shape": "qwen2.5-0.5b", "N": 16}
    lines = scope["table"]({"end_to_end": {"rows": [row]}}).splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    assert lines[-1].startswith("| qwen2.5-0.5b | 16 | 1.235 |")
    # no section finished
    assert len(scope["table"]({}).splitlines()) == 2


@pytest.mark.parametrize("right", [True, False])
def test_the_issue_has_the_outcome(right):
    scope = {"dtype": "float16"}
    for name, end in (("COLUMNS", "\n\ndata = "), ("issue", "\n\ndef output")):
        exec(cell(name).rpartition(end)[0], scope)
    data = {"summary": {"sections": {"parity": "done", "vllm": "failed"}}}
    text = scope["issue"](data, "Tesla T4", "abc", right)
    assert text.startswith("GPU result: Tesla T4\n")
    for part in ("Commit abc, float16", "parity: done, vllm: failed", "csd-gpu.json"):
        assert part in text
    assert ("FAILED" in text) != right


def test_its_address_is_that_of_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (address,) = re.findall(r'^ADDRESS = "(.*)"$', cell("ADDRESS"), re.MULTILINE)
    assert address == project.get("urls", {}).get("Source", "")


def test_in_a_clone_nothing_is_asked_for(tmp_path, monkeypatch):
    for place, found in ((ROOT / "examples", str(ROOT)), (tmp_path, "")):
        monkeypatch.chdir(place)
        scope = {}
        exec(cell("ADDRESS"), scope)
        assert scope["SOURCE"] == found or scope["SOURCE"] == scope["ADDRESS"] != ""


def test_without_an_address_it_stops_and_asks_for_one():
    with pytest.raises(SystemExit, match="set ADDRESS"):
        exec(cell("run"), {"SOURCE": "", "Path": Path})


@pytest.mark.parametrize("broken", [False, True])
def test_a_gpu_that_torch_does_not_see_ends_the_run_with_the_reason(broken, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if broken:
        # a torch that cannot be imported: its traceback is shown
        (tmp_path / "torch.py").write_text("raise OSError('libcudart is missing')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scope = {"subprocess": subprocess, "sys": sys, "clone": ROOT}
    reason = "libcudart is missing" if broken else "there is no NVIDIA GPU here"
    with pytest.raises(SystemExit, match=f"(?s)torch does not see a GPU: .*{reason}"):
        exec(cell("QUESTION"), scope)
