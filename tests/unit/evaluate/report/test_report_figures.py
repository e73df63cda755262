"""Figures of a report: what its page draws, from the tokens, steps and votes of a run."""

import json
from itertools import pairwise

from helpers.targets import slow

from csd.evaluate.report import data, page
from csd.evaluate.vote import Decision

TEXT = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], [1, 2, 5]]


def test_the_lead_counts_shared_rows(place):
    run = json.loads((place / "out.json").read_text())
    stats = run["stats"]
    alone = stats["sample_steps"] + stats["nodes_proposed"]
    # the run's own counts: four samples whose first tokens have equal text before them
    assert 0 < stats["rows"] < alone
    assert f"it computed {stats['rows']:,} rows in place of {alone:,}." in page(run)
    for other in ({"rows": alone}, {"rows": 0}):
        assert "share rows" not in page(run | {"stats": stats | other})
    del stats["rows"]
    assert "share rows" not in page(run)


def test_samples_diverge_where_their_tokens_do():
    nodes = data.divergence(TEXT)
    found = {(n["start"], n["end"], tuple(n["samples"])) for n in nodes}
    assert found == {
        (0, 2, (0, 1, 2, 3)),
        (2, 3, (0, 2)),
        (3, 4, (0,)),
        (3, 5, (2,)),
        (2, 3, (1, 3)),
    }
    # the nodes above a node come before it
    path: list = []
    for node in nodes:
        path[node["depth"] :] = [node]
        assert len(path) == node["depth"] + 1
        for parent, child in pairwise(path):
            assert parent["end"] == child["start"]
            assert {*child["samples"]} < {*parent["samples"]}
    assert data.alone_from(TEXT) == [3, None, 3, None]


def test_a_sample_that_ends_where_others_go_on():
    nodes = data.divergence([[1], [1, 2]])
    assert [(n["start"], n["end"], n["samples"]) for n in nodes] == [
        (0, 1, [0, 1]),
        (1, 1, [0]),
        (1, 2, [1]),
    ]
    assert data.divergence([[]])[0]["end"] == 0


def test_tokens_per_step_by_source():
    result = {"steps": [[1, 1, 2], [1, 3]], "sources": [["own", "", ""], ["sibling", ""]]}
    assert data.steps(result) == {
        "live": [2, 1, 1],
        "sources": {"sampled": [0.5, 1, 1], "own": [0.5, 0, 0], "sibling": [0.5, 0, 0]},
    }


def test_draft_model_tokens_are_a_series_of_their_own():
    result = {"steps": [[1, 1, 2]], "sources": [["model", "", ""]]}
    assert data.steps(result) == {
        "live": [1, 1],
        "sources": {"sampled": [1, 1], "model": [1, 0]},
    }


def test_answers_are_in_the_order_of_their_votes():
    long = "x" * 600
    found = data.votes(Decision(long + "1", 2, 3, [None, long + "2", long + "1", long + "1"]))
    assert [(v["samples"], v["voted"]) for v in found] == [
        ([2, 3], True),
        ([1], False),
        ([0], False),
    ]
    assert found[2]["answer"] is None
    # where two answers lead, none is marked
    tied = Decision("1", 1, 2, ["1", "2"], second=1)
    assert not any(v["voted"] for v in data.votes(tied))


def test_lines_of_shared_runs_are_in_the_order_of_a_tree():
    pieces = {str(i): f"{i} " for i in range(9)}
    lines = data.shared_runs({"tokens": TEXT, "pieces": pieces})
    assert [(n["depth"], n["text"], n["samples"]) for n in lines] == [
        (0, "1 2 ", [0, 1, 2, 3]),
        (1, "3 ", [0, 2]),
        (2, "4 ", [0]),
        (2, "6 7 ", [2]),
        (1, "5 ", [1, 3]),
    ]
    # from the first line to a sample's last one, its tokens are there once
    cells = [(i, at) for n in lines for i in n["samples"] for at in range(n["start"], n["end"])]
    assert len(cells) == len({*cells}) == sum(map(len, TEXT))


class Bytes:
    """A tokenizer of a byte a token."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


@slow
def test_a_character_of_several_tokens_is_shown_whole():
    from csd.engine.results.result import characters

    tokens = list("aé😀!é".encode())[:-1]
    pieces = {t: Bytes().decode([t]) for t in tokens}
    found = characters(Bytes(), tokens, pieces)
    # the last one was cut off
    assert found == {1: "", 2: "é", 3: "", 4: "", 5: "", 6: "😀"}
    result = {
        "tokens": [tokens],
        "pieces": {str(t): p for t, p in pieces.items()},
        "characters": [{str(i): t for i, t in found.items()}],
    }
    assert data.text_between(result, 0, 0, len(tokens)) == "aé😀!\ufffd"
    assert data.text_between(result, 0, 3, 7) == "😀"
