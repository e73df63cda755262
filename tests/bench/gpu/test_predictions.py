"""Predictions have bench.gpu's rows, none below its bound, and are compared by their keys."""

import json

import pytest

from bench.gpu import predictions
from bench.gpu.against import PREDICTED, compared, of_gpu
from bench.gpu.lib.roofline import parameters
from bench.gpu.predict import launches

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def code():
    return predictions.instructions(predictions.COMPILED)


@pytest.fixture(scope="module")
def rows(code):
    return predictions.predicted(code)


def test_steps_of_three_models_on_two_gpus(rows):
    steps = [r for r in rows if r["section"] == "end_to_end"]
    found = {(r["gpu"], r["shape"], r["N"]) for r in steps}
    assert len(found) == 2 * 3 * len(predictions.SAMPLES) and max(n for *_, n in found) == 256
    for row in steps:
        assert row["rows"] >= row["N"] and row["step ms"] > row["attention ms"] > 0
        # a bound has no launches of nothing
        assert row["step ms"] > row.get("roofline ms", 0)
        drafts = row["rows"] > predictions.pool(row["N"])
        assert (row["drafting ms"] > 0) == drafts
    # more memory a second is never slower
    of = {(r["gpu"], r["shape"], r["N"], r["rows"]): r["step ms"] for r in steps}
    assert all(of["H200", *key] <= ms for (gpu, *key), ms in of.items() if gpu == "H100")


def test_experts_read_what_rows_have_chosen():
    c = predictions.QWEN3_30B
    # 30.5B weights, of which a token has about 3B
    few, all_of = (sum(b for b, _ in predictions.step_launches(c, 1, n)) for n in (1, 512))
    assert 2 * 2.5e9 < few < 2 * 4e9 < 2 * 29e9 < all_of < 2 * 40e9
    dense = predictions.MODELS["llama-3.1-8b"]
    found = sum(b for b, _ in launches(dense, 1, 1, False, attends=False))
    assert found == pytest.approx(2 * parameters(dense), rel=0.02)


def test_a_measured_figure_stands_beside_its_prediction(rows):
    mine = of_gpu("NVIDIA H100 80GB HBM3", PREDICTED)
    assert mine and {r["gpu"] for r in mine} == {"H100"}
    assert not of_gpu("NVIDIA A100") and not of_gpu(None)
    h100 = [r for r in rows if r["gpu"] == "H100"]
    step = {
        r["rows"]: r["step ms"]
        for r in h100
        if (r.get("shape"), r.get("N")) == ("llama-3.1-8b", 16)
    }
    shape = next(r for r in h100 if r["section"] == "attention")
    files = {
        "end_to_end": {
            "rows": [
                {
                    "shape": "llama-3.1-8b",
                    "N": 16,
                    "rows": 120.4,
                    "step ms": 2 * step[128],
                    "plain step ms": 3 * step[16],
                    "phases ms": {"propose": 1.0, "insert": 0.5},
                },
                {"shape": "tiny", "N": 2, "rows": 16, "step ms": 1.0},
            ]
        },
        "attention_shapes": {
            "rows": [
                {"provider": "csd", "shape": shape["shape"], "us": 4 * shape["us"]},
                {"provider": "sdpa", "shape": shape["shape"], "us": 1.0},
            ]
        },
    }
    found = {row["figure"]: row["ratio"] for row in compared(files, h100)}
    assert found.pop("propose and insert us") > 1
    assert found == pytest.approx({"step ms": 2, "plain step ms": 3, "attention us": 4})
    assert compared(files, []) == []


def test_the_file_is_what_the_command_writes(rows):
    """The file is marked as no measurement."""
    kept = json.loads(PREDICTED.read_text())
    assert kept["measured"] is False
    for row, want in zip(kept["rows"], rows, strict=True):
        assert row == pytest.approx(want)
