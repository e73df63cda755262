"""`bench.trust` on recordings of which it is known what must come out."""

import json

import numpy as np
import pytest
from trace_file import trace_file

from bench.ablate import run as replay_all
from bench.replay import tau
from bench.trust import CELLS, Learned, fitted, main, run
from csd.evaluate.replay import replay
from csd.state.context_table import GraphConfig
from csd.state.pool import HISTORY, OWN, SIBLING
from csd.traces.traces import Trace

SENTENCE = list(range(3, 15))
FLAT = np.ones(CELLS)


def trace(samples, top=None):
    return Trace("a", [1, 2], samples, 0.7, top)


@pytest.fixture
def mixed():
    """Three samples that repeat a sentence, and one that leaves it."""
    return trace([SENTENCE * 3] * 3 + [SENTENCE + list(range(20, 44))])


def test_a_table_of_ones_is_the_graph_as_it_is(mixed):
    same, counts = run([mixed], 4, 8, FLAT, False)
    assert same == tau(replay_all([mixed], GraphConfig(), 4, 8))
    came, expected = counts
    assert came.sum() > 0 and expected.sum() > 0


def test_children_of_accepted_nodes_are_counted(mixed):
    drafter = Learned(FLAT, False)
    found = replay(mixed, drafter, 4, 8)
    # the last token of a sample is drawn by no accepted node that is still read
    accepted = sum(found.sources[1:])
    assert accepted - 4 <= drafter.came.sum() <= accepted
    by_source = drafter.came.reshape(-1, HISTORY)
    for source in (OWN, SIBLING):
        assert abs(by_source[:, source - 1].sum() - found.sources[source]) <= 4


def test_what_never_comes_true_is_trusted_less():
    # the first words of a sample never follow what its siblings said, which came first
    words = [[s, *range(100 * s, 100 * s + 30)] for s in range(3, 7)]
    drafter = Learned(FLAT, True)
    replay(trace(words), drafter, 4, 8)
    assert drafter.came.sum() == 0 < drafter.expected.sum()
    before = drafter.expected.copy()
    learned = fitted([np.stack([np.where(before > 0, 0.1, 1.0), np.maximum(before, 0.1)])])
    assert learned[before > 1].max() < 1


def test_every_file_has_a_row(tmp_path):
    out = tmp_path / "out.json"
    one = trace_file(tmp_path / "one.jsonl", {"samples": [SENTENCE * 3] * 4})
    two = trace_file(tmp_path / "two.jsonl", {"samples": [SENTENCE * 2] * 4})
    main([str(one), str(two), "--nodes", "4", "--samples", "4", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["trace"], row["nodes"]) for row in rows] == [("one", 4), ("two", 4)]
    for row in rows:
        assert row["ratio"]["as it is"] == 1
        assert all(ratio > 0.9 for ratio in row["ratio"].values())
