"""The benchmark of a drafter's own time."""

import json

import pytest
import torch

from bench.studies.drafting.drafter_cost import main, observed, synthetic
from csd.evaluate.replay import Recording, replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.kernels.verify.advance_slots import advance_slots_ref

pytestmark = pytest.mark.bench


def test_every_drafter_has_a_row_for_each_history(tmp_path, capsys):
    path = tmp_path / "cost.json"
    main(["--samples", "2", "3", "--history", "40", "90", "--steps", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    for name in ("consensus", "paper", "paper-shrinking", "prompt-lookup", "rest"):
        got = [(r["N"], r["history"]) for r in rows if r["drafter"] == name]
        assert got == [(2, 40), (2, 90), (3, 40), (3, 90)]
    assert all(r["propose_us"] > 0 and r["insert_us"] > 0 and r["tokens"] >= r["N"] for r in rows)
    for r in rows:
        graph = r["drafter"] == "consensus"
        assert (r["held"] >= r["touched"] > 0) if graph else r["contexts"] == 0
    main(
        [
            "--samples",
            "2",
            "--history",
            "90",
            "--steps",
            "2",
            "--successors",
            "1",
            "--drafters",
            "consensus",
            "--json",
            str(path),
        ]
    )
    again = json.loads(path.read_text())["rows"]
    # the others are kept
    assert [a != b for a, b in zip(again, rows, strict=True)].count(True) == 1
    one = next(r for r in again if (r["drafter"], r["N"], r["history"]) == ("consensus", 2, 90))
    assert one["held"] == one["touched"]
    # the same samples each time
    assert synthetic(3, 50) == synthetic(3, 50)


def test_observations_equal_replay_inserts():
    trace = synthetic(3, 60)
    trace.samples = [s[:34] for s in trace.samples]
    recording = Recording(trace, 3)
    graph = ConsensusGraph(reference(), torch.device("cpu"))
    slots = recording.slots(graph.context)
    graph.observe_prompt(1, trace.prompt, 0, len(trace.prompt), slots)
    for count in (17, 17):
        pool = observed(recording, slots, count)
        verdict = recording.verdict(pool, slots)
        assert verdict.accept_count.tolist() == [count] * 3
        advance_slots_ref(slots, verdict)
        graph.insert(pool, slots, verdict)
    assert not slots.live.any()
    assert slots.context[1].tolist() == trace.samples[1][: -graph.context - 1 : -1]

    other = ConsensusGraph(reference(), torch.device("cpu"))
    replay(trace, other, 3, 4)

    def contexts(table):
        used = table.entry_group == 1
        tokens = table.entry_tokens[used].tolist()
        total = table.entry_total[used].tolist()
        return sorted(x for x in zip(tokens, total, strict=True) if x[0][0] < 1 << 30)

    # the group's shortest context takes SUCCESSORS tokens a step, so it alone depends on steps
    assert contexts(graph.table) == contexts(other.table)
