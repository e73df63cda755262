"""Matches in siblings' texts: the reference by another way, the kernels by the reference."""

import random

import pytest
import torch
from text_cases import random_slots, random_texts

from csd.kernels.draft.paper.suffix_match import suffix_match, suffix_match_ref, suffix_match_triton
from csd.state.slots import Slots
from csd.state.texts import CHANCE_ONE, SlotTexts

pytestmark = pytest.mark.compiled

CASES = [
    # seed, slots, rows, width, k, edits, most, tokens
    (0, 3, 5, 20, 3, 0, 8, 4),
    (1, 3, 5, 20, 3, 1, 8, 4),
    (2, 4, 6, 25, 4, 2, 16, 16),
    (3, 2, 3, 300, 4, 1, 64, 16),
    (4, 2, 3, 9, 1, 0, 3, 1),
    (5, 5, 4, 12, 6, 1, 5, 3),
    (6, 1, 1, 8, 2, 1, 8, 16),
    (7, 2, 270, 10, 2, 0, 64, 2),
    (8, 2, 2, 30, 5, 3, 7, 5),
]


def distance(a, b):
    """Edit distance, by the whole table."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j - 1] + (x != y), row[j] + 1, new[-1] + 1))
        row = new
    return row[-1]


def by_hand(texts, slots, k, edits, most, tokens):
    """Candidates as lists, by the definition."""
    out = []
    for s in range(slots.count):
        query = slots.context[s, :k].tolist()[::-1]
        found = []
        for row in range(texts.rows if slots.live[s] and min(query) >= 0 else 0):
            tokens_of_row = texts.token[row, : texts.length[row]].tolist()
            if texts.group_key[row] != slots.group_key[slots.group[s]]:
                continue
            if texts.sample[row] == slots.sample[s]:
                continue
            for end in range(k - 1, len(tokens_of_row) - 1):
                window = tokens_of_row[end - k + 1 : end + 1]
                d = distance(query[:-1], window[:-1]) + (query[-1] != window[-1])
                if min(window) >= 0 and d <= edits:
                    chance = texts.chance[row, end + 1 : end + 1 + tokens].tolist()
                    found.append((d, row, end, tokens_of_row[end + 1 : end + 1 + tokens], chance))
        out.append([(x[3], x[4][: len(x[3])]) for x in sorted(found)[:most]])
    return out


def cases(seed, count, rows, width, k):
    rng = random.Random(seed)
    slots = random_slots(rng, count, k + 2, vocab=2 if seed == 7 else 4)
    return random_texts(rng, slots, rows, width, vocab=2 if seed == 7 else 4), slots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_definition(case):
    seed, count, rows, width, k, edits, most, tokens = case
    texts, slots = cases(seed, count, rows, width, k)
    got = suffix_match_ref(texts, slots, k, edits, most, tokens)
    want = by_hand(texts, slots, k, edits, most, tokens)
    for s in range(count):
        lists = [
            (t[t >= 0].tolist(), c[: int((t >= 0).sum())].tolist())
            for t, c in zip(got.token[s], got.chance[s], strict=True)
        ]
        assert lists[: len(want[s])] == want[s]
        assert all(t == [] for t, _ in lists[len(want[s]) :])
        assert (got.chance[s][got.token[s] < 0] == 0).all()


def test_the_cases_have_matches_of_every_kind():
    found = [
        len(x)
        for seed, count, rows, width, k, edits, most, tokens in CASES
        for x in by_hand(*cases(seed, count, rows, width, k), k, edits, 10**6, tokens)
    ]
    assert 0 in found and max(found) > 64 and any(0 < n < 5 for n in found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(poison, case):
    seed, count, rows, width, *options = case
    texts, slots = cases(seed, count, rows, width, options[0])
    want = suffix_match_ref(texts, slots, *options)
    got = suffix_match_triton(texts, slots, *options)
    assert torch.equal(got.token, want.token) and torch.equal(got.chance, want.chance)


def test_the_operator_runs_the_reference_on_cpu_and_names_errors():
    texts, slots = cases(1, 3, 5, 20, 3)
    got, want = suffix_match(texts, slots, 3, 1, 8, 4), suffix_match_ref(texts, slots, 3, 1, 8, 4)
    assert torch.equal(got.token, want.token) and torch.equal(got.chance, want.chance)
    with pytest.raises(ValueError, match=r"k must be from 1 to 5, the length of .* context, got 6"):
        suffix_match(texts, slots, 6, 1, 8, 4)
    with pytest.raises(ValueError, match="edits must be from 0 to 2, got 3"):
        suffix_match(texts, slots, 3, 3, 8, 4)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        suffix_match(texts, slots, 3, 1, 0, 4)
    texts.chance = texts.chance.long()
    with pytest.raises(ValueError, match=r"texts.chance must be torch.int32, got torch.int64"):
        suffix_match(texts, slots, 3, 1, 8, 4)


def test_texts_are_the_samples_tokens():
    """Slots commit by turns, take new samples, and write behind the prompt's last k tokens."""
    from csd.state.pool_builder import roots

    k, rng = 3, random.Random(0)
    slots = Slots.empty(3, 9, 40, k)
    texts = SlotTexts.empty(3, 40, k, rounds=2)
    slots.group_key[0] = 5
    slots.group[:] = 0
    prompt = {0: [4, 5, 6], 1: [4, 5, 6], 2: [-1, -1, 7]}
    expected: dict = {}
    history: list = []
    sample = 0
    for step in range(30):
        for s in range(3):
            if not slots.live[s] and rng.random() < 0.7:
                slots.live[s] = True
                slots.sample[s] = sample
                expected[s] = (sample, [])
                history.append(expected[s])
                sample += 1
                slots.generated[s] = 0
                slots.context[s] = torch.tensor(prompt[s][::-1])
        pool = roots(slots, 8)
        count = torch.zeros(3, dtype=torch.int32)
        for s in range(3):
            if slots.live[s]:
                count[s] = rng.randint(1, 5)
                for _ in range(int(count[s])):
                    token = rng.randrange(9)
                    slots.tokens[s, slots.generated[s]] = token
                    slots.logprobs[s, slots.generated[s]] = torch.tensor(0.25).log()
                    slots.generated[s] += 1
                    slots.context[s] = torch.cat([torch.tensor([token]), slots.context[s, :-1]])
                    expected[s][1].append(token)
                if slots.generated[s] > 12:
                    slots.live[s] = False
        texts.append(pool, slots, count, k)
        del step
    held = {
        int(texts.sample[r]): texts.token[r, : texts.length[r]].tolist()
        for r in range(texts.rows)
        if texts.group_key[r] == 5
    }
    # the last two samples of every slot
    assert len(held) == 6 and set(held) >= {n for n, _ in expected.values()}
    everything = dict(history)
    for n, tokens in held.items():
        assert tokens[k:] == everything[n]
        assert tokens[:k] in ([4, 5, 6], [-1, -1, 7])
    for r in range(texts.rows):
        assert (texts.chance[r, k : texts.length[r]] == CHANCE_ONE // 4).all()
