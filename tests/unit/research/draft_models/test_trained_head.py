"""The trained head of bench/heads drafts for SmolLM2-135M-Instruct, and changes no token."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from helpers.targets import slow

import bench
import csd
from csd.models.demo import smollm2_path

HEAD = Path(bench.__file__).parent / "heads" / "smollm2-135m"
WEIGHTS = HEAD / "model.safetensors"
# in no text of its training
PROBLEM = "Nora has 3 boxes of 12 pencils. She gives 9 pencils away. How many pencils are left?"


@slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason="needs weights, see bench/heads/README.md")
def test_the_trained_head_drafts_most_of_an_answer():
    with csd.Engine(smollm2_path(), dtype=torch.float32) as engine:
        asked = dict(num_samples=1, temperature=0.0, max_new_tokens=64)
        prompt = [{"role": "user", "content": PROBLEM}]
        plain = engine.generate(prompt, budget=0, **asked)
        drafted = engine.generate(prompt, budget=16, drafter=csd.Eagle(HEAD), **asked)
    assert drafted.tokens == plain.tokens
    # a head of random weights has 1.0
    assert drafted.stats.tokens_per_step > 1.6


def test_the_trained_head_is_the_one_of_the_result_file():
    result = json.loads((HEAD.parents[1] / "results" / "eagle_head.json").read_text())
    curve = [json.loads(line) for line in (HEAD / "curve.jsonl").read_text().splitlines()]
    assert curve == result["curve"]
    assert f"{result['bytes']:,} bytes" in (HEAD.parent / "README.md").read_text()


@pytest.mark.skipif(not WEIGHTS.exists(), reason="needs weights, see bench/heads/README.md")
def test_the_weights_are_those_of_the_readme():
    digest = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    assert digest in (HEAD.parent / "README.md").read_text()
