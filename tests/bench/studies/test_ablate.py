"""`bench.studies.drafting.ablate` on a recording small enough to know what must come out."""

import json

import pytest
from helpers.runs.trace_file import trace_file

from bench.studies.drafting.ablate import CHANGES, main, parse
from csd.state.context_table import GraphConfig

pytestmark = pytest.mark.bench


@pytest.fixture
def traces(tmp_path):
    """Four samples that repeat one sentence of twelve tokens."""
    return trace_file(tmp_path / "sentence.jsonl", {"samples": [[*range(3, 15)] * 4] * 4})


def test_a_change_is_weighed_against_the_graph_as_it_is(traces, tmp_path):
    out = tmp_path / "out.json"
    main([str(traces), "--samples", "4", "--json", str(out), "--set", "max_depth=1", "beta=0.4"])
    found = json.loads(out.read_text())
    assert found["samples"] == {"sentence": 4}
    as_is, shallow, same = (row["ratio"]["sentence"] for row in found["rows"])
    # trees of depth 1 accept one token at most
    assert as_is == same == 1 and shallow < 0.7
    assert found["rows"][1]["tau"]["sentence"] <= 2 < found["rows"][0]["tau"]["sentence"]


def test_every_change_is_one_of_the_graph_s_constants():
    for change in CHANGES:
        assert all(getattr(GraphConfig(), name) != value for name, value in change.items())
        GraphConfig(**change)


def test_unknown_constants_are_refused():
    assert parse("beta=0.5;orders=(1, 2)") == {"beta": 0.5, "orders": (1, 2)}
    with pytest.raises(Exception, match="FIELD=VALUE of GraphConfig, got 'gamma=1'"):
        parse("gamma=1")


def test_a_column_for_each_temperature(tmp_path):
    out = tmp_path / "out.json"
    path = trace_file(
        tmp_path / "two.jsonl",
        {"temperature": 0.3, "samples": [[3, 4, 5] * 9] * 3},
        {"temperature": 1.0, "samples": [[6]]},
    )
    wanted = ["--temperature", "0.3", "1.0", "--set", "beta=0.3", "--json", str(out)]
    main([str(path), *wanted])
    found = json.loads(out.read_text())
    assert found["samples"] == {"two, T=0.3": 3, "two, T=1.0": 1}
    assert found["problems"] == {"two, T=0.3": 1, "two, T=1.0": 1}
    assert found["rows"][0]["tau"]["two, T=0.3"] > 1.5


def test_a_file_s_column_joins_those_of_other_files(tmp_path, traces):
    out = tmp_path / "out.json"
    other = trace_file(tmp_path / "other.jsonl", {"samples": [[3, 4, 5] * 9] * 3})
    for path, change in ((traces, "beta=0.3"), (other, "beta=0.3"), (traces, "max_depth=1")):
        main([str(path), "--samples", "4", "--json", str(out), "--set", "group_penalty=0", change])
    found = json.loads(out.read_text())
    assert found["samples"] == {"sentence": 4, "other": 3}
    as_is, even, shallow = (row["ratio"] for row in found["rows"])
    # what was not asked for again is not kept, and a file's new column replaces its old one
    assert as_is == even == {"sentence": 1, "other": 1}
    assert list(shallow) == ["sentence"] and shallow["sentence"] < 0.7
