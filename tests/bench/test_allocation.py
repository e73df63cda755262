"""`bench.allocation` on recordings of which it is known what must come out."""

import json

import pytest
import torch
from trace_file import trace_file

from bench.allocation import RULES, Wary, Watched, in_waves, main, reliability
from csd.evaluate.replay import replay
from csd.traces.traces import Trace

SENTENCE = list(range(3, 15))


def trace(samples):
    return Trace("a", [1, 2], samples, 0.7, None)


def test_every_rule_has_a_row_and_paths_are_counted(tmp_path, capsys):
    out = tmp_path / "out.json"
    path = trace_file(tmp_path / "sentence.jsonl", {"samples": [SENTENCE * 3] * 8})
    main([str(path), "--samples", "8", "--nodes", "4", "--json", str(out)])
    found = json.loads(out.read_text())["sentence"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sentence"] == found
    rows = {row["rule"]: row for row in found["rules"]}
    assert list(rows) == list(RULES)
    # equal samples end together: nobody survives, nobody fails more than others
    first = rows["as it is"]["tau"]
    assert rows["survivors get the nodes of samples that ended"]["tau"] == first
    # whoever comes later has everything to draft from
    assert rows["half of the samples run ahead"]["tau"] > first
    assert rows["a quarter at a time"]["tau"] > rows["half of the samples run ahead"]["tau"]
    assert all(0 <= row["true"] <= 1 for row in found["reliability"])
    # a file's part stays when another file is replayed into the same results
    other = trace_file(tmp_path / "other.jsonl", {"samples": [[3, 4, 5] * 3] * 4})
    main([str(other), "--samples", "4", "--nodes", "2", "--json", str(out)])
    both = json.loads(out.read_text())
    assert both["sentence"] == found and both["other"]["problems"] == 1


def test_a_path_comes_true_only_in_whole():
    # the second sample leaves the first one's text, so half of what is drafted for it is wrong
    own = trace([SENTENCE * 3, SENTENCE * 2 + list(range(40, 52))])
    drafter = Watched()
    found = replay(own, drafter, 2, 4)
    assert sum(drafter.drafted) == found.nodes
    assert sum(drafter.true) == found.tokens - found.sample_steps
    (row,) = [r for r in reliability([own], 2, 4) if r["path probability from"] == "0.5"]
    assert 0.5 <= row["expected"] <= 1


def test_a_later_wave_draws_its_own_samples():
    samples = [[10 * i + j for j in range(9)] for i in range(1, 5)]
    results = in_waves(trace(samples), 4, 4, 2)
    assert [r.tokens for r in results] == [18, 18]
    # nothing is common to any two of them
    assert all(r.tau == 1 for r in results)


def test_a_sample_that_fails_gets_fewer_nodes():
    drafter = Wary()
    shares = []
    insert = drafter.insert

    def watched(pool, slots, verdict):
        shares.append(pool.slot_nodes.tolist())
        insert(pool, slots, verdict)

    drafter.insert = watched
    torch.manual_seed(0)
    # both know the same words, but the second has them in no order
    words = torch.randint(3, 6, (60,)).tolist()
    replay(trace([[3, 4, 5] * 20, words]), drafter, 2, 4)
    late = [s for s in shares[8:] if min(s) > 0]
    assert late and sum(a for a, _ in late) > 1.2 * sum(b for _, b in late)


@pytest.mark.parametrize("waves", [1, 2])
def test_no_token_is_lost(waves):
    samples = [SENTENCE[: 4 + i] for i in range(4)]
    assert sum(r.tokens for r in in_waves(trace(samples), 4, 4, waves)) == sum(map(len, samples))
