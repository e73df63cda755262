"""Tables of kernels.md."""

from bench.gpu.aot import TARGETS
from bench.lib.common import markdown
from tools.experiment_tables.results import CLASSEVAL, GSM8K, MATH, OWN, fold, load, only

GROWTH = (
    ("GSM8K", GSM8K, 2),
    ("GSM8K", GSM8K, 8),
    ("MATH", MATH, 2),
    ("MATH", MATH, 8),
    ("ClassEval", CLASSEVAL, 8),
    ("our own", OWN, 8),
    ("rewritten texts", "rewrite", 8),
)


def growth() -> str:
    rows, lines = load("growth")["rows"], []
    for label, trace, nodes in GROWTH:
        row = only(rows, trace=trace, nodes=nodes)
        fields = ("alone", "cut", "cut again", "deepest picked")
        cells = (f"{row[name]:.1f}" for name in fields)
        lines.append([f"{label}, {row['samples']}", str(nodes), *cells])
    head = [
        "trace, samples",
        "nodes a sample",
        "each slot alone",
        "with the cut",
        "cut after each level",
        "deepest node picked",
    ]
    return markdown(head, fold(lines))


def chips() -> str:
    rows = load("aot_chips")["rows"]
    targets = [t for t in TARGETS if any(r["target"] == t for r in rows)]

    def cell(kernel: str, target: str) -> str:
        r = only(rows, kernel=kernel, target=target)
        stack = f", stack {r['stack']}" if r["stack"] else ""
        at_once = f", {r['at once']} at once" if r["at once"] else ""
        return f"{r['registers']}, {r['shared'] / 1024:.0f} of {r['limit'] // 1024}{at_once}{stack}"

    kernels = dict.fromkeys(r["kernel"] for r in rows)
    lines = [[kernel, *(cell(kernel, target) for target in targets)] for kernel in kernels]
    return markdown(["registers, KiB of shared memory, programs", *targets], lines)


TABLES = {"chips": chips, "growth": growth}
