"""Attention at twelve shapes against what others compose for the same job."""

import subprocess
import sys
from importlib.util import find_spec

from bench.gpu.section import Section


def run(section: Section) -> None:
    if not section.cuda:
        section.skip("attention is timed on a GPU: bench.kernels --only attention")
        return
    if find_spec("bench.kernels") is None:
        section.skip("there is no bench.kernels to time attention with")
        return
    path = section.out / "attention_shapes.json"
    command = [sys.executable, "-m", "bench.kernels", "--device", "cuda", "--only", "attention"]
    command += ["--json", str(path), "--replays", "10" if section.quick else "30"]
    try:
        done = subprocess.run(command, timeout=max(section.left, 1))
    except subprocess.TimeoutExpired:
        section.skip(f"attention: {path.name} has the shapes there was time for")
        return
    if done.returncode:
        raise RuntimeError(f"bench.kernels ended with status {done.returncode}")
    section.add(file=path.name)
