"""Every file of results says on which machine it was made, because one function writes them all."""

import ast
import json
import os
from pathlib import Path

import pytest
import torch

import bench
from bench.lib import common, processor
from csd.utils.device import instructions, model

pytestmark = pytest.mark.bench

FOLDER = Path(bench.__file__).parent
FILES = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.py"))
# JSON that is no result: traces, and what two processes of a benchmark pass to one another
OTHER = {
    ("run", "worker"),
    ("run", "run"),
    ("record", "main"),
    ("vllm_side", "Vllm"),
    ("models", "fetch"),
    ("serve", "ask"),
    ("constraints", "Checkout"),
    ("constraints_worker", "main"),
    ("vllm_worker", "main"),
    ("doctor", "main"),
    ("doctor", "examined"),
    ("time_vllm", "main"),
    ("vllm", "run"),
    ("vllm", "measured"),
    # result files together, each with its machine
    ("calls", "Gathered"),
}
INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse4_2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8
"""
ARM = """processor\t: 0
Features\t: fp asimd crc32 asimdhp sve asimddp i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def calls(name: str):
    """(function that holds it, function that is called) for every call of a file."""
    for node in ast.parse((FOLDER / name).read_text()).body:
        where = getattr(node, "name", "")
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                yield where, ast.unparse(call.func)


@pytest.mark.parametrize("name", FILES)
def test_results_are_written_in_one_place(name):
    found = list(calls(name))
    if name == "lib/common.py":
        assert [where for where, called in found if called == "json.dumps"] == ["write", "finish"]
        return
    stem = Path(name).stem
    assert "from json" not in (FOLDER / name).read_text()
    dumps = {(stem, where) for where, called in found if called in ("json.dump", "json.dumps")}
    assert dumps <= OTHER, f"{name} writes JSON itself: results go through common.write"
    # e2e/answers.py calls the run of bench.long, which writes
    if 'add_argument("--json"' in (FOLDER / name).read_text() and stem != "answers":
        assert {c.removeprefix("common.") for _, c in found} & {"write", "finish"}


def test_a_file_holds_the_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    old = {"bench": "x", "rows": [1], "machine": {"cpu": "of a file that is continued"}}
    common.finish(old, tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["bench"], found["rows"]) == ("x", [1])
    here = found["machine"]
    assert here == json.loads(json.dumps(common.machine()))
    assert here["cpu"] and here["cores"] == os.cpu_count()
    assert here["capability"] == torch.backends.cpu.get_cpu_capability()
    assert here["cpu_threads"] == torch.get_num_threads()
    assert here["environment"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "ATEN_CPU_CAPABILITY" not in here["environment"]
    assert len(here["load"]) == 3 and min(here["load"]) >= 0
    assert here["torch"] == torch.__version__
    assert here["triton"] and here["transformers"] and here["python"]
    assert {"gpu", "instructions", "blas", "onednn", "commit"} <= here.keys()


def test_a_processor_is_read():
    assert model(INTEL) == "Intel(R) Xeon(R) Platinum 8488C"
    assert instructions(INTEL) == [
        "avx2",
        "avx512f",
        "avx512_bf16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    ]
    assert model(ARM) == "implementer 0x41 part 0xd4f"
    assert instructions(ARM) == ["asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"]
    # a system without the file
    assert model("") is None and instructions("") == []


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (
            "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605\n"
            "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)\n"
            "  - Build settings: BLAS_INFO=mkl, X=1",
            {"blas": "mkl 2024.2", "onednn": "3.12.0"},
        ),
        (
            "  - OpenBLAS 0.3.29\n  - Build settings: BLAS_INFO=open, USE_MKLDNN=OFF",
            {"blas": "open 0.3.29", "onednn": None},
        ),
        ("  - Build settings: BLAS_INFO=accelerate", {"blas": "accelerate", "onednn": None}),
        ("", {"blas": None, "onednn": None}),
    ],
    ids=["mkl", "openblas", "accelerate", "none"],
)
def test_libraries_are_read(config, want):
    assert processor.libraries(config) == want
