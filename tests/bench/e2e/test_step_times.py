"""`python -m bench step_times`: a table that `csd replay --cost` reads."""

import json

import pytest
from helpers.runs.trace_file import trace_file
from helpers.targets import slow

from bench.e2e.step.step_times import main
from csd.cli import main as cli

pytestmark = pytest.mark.bench

SIDES = ("seconds", "float32, plain", "bfloat16, plain", "bfloat16, packed")


@slow
def test_every_side_at_every_size(toy_folder, tmp_path, capsys):
    path = tmp_path / "times.json"
    main([toy_folder, "--rounds", "2", "--profile", "4", "--json", str(path)])
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == found and "Self CPU" in printed
    assert found["rows"][:4] == [1, 2, 4, 8] and found["machine"]["torch"]
    # the toy's own dtype, on any CPU
    assert found["dtype"] == "torch.float32"
    for side in SIDES:
        assert len(found[side]) == len(found["rows"])
        # a larger step never costs less
        assert 0 < found[side][0] <= found[side][-1] and found[side] == sorted(found[side])
    assert set(found["speed-up"]) == set(SIDES) - {"float32, plain"}
    assert all(len(x) == len(found["rows"]) for x in found["speed-up"].values())
    traces = trace_file(tmp_path / "traces.jsonl", {"samples": [[3, 4], [3, 4]]})
    assert cli.main(["replay", str(traces), "--cost", str(path)]) == 0
