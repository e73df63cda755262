"""examples/ray_serve.py on this machine: two replicas, equal prompts to one of them."""

import json
import sys
from pathlib import Path

import pytest
from helpers.runs.served import call, events

import csd

serve = pytest.importorskip("ray.serve", reason="needs ray[serve]", exc_type=ImportError)
EXAMPLES = str(Path(__file__).parents[4] / "examples")


def test_two_replicas(toy_folder, monkeypatch):
    import ray

    monkeypatch.setattr(sys, "path", [EXAMPLES, *sys.path])
    import ray_serve

    # replicas import the example by its name
    paths = {"env_vars": {"PYTHONPATH": f"{EXAMPLES}:{Path(EXAMPLES).parent}"}}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=paths)
    try:
        ray_serve.main(toy_folder, "toy", 2, 0, max_tokens=200, max_slots=8, budget=4)
        prompts = ["abc", "xyz", "once"]
        places = {ray_serve.place_of(json.dumps({"prompt": p}).encode(), 2) for p in "abcdef"}
        assert places == {0, 1}
        with csd.Engine(toy_folder) as engine:
            for prompt in prompts:
                body = {"prompt": prompt, "n": 3, "seed": 1, "max_tokens": 10}
                status, answer = call(8000, "/v1/completions", body)
                want = engine.generate(prompt, num_samples=3, seed=1, max_new_tokens=10)
                assert status == 200
                assert [c["text"] for c in answer["choices"]] == want.texts
                texts = [""] * 3
                for line in events(8000, "/v1/completions", body):
                    for choice in line["choices"]:
                        texts[choice["index"]] += choice["text"]
                assert texts == want.texts
        status, answer = call(8000, "/v1/completions", {"prompt": "abc", "temperature": -1})
        assert (status, answer["error"]["param"]) == (400, "temperature")
    finally:
        serve.shutdown()
        ray.shutdown()
