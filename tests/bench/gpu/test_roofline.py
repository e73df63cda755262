"""Predicted steps: all launches are counted, none is faster than can be; devices have a column."""

import json

import pytest
from helpers.kernels.step_kernels import STEP

from bench.gpu import predict as roofline
from bench.lib.shapes import SHAPES

pytestmark = pytest.mark.bench

LAYER = ("rms_norm", "rotary", "swiglu", "tree_attention", "merge_partials")


def test_launches_are_those_of_a_step():
    config = SHAPES["llama-3.1-8b"]
    others = [name for names in STEP.values() for name in names if name not in LAYER]
    # the read of the logits is counted by its bytes
    assert len(others) - 1 == roofline.OTHERS
    found = list(roofline.launches(config, 16, 64, False))
    # two norms, rotary, SwiGLU, two of attention and four products a layer; the last norm, the head
    assert len(found) == 10 * config.layers + 2 + len(others)
    # SwiGLU has none, and what follows a split product adds it up
    exact = list(roofline.launches(config, 16, 64, True))
    assert len(exact) == len(found) - config.layers
    assert len(list(roofline.launches(config, 16, 64, False, gated=True))) == len(exact)


@pytest.mark.parametrize("name", roofline.LARGE)
@pytest.mark.parametrize("samples,rows", roofline.STEPS)
def test_a_step_is_no_faster_than_its_bound(name, samples, rows):
    row = roofline.row(name, samples, rows, [])
    assert row["bound ms"] <= min(row["predicted ms"], row["predicted exact ms"])
    # fewer launches win at few rows, the float32 sums of split products cost at many
    assert (row["predicted ms"] <= row["predicted exact ms"]) == (rows >= 64)
    # a product that is slower by as much as may be takes what the launch of SwiGLU did
    assert row["bound ms"] <= row["predicted gated ms"] < row["predicted ms"]
    lost = row["gated product may be slower"] * roofline.gated_product(SHAPES[name], rows)
    gained = (row["predicted ms"] - row["predicted gated ms"]) / 1e3
    assert SHAPES[name].layers * lost == pytest.approx(gained)
    assert row["predicted over plain"] >= 1 and row["device ms"] is None


def test_a_device_s_step_stands_beside_the_prediction(tmp_path, capsys):
    measured = [{"shape": "qwen2.5-7b", "N": 16, "rows": 120.5, "step ms": 5.5}]
    (tmp_path / "end_to_end.json").write_text(json.dumps({"rows": measured}))
    assert roofline.main(["--results", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    found = {(r["shape"], r["samples"], r["rows"]): r["device ms"] for r in rows}
    assert found.pop(("qwen2.5-7b", 16, 128)) == 5.5
    assert set(found.values()) == {None}
