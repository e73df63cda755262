"""Kernels take records and constants as NamedTuples, so that none has more than 16 parameters."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "csd" / "kernels"
MOST = 16
# kernels that still have more; only ever shorter
MORE = {
    "_advance_slots_kernel",
    "_compact_kernel",
    "_finish_kernel",
    "_sample_kernel",
    "_scan_kernel",
    "_snapshot_kernel",
}


def parameters():
    """Number of parameters by kernel."""
    return {
        node.name: len(node.args.args) + len(node.args.kwonlyargs)
        for path in KERNELS.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


def test_kernels_have_few_parameters():
    found = parameters()
    assert len(found) > 30
    assert {name for name, count in found.items() if count > MOST} == MORE
