"""Tables of drafting.md: what drafters cost, and the rows of steps."""

from bench.lib.common import markdown
from tools.experiment_tables.results import CLASSEVAL, MATH, fold, load, only

COSTS = {
    "consensus, propose": ("consensus", "propose_us"),
    "consensus, insert": ("consensus", "insert_us"),
    "suffix tree (arctic-inference 0.3.0), draft": ("suffix-tree", "propose_us"),
    "the same, extend": ("suffix-tree", "insert_us"),
    "the paper's to the letter, on the host, draft": ("paper", "propose_us"),
    "the paper's with k shrinking, on the host, draft": ("paper-shrinking", "propose_us"),
    "prompt lookup, draft": ("prompt-lookup", "propose_us"),
    "REST, draft": ("rest", "propose_us"),
}


def _ms(us: float) -> str:
    ms = us / 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if round(ms, 2) >= 1 else f"{ms:.2f}"


def drafter_cost() -> str:
    rows, sizes, lengths = load("drafter_cost")["rows"], (4, 16, 64, 256), (512, 2048, 8192)

    def cell(drafter: str, field: str, N: int, shown) -> str:
        records = [r for r in rows if (r["drafter"], r["N"]) == (drafter, N)]
        if not records:
            return "not run"
        return " / ".join(shown(only(records, history=n)[field]) for n in lengths)

    lines = [[label, *(cell(*fields, N, _ms) for N in sizes)] for label, fields in COSTS.items()]
    last = "consensus, insert, us a committed token"
    cells = (cell("consensus", "insert_us_a_token", N, lambda x: f"{x:.0f}") for N in sizes)
    return markdown(["", "N = 4", "16", "64", "256"], [*lines, [last, *cells]])


def shared_rows() -> str:
    """Rows of the model per drawn token, where equal texts share rows and where they do not."""
    names = {CLASSEVAL: "classes from skeletons, temperature 0.2", MATH: "MATH, temperature 0.7"}
    lines = []
    for trace, name in names.items():
        for nodes in (0, 16):
            rows = [r for r in load("replay_rows")["rows"] if r["trace"] == trace]
            own, shared = (
                only(rows, drafter=drafter, nodes=nodes)
                for drafter in ("consensus", "consensus, shared rows")
            )
            each = own["rows_per_token"], shared["rows_per_token"]
            lines.append(
                [
                    f"{name}, N={own['samples']}",
                    str(nodes),
                    f"{own['tau']:.2f}",
                    *(f"{x:.2f}" for x in each),
                    f"{each[0] / each[1]:.2f}",
                ]
            )
    head = ["recorded samples", "nodes", "tau", "rows per token", "shared", "times fewer"]
    return markdown(head, fold(lines))


TABLES = {"drafter_cost": drafter_cost, "shared_rows": shared_rows}
