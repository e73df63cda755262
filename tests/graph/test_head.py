"""A draft head beside the graph: same samples, both sets of candidates in one pool."""

import pytest
from scripted import PrefixSum, counting, engine

import csd
from csd.graph.rivals.draft_head import HeadDrafter


class Cycle:
    """Knows that token t + 1 mod 6 follows t; notes what it is told."""

    def __init__(self, right=True):
        self.step = 1 if right else 2
        self.prompts, self.hidden, self.last = [], [], {}

    def start(self, group_key, prompt, slots):
        self.prompts.append(prompt)
        self.first = prompt[-1]

    def expand(self, slot, path):
        tokens, chances = [], []
        for s, tail in zip(slot.tolist(), path, strict=True):
            last = tail[-1] if tail else self.last.get(s, self.first)
            tokens.append([(last + self.step) % 6, (last + 3) % 6])
            chances.append([0.9, 0.05])
        return tokens, chances

    def insert(self, hidden, pool, slots, verdict):
        self.hidden.append(None if hidden is None else hidden.shape[0] - pool.rows)
        for s in range(slots.count):
            if slots.live[s] and slots.generated[s]:
                self.last[s] = int(slots.context[s, 0])


def drawn(head, model, **options):
    def make(ops, device):
        return HeadDrafter(head, ops, device)

    return csd.generate(engine(model), [0, 1, 2, 3], drafter=make, seed=1, **options)


def test_a_head_that_is_right_is_accepted_from_the_first_step():
    head = Cycle()
    model = counting(6)
    out = drawn(head, model, num_samples=2, max_new_tokens=20, budget=8)
    assert out.tokens == [[(i + 4) % 6 for i in range(20)]] * 2
    # the graph alone knows nothing of what follows 3
    plain = csd.generate(
        engine(model), [0, 1, 2, 3], num_samples=2, max_new_tokens=20, budget=8, seed=1
    )
    assert out.stats.tokens_per_step > plain.stats.tokens_per_step
    assert head.prompts == [[0, 1, 2, 3]]
    # the target's hidden states come with the pool they belong to
    assert head.hidden and set(head.hidden) == {0}


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("budget", [2, 16, 200])
def test_a_head_changes_no_sample(right, budget):
    model = PrefixSum(sharpness=8.0)
    options = dict(num_samples=3, max_new_tokens=24)
    out = drawn(Cycle(right), model, budget=budget, **options)
    plain = csd.generate(engine(model), [0, 1, 2, 3], speculate=False, seed=1, **options)
    assert out.tokens == plain.tokens


def test_what_the_graph_knows_is_drafted_beside_a_wrong_head():
    model = counting(6)
    out = drawn(Cycle(right=False), model, num_samples=2, max_new_tokens=48, budget=16)
    assert out.tokens == [[(i + 4) % 6 for i in range(48)]] * 2
    assert out.stats.tokens_per_step > 2
