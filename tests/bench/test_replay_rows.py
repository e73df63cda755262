"""What a row of `python -m bench.replay` says of a drafter."""

import json
from pathlib import Path

import pytest

from bench.replay import run, summary, table
from csd.traces.traces import Trace

ROOT = Path(__file__).parents[2]


def test_a_row_has_the_metrics_that_papers_of_drafters_report():
    """Two samples that say the same: the later steps of each are drafted by the other."""
    text = [[5, 6, 7, 8] * 5, [9, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6]]
    traces = [Trace(i, [1, 2, 3, 4], text, 0.7, None) for i in range(2)]
    results = run("paper", traces, 2, 8)
    row = summary("paper", results, 2, 8)
    accepted = sum(sum(r.sources[1:]) for r in results)
    steps, nodes = (sum(getattr(r, x) for r in results) for x in ("sample_steps", "nodes"))
    assert accepted > 4
    assert row["accepted_length"] == pytest.approx(accepted / steps)
    assert row["acceptance"] == pytest.approx(accepted / nodes) and 0 < row["acceptance"] < 1
    # every step of a sample commits the target's own token too
    assert row["tau"] == pytest.approx(1 + row["accepted_length"], abs=0.2)
    assert row["draft_microseconds"] * steps / 1e6 == pytest.approx(
        sum(r.propose_seconds for r in results)
    )
    printed = table([{"trace": "t"} | row]).splitlines()
    assert f"{row['accepted_length']:.3f}" in printed[1] and "accept" in printed[0]


def test_a_datastore_has_the_problems_that_are_not_replayed():
    texts = [[[5, 6, 7, 8] * 5], [[5, 6, 7, 8] * 6]]
    traces = [Trace(i, [1, 2, 3, 4], text, 0.7, None) for i, text in enumerate(texts)]
    (alone,) = run("rest", traces[:1], 1, 8)
    (beside,) = run("rest", traces[:1], 1, 8, others=traces)
    assert alone.nodes == 0 and alone.tau == 1
    assert beside.tau > 2
    # its own problem stays out of it
    (own,) = run("rest", traces[:1], 1, 8, others=traces[:1])
    assert own.nodes == 0


def test_the_page_shows_the_rows_of_the_file():
    rows = json.loads((ROOT / "bench/results/replay_metrics.json").read_text())["rows"]
    page = (ROOT / "docs/experiments.md").read_text()
    assert {"paper", "paper-tree", "rest"} <= {row["drafter"] for row in rows}
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        cells = [
            f"{r['tau']:.2f} / {r['accepted_length']:.2f} / {r['acceptance']:.1%} / "
            f"{r['nodes_used']:.1f} / {r['draft_microseconds']:.0f}"
            for r in rows
            if r["drafter"] == drafter
        ]
        assert f"| {drafter} | {' | '.join(cells)} |" in page


def test_what_does_not_reproduce_is_what_the_files_hold():
    """docs/papers.md: the chain that shrinks k, and the literal one, beside prompt lookup."""
    page = (ROOT / "docs/papers.md").read_text()
    rows = json.loads((ROOT / "bench/results/replay.json").read_text())["rows"]
    rows = [r for r in rows if r["nodes"] == 16]
    found = {(r["trace"][:4], r["samples"], r["drafter"]): r["tau"] for r in rows}
    for trace, counts in (("smol", (4, 8, 16)), ("qwen", (4, 8))):
        for n in counts:
            names = ("paper-shrinking", "prompt-lookup", "rest")
            cells = " | ".join(f"{found[trace, n, name]:.2f}" for name in names)
            assert f"N = {n} | {cells} |" in page
    strict = json.loads((ROOT / "bench/results/study.json").read_text())["sections"]["strictness"]
    tau = {(r["trace"], r["drafter"], r["knob"], r["value"]): r["tau"] for r in strict["rows"]}
    for trace in dict.fromkeys(r["trace"] for r in strict["rows"]):
        ours, theirs = tau[trace, "chain", "eps, k = 4", 1], tau[trace, "prompt-lookup", "", 0]
        assert ours < theirs and f"{ours:.2f} against {theirs:.2f}" in page
