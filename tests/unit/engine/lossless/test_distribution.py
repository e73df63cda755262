"""Joint distribution of samples, by counting: 3 tokens, 3 positions, 2 samples, 729 cells."""

import math
import os

import pytest
import torch
from helpers.models.scripted import LastToken, engine
from helpers.oracles.joint_distribution import JointDistribution
from helpers.targets import few, slow

import csd
from csd.kernels import ops
from csd.kernels.common.noise import philox_words_ref
from csd.kernels.verify import reference_rows as reference_draws
from csd.kernels.verify import verify_ref
from csd.kernels.verify.reference import descend_ref

# `make test-long` asks for 20,000
REPLICATES = int(os.environ.get("CSD_REPLICATES", 2_000))

# rows that differ, so that a wrong context shows
JOINT = JointDistribution(
    [
        [[0.5, 0.3, 0.2]] * 3,
        [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]],
        [[0.2, 0.2, 0.6], [0.8, 0.1, 0.1], [0.3, 0.4, 0.3]],
    ]
)


def equal_share(observed):
    """Share of replicates with two equal samples, and its standard score."""
    p, replicates = float((JOINT.one**2).sum()), int(observed.sum())
    share = float(observed.view(27, 27).diagonal().sum()) / replicates
    return share, (share - p) / math.sqrt(p * (1 - p) / replicates)


@few(1)
@pytest.mark.parametrize(
    ("max_slots", "together"), [(16, 1), (16, 2)], ids=["one-after-another", "side-by-side"]
)
def test_joint_law(max_slots, together):
    observed, accepted, _ = JOINT.draw(REPLICATES, max_slots, together, budget=6 * max_slots)
    # samples side by side have little to copy: most positions are new to both
    assert accepted > REPLICATES / 10 or together == 2
    assert JOINT.p_value(observed) > 1e-4
    assert abs(equal_share(observed)[1]) < 4


@slow
def test_verifiers_that_copy_siblings_fail_the_test(monkeypatch):
    """min(1, q / q_sibling) keeps each sample's distribution and makes the two of them copies.

    Both are distributed alike after the same prefix, so the ratio is 1: the sibling's token
    is taken wherever it was drafted.
    """
    right = verify_ref
    first: dict[int, list[int]] = {}

    def copying(logits, pool, slots, *_, **__):
        verdict = right(logits, pool, slots)
        key, tokens_so_far = int(slots.key[0]), slots.tokens[0, : int(slots.generated[0])].tolist()
        sibling = first.get(key, []) if int(slots.sample[0]) else []
        prefix = {}
        for row in range(pool.rows):
            parent = int(pool.parent[row])
            prefix[row] = tokens_so_far if parent < 0 else [*prefix[parent], int(pool.token[row])]
            n = len(prefix[row])
            children = pool.token[pool.parent == row].tolist()
            if prefix[row] == sibling[:n] and n < len(sibling) and sibling[n] in children:
                verdict.sample[row] = sibling[n]
        path = descend_ref(verdict.sample, pool, slots)
        verdict.accept_row, verdict.accept_count, verdict.finish = path
        if not int(slots.sample[0]):
            rows = verdict.accept_row[0, : int(verdict.accept_count[0])].long()
            first[key] = tokens_so_far + verdict.sample[rows].tolist()
        return verdict

    monkeypatch.setattr(ops, "verify_ref", copying)
    observed, *_ = JOINT.draw(400, max_slots=1, budget=6, kernels="reference")
    assert equal_share(observed)[1] > 20
    assert JOINT.p_value(observed) < 1e-10


def words_of(monkeypatch, script):
    """Replace the words of given (token, stream) by scripted ones."""

    def philox(key, token, position, sample, stream):
        words = philox_words_ref(key, token, position, sample, stream)
        for (t, s), word in script.items():
            if s == stream:
                words = torch.where(token == t, word, words)
        return words

    monkeypatch.setattr(reference_draws, "philox_words_ref", philox)


def draw(logits, **options):
    # whose words are scripted; tests/unit/kernels/loops/test_loop_noise.py has the loops' words
    model = LastToken(lambda t, p: logits.expand(t.shape[0], -1), len(logits))
    e = engine(model, kernels="reference")
    return csd.generate(e, [0], max_new_tokens=1, seed=0, budget=0, **options)


def rare_logits(probability):
    return torch.tensor([math.log(1 - probability), math.log(probability)], dtype=torch.float64)


def test_a_token_of_probability_1e_7_can_be_drawn(monkeypatch):
    """It lies in the rest; its word is small enough once in 10^7 draws, and word 0 is."""
    words_of(monkeypatch, {(2, 0): 0, (0, 0): 2**31})
    assert draw(rare_logits(1e-7)).tokens == [[1]]
    # P(rest wins) = 1e-7: at the common token's median it needs a word below 1e-7 ln 2 2^32
    bound = round(1e-7 * math.log(2) * 2**32)
    words_of(monkeypatch, {(2, 0): bound - 2, (0, 0): 2**31})
    assert draw(rare_logits(1e-7)).tokens == [[1]]
    words_of(monkeypatch, {(2, 0): bound + 2, (0, 0): 2**31})
    assert draw(rare_logits(1e-7)).tokens == [[0]]


@pytest.mark.parametrize("word", [0, 2**32 - 128, 2**32 - 1])
def test_extreme_words_draw_a_token(monkeypatch, word):
    """Every Gumbel is finite, so some token wins and its log-probability is finite."""
    words_of(monkeypatch, {(0, 0): word, (1, 0): word})
    out = draw(torch.tensor([0.0, 0.0], dtype=torch.float64))
    assert out.tokens == [[0]]
    assert math.isfinite(out.logprobs[0][0])


@pytest.mark.parametrize(
    ("word", "token"), [(0, 1), (2**30, 1), (2**31 + 10, 3), (2**32 - 1, 4)], ids=str
)
def test_the_rest_is_resolved_in_token_order(monkeypatch, word, token):
    """Head: token 0. Rest: 1, 3, 4 with masses 2, 1, 1; token 2 cannot be drawn."""
    logits = torch.tensor([0.0, -20 + math.log(2), -torch.inf, -20, -20], dtype=torch.float64)
    words_of(monkeypatch, {(5, 0): 0, (0, 0): 2**32 - 1, (0, 1): word})
    out = draw(logits)
    assert out.tokens == [[token]]
    p = logits.softmax(0)[token]
    assert out.logprobs[0][0] == pytest.approx(float(p.log()), abs=1e-9)
