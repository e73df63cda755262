"""Rows of `python -m bench replay`."""

import json
from pathlib import Path

import pytest
from helpers.targets import few

from bench.studies.drafting.replay import main, run, summary, tau
from bench.studies.drafting.replay_rows import add_ratios, metrics, tables, text
from csd.traces.traces import Trace, read_traces

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
REPLAY = ROOT / "bench/results/replay.json"
STUDY = ROOT / "bench/traces/study.jsonl.gz"


def test_a_row_has_the_metrics_that_papers_of_drafters_report():
    """Two samples that say the same: the later steps of each are drafted by the other."""
    samples = [[5, 6, 7, 8] * 5, [9, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6]]
    traces = [Trace(i, [1, 2, 3, 4], samples, 0.7, None) for i in range(2)]
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
    printed = text([{"trace": "t"} | row]).splitlines()
    assert f"{row['accepted_length']:.3f}" in printed[1] and "accept" in printed[0]


def test_a_datastore_has_the_problems_that_are_not_replayed():
    texts = [[[5, 6, 7, 8] * 5], [[5, 6, 7, 8] * 6]]
    traces = [Trace(i, [1, 2, 3, 4], samples, 0.7, None) for i, samples in enumerate(texts)]
    (alone,) = run("rest", traces[:1], 1, 8)
    (beside,) = run("rest", traces[:1], 1, 8, others=traces)
    assert alone.nodes == 0 and alone.tau == 1
    assert beside.tau > 2
    # its own problem stays out of it
    (own,) = run("rest", traces[:1], 1, 8, others=traces[:1])
    assert own.nodes == 0


def test_pages_have_the_replay_tables():
    """`python -m bench replay --table bench/results/replay.json`, table by table."""
    rows = json.loads(REPLAY.read_text())["rows"]
    page = (ROOT / "docs/experiments/drafting.md").read_text()
    found = tables(rows)
    # a table a trace, and the ratios
    assert len(found) == 1 + len({r["trace"] for r in rows})
    for table in found:
        assert table in page
    for trace in {r["trace"] for r in rows}:
        have = {r["drafter"] for r in rows if r["trace"] == trace}
        assert {"consensus", "paper", "paper-tree", "prompt-lookup", "rest"} <= have


def test_the_table_of_samples_that_copy_is_of_its_files():
    files = ("replay_copying", "replay_deeper")
    rows = [
        r
        for name in files
        for r in json.loads((ROOT / f"bench/results/{name}.json").read_text())["rows"]
        if r["nodes"] == 16 and (r["samples"] == 8 or "classeval" in r["trace"])
    ]
    page = (ROOT / "docs/experiments/drafting.md").read_text()
    for drafter in ("suffix-tree", "trie-prompt", "consensus"):
        cells = [metrics(r) for r in rows if r["drafter"] == drafter]
        assert len(cells) == 4 and f"| {drafter} | {' | '.join(cells)} |" in page


def test_ratios_are_over_the_same_problems_and_by_who_published():
    def row(drafter, tokens, problems=(1, 2), nodes=8):
        return {
            "trace": "t",
            "samples": 2,
            "nodes": nodes,
            "drafter": drafter,
            "tau": sum(tokens) / 20,
            "by_problem": {"problem": [*problems], "tokens": tokens, "sample_steps": [10, 10]},
        }

    ours = row("consensus", [30, 30])
    rows = [
        ours,
        row("rest", [20, 10]),
        row("trie-prompt", [20, 20]),
        row("consensus-counts", [40, 40]),
        row("suffix", [50, 50], problems=(3, 4)),
        row("trie", [60, 60], nodes=4),
    ]
    add_ratios(rows)
    assert (ours["best_published"], ours["ratio_published"]) == ("rest", 2.0)
    assert ours["ratio_published_interval"] == (1.5, 3.0)
    assert (ours["best_any"], ours["ratio_any"]) == ("trie-prompt", 1.5)
    assert ours["ratio_any_interval"] == (1.5, 1.5)
    assert not any("ratio_any" in r for r in rows[1:])


def test_replayed_rows_replace_old_ones(tmp_path, capsys):
    traces, out = tmp_path / "few.jsonl", str(tmp_path / "out.json")
    lines = [
        {"problem": i, "prompt_ids": [1, 2], "samples": [[5, 6, 7, 8] * 4] * 2, "temperature": 0.7}
        for i in range(2)
    ]
    traces.write_text("".join(json.dumps(x) + "\n" for x in lines))
    asked = [str(traces), "--samples", "2", "--nodes", "4", "--json", out, "--drafters"]
    main([*asked, "prompt-lookup", "rest"])
    main([*asked, "consensus", "rest"])
    found = json.loads(Path(out).read_text())
    assert [r["drafter"] for r in found["rows"]] == ["prompt-lookup", "rest", "consensus"]
    assert found["rows"][2]["ratio_published"] > 0 and found["machine"]["cpu"]
    assert [run["arguments"]["drafters"] for run in found["runs"].values()] == [
        ["prompt-lookup", "rest"],
        ["consensus", "rest"],
    ]
    capsys.readouterr()
    main(["--table", out])
    assert capsys.readouterr().out.count("| few") == 1


def test_unreproduced_claims_match_the_files():
    """docs/papers.md: the literal chain and the one that shrinks k, beside prompt lookup."""
    page = (ROOT / "docs/papers.md").read_text()
    rows = [r for r in json.loads(REPLAY.read_text())["rows"] if r["nodes"] == 16]
    found = {(r["trace"].split("_")[0], r["samples"], r["drafter"]): r["tau"] for r in rows}
    names = ("paper", "paper-shrinking", "prompt-lookup", "rest")
    for trace, counts in (("smollm2-135m", (4, 8, 16)), ("qwen2.5-math", (4, 8))):
        for n in counts:
            cells = " | ".join(f"{found[trace, n, name]:.2f}" for name in names)
            assert f"N = {n} | {cells} |" in page
    strict = json.loads((ROOT / "bench/results/study.json").read_text())["sections"]["strictness"]
    tau = {(r["trace"], r["drafter"], r["knob"], r["value"]): r["tau"] for r in strict["rows"]}
    for trace in dict.fromkeys(r["trace"] for r in strict["rows"]):
        ours, theirs = tau[trace, "chain", "eps, k = 4", 1], tau[trace, "prompt-lookup", "", 0]
        assert ours < theirs and f"{ours:.2f} against {theirs:.2f}" in page


@few(1)
@pytest.mark.parametrize("nodes", [4, 8])
def test_consensus_is_not_below_prompt_lookup_without_agreement(nodes):
    """Open writing at temperature 1.3, with the target's probabilities and without."""
    traces = [t for t in read_traces(STUDY) if str(t.problem).startswith("writing/")]
    traces = [t for t in traces if t.temperature == 1.3][:3]
    assert len(set(map(tuple, traces[0].samples))) == 8
    lookup = tau(run("prompt-lookup", traces, 8, nodes))
    for drafter in ("consensus", "consensus-counts"):
        assert tau(run(drafter, traces, 8, nodes)) >= lookup
