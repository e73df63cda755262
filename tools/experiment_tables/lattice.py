"""Tables of lattice.md."""

from bench.lib.common import markdown
from tools.experiment_tables.results import fold, load


def counts() -> str:
    lines = [
        [
            str(r["samples"]),
            r["noise"],
            f"{r['variance of counts']:.2f}",
            f"{r['distinct tokens']:.2f}",
            f"{r['probability covered']:.3f}",
        ]
        for r in load("lattice")["rows"]
    ]
    head = ["N", "noise", "variance of counts", "distinct tokens", "probability covered"]
    return markdown(head, fold(lines))


TABLES = {"counts": counts}
