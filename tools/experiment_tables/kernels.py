"""The tables of kernels.md."""

from bench.gpu.aot import TARGETS
from bench.lib.common import markdown
from tools.experiment_tables.results import load, only


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


def passes() -> str:
    result = load("vocabulary_reads")
    lines = []
    for r in result["rows"]:
        before = only(result["before"]["rows"], row=r["row"], settings=r["settings"])
        counts = (r["scan"], r["compact"], r["sample"], before["passes"], r["passes"])
        lines.append([r["row"], r["settings"], str(r["launches"]), *(f"{n:.2f}" for n in counts)])
    head = ["row", "settings", "launches", "maxima", "list", "sampling", "passes before", "now"]
    return markdown(head, lines)


TABLES = {"chips": chips, "passes": passes}
