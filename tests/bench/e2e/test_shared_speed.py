"""Speed of shared rows: csd's sides draw the same samples, of fewer rows where texts are equal."""

import argparse

import pytest
import torch
from helpers.models.checkpoints import build

import csd
from bench.e2e.shared_rows import OWN, SHARED, Case, measure

pytestmark = pytest.mark.bench


def test_cases_are_read():
    assert Case.of("16@0.2") == Case(1, 16, 0.2) and str(Case.of("16@0.2")) == "N=16 at 0.2"
    assert Case.of("8x1@0.7") == Case(8, 1, 0.7) and str(Case.of("8x1@0.7")) == "8 x N=1 at 0.7"


def test_sides_draw_the_same_samples():
    model = build("llama", dtype=torch.float64)
    engines = {SHARED: csd.Engine(model), OWN: csd.Engine(model, share_rows=False)}
    args = argparse.Namespace(pairs=2, tokens=6, peer_pairs=1)
    rows = {}
    for case in (Case(1, 4, 0.02), Case(2, 1, 0.7)):
        shared, own = measure(case, engines, {}, [[3, 5, 9], [8, 2], [4]], args)
        assert (shared["side"], own["side"]) == (SHARED, OWN)
        assert own["equal samples"] == own["samples"] == 2 * case.prompts * case.samples
        assert "MB" in shared and "MB" in own
        rows[case.samples] = shared["rows / token"], own["rows / token"]
    # nearly greedy: four samples of a prompt are one text, two prompts are two
    assert rows[4][0] < 0.7 * rows[4][1]
    assert rows[1][0] == pytest.approx(rows[1][1], rel=0.5)
