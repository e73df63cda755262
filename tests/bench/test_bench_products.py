"""bench.products: every side at every number of rows."""

import json
from dataclasses import replace

import torch

from bench.products import main
from bench.shapes import SHAPES
from csd.kernels.cpu import instructions
from csd.models.linear import onednn_multiplies


def test_every_side_of_a_tiny_shape(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SHAPES, "even", replace(SHAPES["tiny"], vocab=512))
    path = tmp_path / "products.json"
    main(["--shape", "even", "--dtype", "float32", "--rows", "1", "3", "--rounds", "1",
          "--json", str(path)])  # fmt: skip
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == found
    sides = {"plain"} | ({"onednn"} if onednn_multiplies(torch.float32) else set())
    if has := set(instructions(torch.float32)):
        sides |= has | {"gain", "taken"}
    assert [r["rows"] for r in found["rows"]] == [1, 3]
    assert all(sides | {"dtype", "rows"} == set(r) for r in found["rows"])
    assert all(r[side] > 0 for r in found["rows"] for side in sides - {"taken"})
