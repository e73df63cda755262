"""The benchmark of packed weights, on SmolLM2 at a tiny size."""

import json

import pytest

from bench.e2e.packed import __main__ as packed
from csd.kernels.layers.quantized import has_loop

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here"),
]


def test_steps_and_prompts_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_start", lambda side, *_: {"side": side})
    path = tmp_path / "packed.json"
    sizes = ["--rows", "1", "--prompts", "8", "--pairs", "1", "--tokens", "6"]
    packed.main(["demo", *sizes, "--without", packed.BFLOAT16, "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["steps"][0]["csd"] > 0 and result["prompts"][0]["csd"] > 0


def test_the_error_of_packed_weights_is_small(tmp_path):
    path = tmp_path / "quality.json"
    packed.main(
        ["demo", "--quality", "--tokens", "8", "--without", packed.LLAMA, "--json", str(path)]
    )
    rows = {(r["way"], r["texts"]): r for r in json.loads(path.read_text())["quality"]}
    for way in ("packed", "bfloat16"):
        assert 0 < rows[way, "all"]["KL mean"] < 0.05
        assert rows[way, "all"]["tokens"] == 8 * 17
