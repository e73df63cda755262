"""Attention at twelve shapes, compared to other libraries' operations for the same job."""

import subprocess
import sys
from importlib.util import find_spec

from bench.gpu.lib.section import Section

# provider -> the module that it imports, and how to install it with this torch
OTHERS = {"flashinfer": ("flashinfer", "pip install flashinfer-python")}


def run(section: Section) -> None:
    beside = []
    for name, (module, install) in OTHERS.items():
        if find_spec(module) is None:
            section.add(provider=name, note="not installed", install=install)
        else:
            beside.append(name)
    if not section.cuda:
        section.skip("attention is timed on a GPU: python -m bench kernels")
        return
    path = section.out / "attention_shapes.json"
    command = [sys.executable, "-m", "bench.micro.kernels"]
    command += ["--only", "attention", "--json", str(path), "--replays", "30", "--beside", *beside]
    command += ["--quick"] * bool(section.call)
    try:
        done = subprocess.run(command, timeout=max(section.left, 1))
    except subprocess.TimeoutExpired:
        section.cut_off(f"{path.name} has the shapes there was time for")
        return
    if done.returncode:
        raise RuntimeError(f"bench/micro/kernels.py ended with status {done.returncode}")
    section.add(file=path.name)
