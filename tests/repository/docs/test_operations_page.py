"""docs/operations.md shows what `csd doctor --ops` prints."""

from pathlib import Path

import pytest

pytest.importorskip("numba")

from csd.cli.main import main


def test_the_page_has_the_table(capsys):
    assert main(["doctor", "--ops"]) == 0
    table = capsys.readouterr().out
    page = Path(__file__).parents[3].joinpath("docs", "operations.md").read_text()
    assert page.endswith(table)
    # every operation has a reference, and no backend has two of one
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert all(row[1] for row in rows if "(fused)" not in row[0])
    assert len({row[0] for row in rows}) == len(rows) > 25
