"""`python -m bench history` on a small trace of our own."""

import json
from pathlib import Path

import pytest
from helpers.runs.trace_file import trace_file
from helpers.targets import slow

from bench.studies.history import history

pytestmark = pytest.mark.bench


@slow
def test_its_table(tmp_path, capsys):
    text = [5, 6, 7, 8, 9, 10, 11, 12] * 3
    samples = [[20 + i, *text, 30 + i] for i in range(4)]
    path, out, plot = (str(tmp_path / n) for n in ("t.jsonl", "out.json", "plot.svg"))
    others = [[60 + i, 2, 2, 70 + i] for i in range(4)]
    trace_file(tmp_path / "t.jsonl", {"samples": samples}, {"samples": others})
    rivals = ["trie", "prompt-lookup"]
    history.main(
        [
            path,
            "--history",
            "0",
            "1",
            "2",
            "8",
            "--nodes",
            "4",
            "8",
            "--drafters",
            *rivals,
            "--json",
            out,
            "--plot",
            plot,
        ]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads(Path(out).read_text())
    rows = found["traces"]["t"]["rows"]
    ours = {(r["history"], r["nodes"], r["kind"]): r for r in rows if r["drafter"] == "consensus"}
    # more was asked for than is recorded
    assert {h for h, _, _ in ours} == {0, 1, 2}
    for n in (4, 8):
        assert ours[2, n, "tokens"]["tau"] > 1.2 * ours[0, n, "tokens"]["tau"]
        assert ours[2, n, "tokens"]["steps"] < ours[0, n, "tokens"]["steps"]
    assert ours[2, 8, "foreign"]["from_history"] < ours[2, 8, "tokens"]["from_history"]
    assert ours[2, 8, "tokens"]["best_other"] in rivals
    given = {(r["drafter"], r["history"]): r["tau"] for r in rows if r["drafter"] in rivals}
    assert given["trie", 2] > given["trie", 0]
    assert given["prompt-lookup", 2] > given["prompt-lookup", 0]
    # a file is completed: another trace joins it
    other = trace_file(tmp_path / "u.jsonl", {"samples": samples})
    history.main([str(other), "--nodes", "8", "--drafters", "--json", out])
    both = json.loads(Path(out).read_text())["traces"]
    assert both["t"] == found["traces"]["t"] and both["u"]["problems"] == 1
    # and a drafter that is left out stays
    history.main([path, "--history", "0", "2", "--nodes", "8", "--drafters", "trie", "--json", out])
    rows = json.loads(Path(out).read_text())["traces"]["t"]["rows"]
    assert [r for r in rows if r["drafter"] == "prompt-lookup"] == [
        r for r in both["t"]["rows"] if r["drafter"] == "prompt-lookup"
    ]
    assert sum(r["drafter"] == "trie" for r in rows) == 2
