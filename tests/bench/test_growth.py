"""The levels that `bench.growth` counts are those that the kernels grow."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from draft_cases import CONFIG, random_graph, random_slots
from trace_file import trace_file

from bench.growth import RULES, levels, main
from csd.kernels.draft_tree import draft_tree_triton, grow
from csd.kernels.draft_tree.children import Estimates


@pytest.fixture
def looked_up(monkeypatch):
    """One entry a level that the interpreted kernels grow."""
    calls: list = []
    look_up = grow.look_up

    def counted(*args, **kwargs):
        calls.append(args[2])
        return look_up(*args, **kwargs)

    monkeypatch.setattr(grow, "look_up", counted)
    return calls


@pytest.mark.parametrize(("seed", "extra"), [(0, 6), (1, 20), (2, 60), (3, 400)])
def test_the_kernels_grow_the_levels_that_are_counted(looked_up, seed, extra):
    rng, config = random.Random(seed), replace(CONFIG, decay=0.99, trust=0.95, smoothing=1)
    table = random_graph(rng, config, vocab=30, weights=[1]).table()
    slots = random_slots(rng, 7, config, vocab=30)
    slots.live[2] = True
    slots.max_new[:] = 99
    rows = int(slots.live.sum()) + extra
    draft_tree_triton(table, slots, rows, config)
    state = Estimates(table, slots, config, None)
    with np.errstate(divide="ignore"):
        found = {name: levels(state, extra, *rule) for name, rule in RULES.items()}
    assert len(looked_up) == found["cut"].sum()
    assert found["cut"].sum() <= found["bound"].sum() <= found["alone"].sum()
    if extra < 400:
        assert found["cut"].sum() < found["alone"].sum()


def test_a_row_for_each_budget(tmp_path):
    path = trace_file(tmp_path / "sentence.jsonl", {"samples": [list(range(3, 40))] * 3})
    out = tmp_path / "out.json"
    main([str(path), "--samples", "3", "--nodes", "2", "4", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["nodes"] for row in rows] == [2, 4]
    # what was picked was grown
    assert all(row["alone"] >= row["cut"] >= row["deepest picked"] > 0 for row in rows)
