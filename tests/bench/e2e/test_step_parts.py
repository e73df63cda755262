"""`python -m bench step_parts`: parts of a step, and the whole of one that is not looked into."""

import json

import pytest

from bench.e2e.step.step_parts import main
from csd.engine.step.step import PHASES

pytestmark = pytest.mark.bench


def test_parts_add_up_to_the_step_one_by_one(toy_folder, tmp_path, capsys):
    path = tmp_path / "parts.json"
    main([toy_folder, "--samples", "2", "--nodes", "0", "8", "--tokens", "24", "--json", str(path)])
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == found
    assert [(r["samples"], r["nodes"]) for r in found["rows"]] == [(2, 0), (2, 8)]
    for row in found["rows"]:
        parts = [row[n] for n in ("products", "head", "attention", "layers")]
        parts += [row[n] for n in PHASES if n != "forward"]
        assert all(x > 0 for x in parts) and row["step"] > 0
        # medians of rounds: the sum of some is not the median of the sums
        assert 0.5 < sum(parts) / row["one by one"] < 2
        assert row["over products"] > 0
