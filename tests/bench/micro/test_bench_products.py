"""`python -m bench products`: every side at every number of rows."""

import json
from dataclasses import replace

import pytest
import torch

from bench.lib.common import table
from bench.lib.shapes import SHAPES
from bench.micro.products import main
from csd.kernels.numba.isa import instructions
from csd.models.fused.linear import onednn_multiplies

pytestmark = pytest.mark.bench


def test_every_side_of_a_tiny_shape(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SHAPES, "even", replace(SHAPES["tiny"], vocab=512))
    path = tmp_path / "products.json"
    main(
        [
            "--shape",
            "even",
            "--dtype",
            "float32",
            "--rows",
            "1",
            "3",
            "--rounds",
            "1",
            "--json",
            str(path),
        ]
    )
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == found
    sides = {"plain"} | ({"onednn"} if onednn_multiplies(torch.float32) else set())
    if has := set(instructions(torch.float32)):
        sides |= has | {f"{by}, plain" for by in has} | {"gain", "gain, plain", "taken"}
    assert [r["rows"] for r in found["rows"]] == [1, 3]
    assert all(sides | {"dtype", "rows"} == set(r) for r in found["rows"])
    assert all(r[side] > 0 for r in found["rows"] for side in sides - {"taken"})


def test_rows_of_other_sides_are_one_table():
    lines = table([{"dtype": "bfloat16", "dot": 1.0}, {"dtype": "float32", "amx, plain": 2.5}])
    assert [x.split() for x in lines.splitlines()] == [
        ["dtype", "dot", "amx,", "plain"],
        ["bfloat16", "1"],
        ["float32", "2.5"],
    ]
