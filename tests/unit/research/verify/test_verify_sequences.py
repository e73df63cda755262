"""Sequences of a draft model under multi-draft verifiers: joint distribution and acceptance."""

import pytest
import torch
from helpers.models.scripted import LastToken, Letters, PrefixSum, engine
from helpers.oracles.joint_distribution import TOKENS, VOCAB, JointDistribution
from helpers.targets import slow
from test_verify_engine import REPLICATES, SLOTS

import csd
from csd.models.load import Loaded
from csd.research.verify import sequences

JOINT = JointDistribution(
    [
        [[0.6, 0.3, 0.1]] * 3,
        [[0.1, 0.45, 0.45], [0.4, 0.2, 0.4], [0.3, 0.5, 0.2]],
        [[0.02, 0.02, 0.96], [0.1, 0.3, 0.6], [0.5, 0.25, 0.25]],
    ]
)
# another opinion, that leaves out nothing and adds letters that the target never says
LAST = torch.tensor([[0.5, 0.2, 0.2], [0.2, 0.2, 0.5], [0.2, 0.6, 0.1]], dtype=torch.float64).log()


def proposal(token, position):
    logits = torch.full((token.shape[0], VOCAB), -3.0, dtype=torch.float64)
    logits[:, :TOKENS] = LAST[token.clamp(max=TOKENS - 1)] + 0.3 * (position[:, None] % 2)
    return logits


def draft(decoder, **options):
    one = Loaded(decoder, decoder.config, None, None, torch.device("cpu"), torch.float64)
    return csd.DraftModel(one, **options)


def p_value_of(verifier, **options):
    drafter = draft(LastToken(proposal, VOCAB), **options)
    observed, accepted, drafted = JOINT.draw(
        REPLICATES, SLOTS, verifier=verifier, budget=6 * SLOTS, drafter=drafter
    )
    return JOINT.p_value(observed), accepted / max(drafted, 1)


@slow
@pytest.mark.parametrize(
    ("verifier", "options"),
    [
        ("canonical", dict(k=2, depth=2)),
        ("recursive", dict(k=3, depth=2)),
        ("kseq", dict(k=3, depth=2)),
        pytest.param("single", dict(k=3, depth=2), marks=slow),
        ("canonical", dict(k=2, depth=2, temperature=(0.5, 2.0))),
        pytest.param("recursive", dict(k=2, depth=2, temperature=(2.0, 0.5)), marks=slow),
    ],
    ids=["canonical", "recursive", "kseq", "single", "canonical-two-heats", "recursive-two-heats"],
)
def test_joint_law(verifier, options):
    p, accepted = p_value_of(verifier, **options)
    assert p > 1e-4
    assert accepted > 0.1


@slow
def test_draws_that_are_not_of_the_stated_law_are_found_out(monkeypatch):
    right = sequences.draw
    monkeypatch.setattr(sequences, "draw", lambda probs, words: right(probs**2, words))
    assert p_value_of("canonical", k=2, depth=2)[0] < 1e-6


@pytest.mark.parametrize("verifier", ["canonical", "recursive", "kseq", "single"])
def test_the_target_itself_is_always_accepted(verifier):
    """The first of the sequences at least, at every depth: one distribution on both sides."""
    e = engine(PrefixSum(), Letters(), max_slots=3)
    options = dict(num_samples=3, max_new_tokens=20, temperature=1.0, seed=3, verifier=verifier)
    out = csd.generate(
        e, ["abc", "xy"], drafter=draft(PrefixSum(), k=3, depth=4), budget=60, **options
    )
    assert all(r.stats.tokens_per_step == 5 for r in out)


def test_a_call_repeats_itself_and_keeps_within_its_budget():
    e = engine(PrefixSum(sharpness=4.0), Letters(), max_slots=3)
    for budget in (1, 5, 17):
        options = dict(
            num_samples=5,
            max_new_tokens=16,
            temperature=1.0,
            seed=2,
            budget=budget,
            verifier="recursive",
            stop_token_ids=[5, 11],
        )
        runs = [
            csd.generate(e, "hello", drafter=draft(PrefixSum(), k=3, depth=4), **options)
            for _ in range(2)
        ]
        assert runs[0].tokens == runs[1].tokens
        assert 0 < runs[0].stats.nodes_proposed <= budget * runs[0].stats.steps
    auto = csd.generate(e, "hello", drafter=draft(PrefixSum()), **options | {"budget": "auto"})
    assert all(s.tokens[-1] in (5, 11) or len(s.tokens) == 16 for s in auto)


def test_cold_targets_give_greedy_tokens():
    e = engine(PrefixSum(), Letters(), max_slots=5)
    options = dict(num_samples=2, max_new_tokens=70, seed=3)
    greedy = csd.generate(e, ["abcabc", "xyz"], temperature=0, **options)
    cold = csd.generate(
        e,
        ["abcabc", "xyz"],
        temperature=1e-6,
        verifier="kseq",
        budget=40,
        drafter=draft(PrefixSum(), k=3, depth=4, temperature=1.0),
        **options,
    )
    assert [r.tokens for r in cold] == [r.tokens for r in greedy]
    assert 1 < cold[0].stats.tokens_per_step < 5
