"""The figures of the verification paper: `python -m bench verify --figures DIR`."""

import json
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
import torch
from helpers.targets import few

import bench.studies.verification.verify as command
from bench.studies.verification import verify_figures
from bench.studies.verification.verify_drawing import draw, tables
from bench.studies.verification.verify_figures import (
    FIXED,
    REGION_DRAFTS,
    fewest,
    logits_at,
    probs,
    regions,
    round_matrices,
    simplex,
    temperature,
    truncation,
)
from csd.models.demo import toy
from csd.verify import Canonical, Recursive, optimal_acceptance

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "bench/results/verify_figures.json"
SETS = [s for n in (1, 2) for s in combinations(range(3), n)]


def exactly(q, p) -> int:
    """The fewest drafts by q(S) >= p(S)^K over every set, in fractions; 0 for none."""
    mass = [(sum(q[i] for i in s), sum(p[i] for i in s)) for s in SETS]
    return next((k for k in REGION_DRAFTS if all(a >= b**k for a, b in mass)), 0)


@pytest.mark.parametrize("of", ["target", "proposal"])
@pytest.mark.parametrize("name", FIXED)
def test_regions_are_those_of_every_set(name, of):
    fixed = [Fraction(x).limit_denominator(10) for x in FIXED[name]]
    found = fewest(FIXED[name], of, 20).tolist()
    assert len(set(found)) > 2
    for point, k in zip(simplex(20).tolist(), found, strict=True):
        moved = [Fraction(x).limit_denominator(20) for x in point]
        assert k == exactly(*((moved, fixed) if of == "target" else (fixed, moved)))


def test_a_scheme_accepts_two_drafts_always_in_their_region_and_only_there():
    moved = simplex(20)
    p = torch.tensor(FIXED["0.5, 0.3, 0.2"], dtype=torch.float64).expand_as(moved)
    inside = fewest(FIXED["0.5, 0.3, 0.2"], "target", 20) == 2
    found = Canonical(None, None).acceptance(moved, p, 2)
    assert 0 < inside.sum() < len(moved)
    assert (found[inside] - 1).abs().max() < 1e-12
    assert found[~inside].max() < 1 - 1e-6


def test_shares_of_regions_grow_with_the_drafts():
    for row in regions():
        shares = [row[f"K={k}"] for k in REGION_DRAFTS]
        assert shares[0] > 0 and shares == sorted(shares) and shares[-1] < 1


def test_a_law_is_cut_to_the_fewest_tokens_of_its_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    assert probs(logits, 1.0, 0.9).tolist()[0] == pytest.approx(kept)
    assert probs(logits, 1.0, 0.75)[0, 2] == 0
    roots = [x**0.5 for x in (0.5, 0.3, 0.15, 0.05)]
    flat = probs(logits, 2.0, 1.0).tolist()[0]
    assert flat == pytest.approx([x / sum(roots) for x in roots])


@pytest.fixture(scope="module")
def logits():
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(20, 30, generator=generator)
    return target, target + torch.randn(20, 30, generator=generator)


def test_acceptance_by_draft_temperature(logits):
    target, draft = logits
    rows = temperature(target, draft, (0.8, 1.6))
    by_kind = {(r["drafts"], r["K"], r["scheme"]): r for r in rows}
    q, p, first = probs(target, 1.0), probs(draft, 1.6), probs(draft, 1.2)
    for k in (2, 4, 8):
        bound = by_kind["same", k, "bound"]
        assert bound["T=1.6"] == pytest.approx(float(optimal_acceptance(q, p, k).mean()), abs=1e-12)
        for scheme in ("canonical", "kseq", "recursive", "single"):
            assert by_kind["same", k, scheme]["T=1.6"] <= bound["T=1.6"] + 1e-12
        assert by_kind["same", k, "single"]["T=1.6"] == pytest.approx(
            float(torch.minimum(q, p).sum(-1).mean())
        )
    two = Recursive().acceptance(q, torch.stack([first, p], 1), 2).mean()
    assert by_kind["different", 2, "recursive"]["T=1.6"] == pytest.approx(float(two), abs=1e-12)
    # at the target's own temperature its own logits are always accepted
    for row in temperature(target, target, (1.0,)):
        if row["drafts"] == "same":
            assert row["T=1.0"] == pytest.approx(1, abs=1e-9)


def test_truncation_ends_at_the_bound(logits):
    rows = truncation(*logits)
    at = {(r["swept"], r["value"]): r for r in rows}
    for k in (2, 4):
        assert all(r[f"K={k}"] <= at["bound", None][f"K={k}"] + 1e-12 for r in rows)
    # 30 tokens: neither s = 40 nor an alphabet of 40 leaves any out
    assert at["s", 40]["K=2"] == pytest.approx(at["bound", None]["K=2"], abs=1e-9)
    assert at["s", 40]["K=2"] > at["s", 5]["K=2"] > at["s", 1]["K=2"]


def test_the_drafts_model_is_the_target_with_rounded_matrices():
    model, _ = toy()
    text = [([5, 6, 7], [8, 9, 10, 11, 12])]
    before = logits_at(model, text, 2)
    whole = model(torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[0, 2:]
    assert torch.allclose(before, whole[::2], atol=1e-5) and len(before) == 3
    round_matrices(model)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "layers" in name:
            assert max(len(row.unique()) for row in weight) <= 15
    after = logits_at(model, text, 2)
    assert (after - before).abs().max() > 1e-3


def test_the_command_measures_prints_and_draws(logits, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(verify_figures, "record", lambda *_: logits)
    monkeypatch.setattr("sys.argv", ["verify", "--figures", str(tmp_path / "new")])
    command.main()
    made = {p.name for p in (tmp_path / "new").iterdir()}
    names = {f"verify_{n}.png" for n in ("regions", "temperature", "truncation")}
    assert made == names | {"verify_figures.json"}
    result = json.loads((tmp_path / "new/verify_figures.json").read_text())
    assert result["positions"] == 20 and result["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert all(table in printed for table in tables(result))


def test_page_has_the_result_files_tables():
    shown = (ROOT / "docs/verifiers.md").read_text()
    found = tables(json.loads(RESULT.read_text()))
    assert len(found) == 4
    for table in found:
        assert table in shown


@few(1)
@pytest.mark.parametrize("name", ["regions", "temperature", "truncation"])
def test_the_pictures_are_those_of_the_figures(tmp_path, name):
    version = pytest.importorskip("matplotlib").__version__
    image = pytest.importorskip("PIL.Image")
    kept = image.open(RESULT.parent / f"verify_{name}.png")
    if f"version{version}," not in kept.info["Software"]:
        pytest.skip("drawn by another matplotlib")
    draw(json.loads(RESULT.read_text()), tmp_path)
    made = image.open(tmp_path / f"verify_{name}.png")
    assert made.size == kept.size and made.tobytes() == kept.tobytes()
