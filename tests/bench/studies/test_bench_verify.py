"""Measurements of `python -m bench verify` on toy models, and docs/verifiers.md's tables."""

import json
from pathlib import Path

import pytest
import torch
from helpers.models.scripted import LastToken, engine
from helpers.runs.verify_cases import EVERY, distributions, enumerate_output

from bench.lib.common import merged
from bench.studies.verification.verify import acceptance, main, without_replacement
from bench.studies.verification.verify_pairs import Pairs, record
from bench.studies.verification.verify_tables import plot, tables
from csd.verify import optimal_acceptance

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "bench/results/verify.json"


def test_page_has_the_result_files_tables():
    """`python -m bench verify --table bench/results/verify.json`, table by table."""
    shown = (ROOT / "docs/verifiers.md").read_text()
    found = tables(json.loads(RESULT.read_text()))
    assert len(found) == 5
    for table in found:
        assert table in shown


def test_the_picture_is_that_of_the_figures(tmp_path):
    version = pytest.importorskip("matplotlib").__version__
    kept = (RESULT.parent / "verify.svg").read_text()
    if f"Matplotlib v{version}," not in kept:
        pytest.skip("drawn by another matplotlib")
    plot(json.loads(RESULT.read_text())["acceptance"], str(tmp_path / "verify.svg"))
    assert (tmp_path / "verify.svg").read_text() == kept


def test_pairs_are_targets_and_graph_proposals():
    """A target that goes round: 1, 2, 4, 1, ..., and now and then anything."""
    probs = torch.full((8, 8), 0.02, dtype=torch.float64)
    for here, there in ((1, 2), (2, 4), (4, 1)):
        probs[here, there] += 0.6
    probs /= probs.sum(-1, keepdim=True)
    e = engine(LastToken(lambda token, position: probs[token].log(), 8), max_slots=8)
    right = e.decoder.logits
    pairs = record(e, [[1, 2, 4, 1, 2, 4, 1]], 8, 40, dict(temperature=1.0))
    assert e.decoder.logits == right
    assert pairs.positions == 8 * 40 == len(pairs.target)
    assert (pairs.target.sum(-1) - 1).abs().max() < 1e-12
    assert (pairs.proposal.sum(-1) - 1).abs().max() < 1e-12
    assert (pairs.proposal[:, -1] == 0).all()
    # of every row the kept successors' masses are some of the distribution's
    known = torch.cat([probs.flatten(), torch.zeros(1)]).unique()
    assert (pairs.target[:, :8, None] - known).abs().amin(-1).max() < 1e-12
    # what the engine would draft: more drafts hit more, and all of them whatever the graph keeps
    hits = pairs.coupled
    assert ((hits.diff(dim=1) >= 0).all(), hits.min() >= 0, hits.max() <= 1) == (True,) * 3
    mass = pairs.target[:, :-1].sum(-1)
    # four standard errors, 8 keys a position
    assert abs(float(hits[:, -1].mean() - mass.mean())) < 4 * (0.25 / hits.numel()) ** 0.5
    fixed = acceptance(pairs, 1, torch.Generator())["match, fixed"].mean()
    # one draft that knows the noise beats the likeliest token
    assert hits[:, 0].mean() > fixed + 0.1


def test_acceptance_of_every_scheme():
    target, proposal = distributions(1, 30, 5), distributions(2, 30, 5)
    pairs = Pairs(target, proposal, None, 30)
    for k in (2, 3):
        found = acceptance(pairs, k, torch.Generator().manual_seed(0))
        for name in ("kseq", "recursive", "single", "canonical, whole"):
            scheme = EVERY[name.removesuffix(", whole")]
            expected = enumerate_output(scheme, target, proposal, k)[1]
            assert (found[name] - expected).abs().max() < 1e-12
        assert torch.equal(found["bound"], optimal_acceptance(target, proposal, k))
        # the likeliest k tokens of the proposal
        best = proposal.sort(dim=-1, descending=True, stable=True)
        mass = torch.where(best.values > 0, target.gather(1, best.indices), 0)[:, :k].sum(-1)
        assert (found["match, fixed"] - mass).abs().max() < 1e-12


def test_drawing_without_replacement_by_perturbed_scores():
    target, proposal = distributions(3, 300, 4, zeros=0.2), distributions(4, 300, 4, zeros=0.2)
    found = without_replacement(target, proposal, 3, torch.Generator().manual_seed(0))
    expected = EVERY["without-replacement"].acceptance(target, proposal, 3)
    # four standard errors, 64 draws a pair
    assert abs(float((found - expected).mean())) < 4 * (0.25 / (300 * 64)) ** 0.5


def test_new_rows_replace_old_ones():
    old = [dict(a=1, b=1, x=1), dict(a=1, b=2, x=1)]
    assert merged(old, [dict(a=1, b=2, x=5), dict(a=2, b=2, x=6)], ("a", "b")) == [
        dict(a=1, b=1, x=1),
        dict(a=1, b=2, x=5),
        dict(a=2, b=2, x=6),
    ]


def test_tables_of_a_file(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["verify", "--table", str(RESULT)])
    main()
    assert capsys.readouterr().out.strip() == "\n\n".join(tables(json.loads(RESULT.read_text())))
