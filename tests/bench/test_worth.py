"""`bench.worth` on steps of which it is known how many nodes pay."""

import json

import numpy as np
import pytest
from trace_file import trace_file

from bench.worth import SLOPES, main, recorded, tokens_by_time
from csd.evaluate.replay import replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.state.pool import COST_ONE, path_probability
from csd.traces.traces import Trace

SENTENCE = list(range(3, 15))


def test_nodes_are_kept_while_they_pay():
    # one live slot, nodes of probability 1/2 and 1/4, of which the first always comes true
    step = ([COST_ONE, 2 * COST_ONE], np.array([True, False]), 1)
    for slope, tokens in ((0.01, 2 / 1.02), (0.4, 2 / 1.4), (1.0, 1.0)):
        assert tokens_by_time([[step]], slope, path_probability) == pytest.approx(tokens)


def test_what_came_true_is_what_was_accepted():
    trace = Trace("a", [1, 2], [SENTENCE * 3] * 3 + [SENTENCE * 2], 0.7, None)
    (steps,) = recorded([trace], 4, 4)
    found = replay(trace, ConsensusGraph(reference(), "cpu"), 4, 4)
    assert len(steps) == found.steps
    assert [(live, len(costs)) for costs, _, live in steps] == found.rows
    # a sample's last token was drafted, but nothing is drawn behind it
    accepted = sum(found.sources[1:])
    assert accepted - 4 <= sum(true.sum() for _, true, _ in steps) <= accepted
    assert all(costs == sorted(costs) for costs, _, _ in steps)


def test_a_row_for_each_slope(tmp_path):
    out = tmp_path / "out.json"
    path = trace_file(tmp_path / "sentence.jsonl", {"samples": [SENTENCE * 3] * 4})
    main([str(path), "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["slope"] for row in rows] == list(SLOPES)
    # samples that repeat themselves are worth drafting for, the more the cheaper rows are
    rates = [row["acceptance"] for row in rows]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 1
    other = trace_file(tmp_path / "other.jsonl", {"samples": [[3, 4, 5] * 9] * 3})
    for _ in range(2):
        main([str(other), "--json", str(out)])
    found = json.loads(out.read_text())["rows"]
    assert found[: len(SLOPES)] == rows
    assert [row["trace"] for row in found[len(SLOPES) :]] == ["other"] * len(SLOPES)
