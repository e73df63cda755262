"""Kernels take records and constants as NamedTuples, so that none has more than 16 parameters."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "csd" / "kernels"
MOST = 16


def test_kernels_have_few_parameters():
    parameters = {
        node.name: len(node.args.args) + len(node.args.kwonlyargs)
        for path in KERNELS.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert len(parameters) > 30
    assert not {name: count for name, count in parameters.items() if count > MOST}
