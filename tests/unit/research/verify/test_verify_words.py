"""Words of multi-draft verifiers: each used once; stratified ones give the exact distribution."""

import pytest
import torch
from helpers.models.scripted import LastToken, Letters, PrefixSum, engine
from helpers.runs.sampled_cases import alike, grow
from helpers.targets import few

import csd
from csd.kernels.common.noise import ACCEPT, DRAFT, RESIDUAL, SELECT, philox_words
from csd.kernels.ops import reference
from csd.research.verify import make_scheme, multi_draft, sampled_tree
from csd.research.verify.multi_draft import DRAWS, processed

verifiers = pytest.mark.parametrize("verifier", sorted(DRAWS))


def route(monkeypatch, words):
    """Both users of words get theirs from `words`, numpy in and out."""
    monkeypatch.setattr(sampled_tree, "philox_words", words)

    def of_tensors(*counter):
        return torch.from_numpy(words(*(x.numpy() for x in counter)))

    monkeypatch.setattr(multi_draft, "philox_words_ref", of_tensors)


@few(1)
@verifiers
def test_no_word_is_used_twice(verifier, monkeypatch):
    """In a whole call: not by two streams, nodes, steps, slots or prompts."""
    used: list[tuple[int, ...]] = []

    def noted(key, index, position, sample, stream):
        found = philox_words(key, index, position, sample, stream)
        columns = [
            torch.from_numpy(x + 0 * found).flatten().tolist()
            for x in (key, index, position, sample, stream)
        ]
        used.extend(zip(*columns, strict=True))
        return found

    route(monkeypatch, noted)
    e = engine(PrefixSum(sharpness=3.0), Letters(), max_slots=3)
    out = csd.generate(
        e,
        ["abcabc", "hello", "abcabc"],
        num_samples=3,
        max_new_tokens=24,
        seed=1,
        budget=12,
        verifier=verifier,
    )
    assert sum(r.stats.nodes_accepted for r in out) > 10
    # and there were many
    assert len(set(used)) == len(used) > 1500
    assert {stream & 7 for *_, stream in used} == {DRAFT, SELECT, ACCEPT, RESIDUAL}
    # what was drafted and not reached is drafted again: without the step number it would repeat
    drafts = [(*rest, stream & 7) for *rest, stream in used if stream & 7 == DRAFT]
    assert len(set(drafts)) < len(drafts)


@few(3)
@verifiers
@pytest.mark.parametrize("filters", [{}, dict(temperature=0.7, top_p=0.8)], ids=["plain", "cut"])
def test_steps_with_stratified_words_sample_the_target(verifier, filters, monkeypatch):
    """Drafted, selected, accepted or resampled: the first token of a step, over 4,096 slots."""
    count, draws, vocab = 1 << 12, 2, 8
    place = {DRAFT: 0, SELECT: draws, ACCEPT: draws + 1, RESIDUAL: 2 * draws + 1}
    points = torch.quasirandom.SobolEngine(2 * draws + 3, scramble=True, seed=0).draw(count)
    grid = (points.double() * 2**32).long().clamp(max=2**32 - 1).numpy()

    def stratified(key, index, position, sample, stream):
        column = sum(place[s] * (stream & 7 == s) for s in place)
        # nodes below the root draw from it again, but only the first token is looked at
        return grid[sample, (column + index) % grid.shape[1]]

    route(monkeypatch, stratified)
    slots = alike(count, **{"temperature": 1.0, **filters})
    pool, drawn = grow(slots, draws * count, draws)
    assert pool.slot_nodes.tolist() == [1 + draws] * count

    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits[2] = -torch.inf
    logits = logits.expand(pool.rows, vocab)
    scheme = make_scheme(verifier)
    verdict = reference().verify(logits, pool, slots)
    verdict = multi_draft.descend(scheme, draws, logits, pool, drawn, slots, verdict)
    roots = torch.tensor(drawn.start)
    probs = processed(logits, roots[:1], pool, slots)[0]
    share = verdict.sample[roots].bincount(minlength=vocab) / count
    assert (share - probs).abs().max() < 4e-3
    assert (share[probs == 0] == 0).all()

    successors = drawn.nodes[0].successors
    target = probs[successors.token]
    target = torch.cat([target, 1 - target.sum(0, True)])[None]
    proposal = torch.cat([torch.from_numpy(successors.probs), torch.zeros(1)])[None]
    accepted = float((verdict.accept_count > 1).double().mean())
    assert accepted < 0.95
    # a token may also match a draft that was not taken
    assert accepted > float(scheme.acceptance(target, proposal, draws)) - 4e-3


@verifiers
def test_half_precision_logits_with_excluded_tokens(verifier):
    """Two of eight tokens are never possible; everything reported is finite."""
    generator = torch.Generator().manual_seed(1)
    table = (torch.randn(8, 8, generator=generator) * 6).half()
    table[:, 3], table[::2, 5] = -torch.inf, -torch.inf

    e = engine(LastToken(lambda token, position: table[token], 8))
    out = csd.generate(
        e,
        [[1, 2, 4, 1, 2, 4, 1]] * 3,
        num_samples=4,
        max_new_tokens=30,
        seed=0,
        budget=10,
        verifier=verifier,
    )
    tokens = torch.tensor([t for r in out for t in r.tokens])
    logprobs = torch.tensor([x for r in out for x in r.logprobs + r.raw_logprobs])
    assert logprobs.isfinite().all() and (logprobs <= 0).all()
    before = torch.cat([torch.ones(len(tokens), 1, dtype=torch.long), tokens[:, :-1]], 1)
    assert (table[before, tokens] > -torch.inf).all()
    assert sum(r.stats.nodes_accepted for r in out) > 20
