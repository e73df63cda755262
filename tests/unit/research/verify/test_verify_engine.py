"""Whole generations under the verifiers that draw their drafts."""

import os
from types import SimpleNamespace

import pytest
import torch
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.oracles.joint_distribution import JointDistribution
from helpers.targets import few, slow

import csd
from csd.engine.options import Options
from csd.graph.consensus import ConsensusGraph
from csd.graph.registry import verifier_names
from csd.kernels.ops import reference
from csd.research.verify import SCHEMES, Match, sampled_tree
from csd.research.verify.multi_draft import DRAWS, MultiDraftVerifier
from csd.state.context_table import WEIGHT_ONE, GraphConfig
from csd.utils.arguments import options_of

# of prompts; `make test-long` asks for more
REPLICATES = int(os.environ.get("CSD_REPLICATES", 700))
SLOTS = 48

# The tail drafts from the first step on: 2 1, 1 2 or 1 0, 0 1 or 0 2. The first draft, 1 after 2,
# is mostly wrong and 0 comes in its place; under it the second word may have drafted a 0, and then
# the graph has seen what follows 0 at the last position, unlike what follows it at the second. So
# the next step's proposal tells what that word was, which must not draw from it again.
JOINT = JointDistribution(
    [
        [[0.8, 0.1, 0.1]] * 3,
        [[0.1, 0.45, 0.45], [0.4, 0.2, 0.4], [0.3, 0.5, 0.2]],
        [[0.02, 0.02, 0.96], [0.1, 0.3, 0.6], [0.5, 0.25, 0.25]],
    ],
    tail=[0, 1, 2, 1, 2, 1, 0, 2],
)

verifiers = pytest.mark.parametrize("verifier", sorted(DRAWS))


def test_the_registered_names_are_those_of_the_schemes():
    # registered before the schemes are imported
    assert verifier_names() == (Match.name, *DRAWS) == tuple(SCHEMES)
    help = options_of(Options)["verifier"][1].help
    assert all(f"`{name}`" in help for name in DRAWS)


def p_value_of(verifier, draws, monkeypatch, drafter=None):
    """p-value of the joint distribution, and the accepted share of what was drafted."""
    monkeypatch.setitem(DRAWS, verifier, draws)
    observed, accepted, drafted = JOINT.draw(
        REPLICATES, SLOTS, verifier=verifier, budget=3 * draws * SLOTS, drafter=drafter
    )
    return JOINT.p_value(observed), accepted / max(drafted, 1)


def short_memory(ops, device):
    """A graph that is quick to believe what a token was last followed by."""
    one = GraphConfig(
        orders=(1, 2),
        smoothing=WEIGHT_ONE // 4,
        prompt_weight=WEIGHT_ONE // 2,
        trust=0.98,
        own_weight=1.0,
        decay=1.0,
    )
    return ConsensusGraph(ops, device, one)


@few(1)
@pytest.mark.parametrize(
    ("verifier", "draws"), [("canonical", 2), ("recursive", 3), ("kseq", 2), ("single", 1)]
)
def test_joint_law(verifier, draws, monkeypatch):
    p, accepted = p_value_of(verifier, draws, monkeypatch)
    assert p > 1e-4
    assert accepted > 0.1


@slow
def test_a_pool_that_drops_its_least_likely_draw_is_found_out(monkeypatch):
    right = sampled_tree.draw

    def picky(probs, words):
        """One draw more than asked for, of which the least likely goes."""
        drawn = right(probs, words) + right(probs, (words[:1] * 2654435761 + 1) % 2**32)
        # places are by falling probability
        drawn.remove(max(drawn))
        return drawn

    monkeypatch.setattr(sampled_tree, "draw", picky)
    assert p_value_of("canonical", 2, monkeypatch)[0] < 1e-6


@slow
def test_drafting_words_without_the_step_number_are_found_out(monkeypatch):
    assert p_value_of("canonical", 1, monkeypatch, short_memory)[0] > 1e-4
    monkeypatch.setattr(sampled_tree, "stepped", lambda stream, step: step * 0 | stream)
    assert p_value_of("canonical", 1, monkeypatch, short_memory)[0] < 1e-6


@few(1)
@verifiers
def test_caches_and_paths(verifier):
    """A cold target that reads every key and value: whatever was drafted, the greedy tokens."""
    e = engine(PrefixSum(), Letters(), max_slots=5)
    options = dict(num_samples=3, max_new_tokens=70, seed=3)
    prompt = ["abcabc", "xyz"]
    greedy = csd.generate(e, prompt, temperature=0, **options)
    for budget in (1, 7, 40):
        cold = csd.generate(
            e, prompt, temperature=1e-6, verifier=verifier, budget=budget, **options
        )
        assert [r.tokens for r in cold] == [r.tokens for r in greedy]
        assert (sum(r.stats.nodes_accepted for r in cold) > 40) == (budget > 1)
        logprobs = torch.tensor([x for r in cold for s in r.raw_logprobs for x in s])
        expected = torch.tensor([x for r in greedy for s in r.raw_logprobs for x in s])
        assert (logprobs - expected).abs().max() < 1e-9


@verifiers
def test_at_temperature_0_it_is_match(verifier):
    e = engine(PrefixSum(), Letters())
    options = dict(num_samples=2, max_new_tokens=30, temperature=0, budget=9, seed=1)
    match = csd.generate(e, "abab", **options)
    other = csd.generate(e, "abab", verifier=verifier, **options)
    assert other.tokens == match.tokens
    assert other.stats.nodes_proposed == match.stats.nodes_proposed


@few(1)
@verifiers
def test_a_call_repeats_itself(verifier):
    """With a whole budget; and it stops where it is told to."""
    e = engine(PrefixSum(sharpness=4.0), Letters(), max_slots=3)
    options = dict(num_samples=5, max_new_tokens=24, seed=2, budget=12, stop_token_ids=[5, 11])
    first = csd.generate(e, "hello", verifier=verifier, **options)
    again = csd.generate(e, "hello", verifier=verifier, **options)
    assert first.tokens == again.tokens and first.logprobs == again.logprobs
    assert first.stats.nodes_accepted == again.stats.nodes_accepted > 0
    for sample in first:
        ends = [i for i, t in enumerate(sample.tokens) if t in (5, 11)]
        assert ends == ([len(sample.tokens) - 1] if sample.finish_reason == "stop" else [])
        assert sample.finish_reason == "stop" or len(sample.tokens) == 24


def test_auto_budget_and_no_drafts():
    e = engine(PrefixSum(sharpness=3.0), Letters(), max_slots=4)
    options = dict(num_samples=4, max_new_tokens=30, seed=2, verifier="canonical")
    auto = csd.generate(e, "hello", **options)
    assert [len(t) for t in auto.tokens] == [30] * 4
    plain = csd.generate(e, "hello", speculate=False, **options)
    assert plain.stats.nodes_proposed == 0
    match = csd.generate(e, "hello", **{**options, "verifier": "match"})
    assert plain.tokens == match.tokens


def test_what_cannot_be_served():
    e = engine(PrefixSum(), Letters())
    message = "verifier must be one of 'match', .*'kseq', 'single', got 'without'"
    with pytest.raises(ValueError, match=message):
        csd.generate(e, "ab", verifier="without")
    for _ in range(2):
        message = r"drafter must be 'consensus' or a csd\.DraftModel, got PromptLookup"
        with pytest.raises(ValueError, match=message):
            csd.generate(e, "ab", verifier="kseq", drafter="prompt-lookup", max_new_tokens=2)
    elsewhere = SimpleNamespace(table=SimpleNamespace(step=torch.empty(1, device="meta")))
    with pytest.raises(NotImplementedError, match="verifier 'kseq' runs on CPU only"):
        MultiDraftVerifier("kseq", elsewhere, reference())
