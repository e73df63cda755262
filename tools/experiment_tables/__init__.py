"""Tables of docs/experiments, made from the result files: `python -m tools.experiment_tables`.

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`. The command writes each anew;
a test fails where one differs from its result file.
"""

import re
from pathlib import Path

from tools.experiment_tables import (
    answers,
    cpu,
    drafting,
    history,
    kernels,
    replayed,
)

PAGES = Path(__file__).parents[2] / "docs" / "experiments"
TABLES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in (answers, cpu, drafting, history, kernels, replayed)
    for name, function in module.TABLES.items()
}
MARKED = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- /table -->", re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with its tables made anew. Raises KeyError for an unknown name."""

    def of(match: re.Match) -> str:
        return f"<!-- table: {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- /table -->"

    return MARKED.sub(of, page)
