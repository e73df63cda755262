"""bench.step_times: a table that `csd replay --cost` reads."""

import json

import pytest
import torch
from trace_file import trace_file

from bench.step_times import main
from csd import cli
from csd.models import linear


@pytest.mark.filterwarnings("ignore:TF32")
def test_both_products_at_every_size(toy_folder, tmp_path, monkeypatch, capsys):
    used = []
    monkeypatch.setattr(
        linear.F, "linear", lambda *args: used.append(len(args[0])) or torch.addmm(*swap(*args))
    )
    path = tmp_path / "times.json"
    main([toy_folder, "--rounds", "2", "--json", str(path)])
    found = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["rows"][:4] == [1, 2, 4, 8] and found["machine"]["torch"]
    for side in ("seconds", "seconds without oneDNN"):
        assert len(found[side]) == len(found["rows"])
        # a larger step never costs less
        assert 0 < found[side][0] <= found[side][-1] and found[side] == sorted(found[side])
    assert set(used) == set(found["rows"]) if linear.ONEDNN else used
    traces = trace_file(tmp_path / "traces.jsonl", {"samples": [[3, 4], [3, 4]]})
    assert cli.main(["replay", str(traces), "--cost", str(path)]) == 0


def swap(x, weight, bias=None):
    return torch.zeros(len(weight)) if bias is None else bias, x, weight.T
