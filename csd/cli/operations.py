"""`csd doctor --ops`: table of operations and their implementations by backend."""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

import csd.kernels
from csd.kernels.backends import loops
from csd.kernels.common.cpu import compiles
from csd.kernels.common.operator import OPERATIONS, load_loops
from csd.kernels.ops import Ops, exact_triton, reference, triton

# the weight's layout selects the product, not `kernels=` (`csd.models.fused.linear`)
PRODUCT = (
    "linear", "torch.nn.functional.linear", "kernels.layers.cpu.linear.product or oneDNN", "cuBLAS",
    "kernels.layers.row_linear.row_linear_triton",
)  # fmt: skip


def table() -> str:
    """A Markdown table: the operations of a step, those for other models, and fused ones.

    A cell has a function's path within csd, or "reference" if a backend runs the reference.
    """
    backends = {"reference": reference(), "cpu": loops() if compiles() else None}
    backends |= {"triton": triton(), "triton, exact": exact_triton()}
    steps = [f.name for f in fields(Ops) if f.name not in ("name", "fused", "passes")]
    rows = [["operation", *backends], ["---"] * (1 + len(backends))]
    for name in steps:
        run = [None if ops is None else getattr(ops, name) for ops in backends.values()]
        rows.append([name, *_cells(run)])
    rows.append(list(PRODUCT))
    for module in pkgutil.walk_packages(csd.kernels.__path__, "csd.kernels."):
        if compiles() or not {"cpu", "cpu_ops", "numba"} & set(module.name.split(".")):
            import_module(module.name)
    load_loops()
    for name, found in sorted(OPERATIONS.items()):
        if name not in steps:
            rows.append([name, *_cells([found.reference, found.loop, found.triton]), ""])
    fused: dict[str, list[str]] = {}
    for i, ops in enumerate(backends.values()):
        for name, op in (ops.fused if ops else {}).items():
            cells = fused.setdefault(f"{name} (fused)", [""] * len(backends))
            cells[i] = f"{_place(op.fn)}: {', '.join(x.__name__ for x in op.replaces)}"
    rows += [[name, *cells] for name, cells in fused.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(functions: list[Callable | None]) -> list[str]:
    first, cells = functions[0], []
    for i, function in enumerate(functions):
        same = i > 0 and function is first
        cells.append("reference" if same else "" if function is None else _place(function))
    return cells


def _place(function: Any) -> str:
    function = inspect.unwrap(function)
    # the function of a partial
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}".removeprefix("csd.")
