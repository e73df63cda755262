"""`python -m bench.history_ends`: what is expected of a sample's end, and its table."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from trace_file import trace_file

from bench import history_ends, queue
from bench.history_ends import RULES, Left
from csd.kernels.noise import prompt_key
from csd.state.pool import MOST_AHEAD, PACE
from csd.traces.traces import Trace, read_traces

# two live samples of 6 and 9 tokens, and earlier ones of 4 and 8
TRACE = Trace("a", [1, 2], [[3] * 6, [4] * 9, [5] * 4, [6] * 8], 0.7, None, seed=7)
KEY = prompt_key(7, [1, 2])


def test_tokens_left_are_those_of_the_longer_ones():
    left = Left([TRACE], 2, "expected")
    assert [left(KEY, 0, g) for g in (0, 4, 7, 8)] == [6, 4, 1, 0]
    assert [Left([TRACE], 2, "true")(KEY, s, 2) for s in (0, 1)] == [4, 7]


def test_a_sample_that_has_ended_is_known():
    left = Left([TRACE], 2, "expected")
    state = SimpleNamespace(
        live=np.array([True, True, False]), key=np.array([KEY, KEY, 0]),
        sample=np.array([0, 1, 0]), generated=np.array([5, 2, 0]),
        pace=np.array([PACE] * 3),
    )  # fmt: skip
    # 8 - 5 and (2 + 6) / 2 tokens left: the first sample is a token ahead
    assert left.head_starts(state, np.array([0, 1])).tolist() == [PACE, 0, 0]
    state.generated[1] = 200
    # nobody was so long, so it may end at once
    assert left.head_starts(state, np.array([0, 1])).tolist() == [0, 3 * PACE, 0]
    assert left.head_starts(state, np.array([1])).tolist() == [0, 0, 0]
    assert left.known[KEY] == [4, 8, 6]
    state.pace[:] = 0
    assert left.head_starts(state, np.array([1])).tolist() == [0, 0, 0]
    assert PACE * 200 > MOST_AHEAD


@pytest.mark.parametrize("apart", [False, True])
def test_its_table(tmp_path, capsys, apart):
    said = [5, 6, 7, 8, 9, 10, 11, 12] * 3
    rows = [{"prompt_ids": [i], "samples": [[*said[:n], 20 + n] for n in (4, 24, 6, 20, 24)]}
            for i in (1, 2)]  # fmt: skip
    path, out = trace_file(tmp_path / "t.jsonl", *rows), tmp_path / "out.json"
    given = [str(path), "--live", "3", "--history", "1", "--nodes", "2", "--json", str(out)]
    out.write_text('{"calls": {"another": {}}}')
    history_ends.main(given + ["--apart"] * apart)
    calls = json.loads(out.read_text())["calls"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["calls"] == calls
    assert list(calls) == ["another", "t, apart" if apart else "t"]
    found = list(calls.values())[1]
    assert [r["rule"] for r in found["rows"]] == list(RULES)
    assert found["problems"] == 2
    # what csd does is what its queue does unpatched
    traces = [history_ends.first(t, 4) for t in read_traces(path)]
    calls = [[t] for t in traces] if apart else [traces]
    expected = sum(queue.run(c, 32, None, 2, 1)["steps"] for c in calls)
    assert found["rows"][0]["steps"] == expected
    assert [r["to position"] for r in found["rows"]] == [
        r["steps"] / expected for r in found["rows"]
    ]
