"""Whole generations under the verifiers that draw their drafts."""

import os
from types import SimpleNamespace

import joint_law
import pytest
import torch
from scripted import Letters, PrefixSum, engine

import csd
from csd.budget import AutoBudget, CostModel
from csd.graph import sampled_tree
from csd.graph.consensus import ConsensusGraph
from csd.graph.table import WEIGHT_ONE, GraphConfig
from csd.kernels.ops import reference
from csd.pool import MAX_NODES, roots
from csd.slots import Slots
from csd.verify.sampler import DRAWS, Sampler
from csd.verify.target import processed

# of prompts; `make test-long` asks for more
REPLICATES = int(os.environ.get("CSD_REPLICATES", 700))
SLOTS = 16
CONFIG = GraphConfig(orders=(1, 2, 3, 4))

verifiers = pytest.mark.parametrize("verifier", sorted(DRAWS))


def law_of(verifier, draws, monkeypatch, drafter=None):
    """p-value of the joint law, and the accepted share of what was drafted."""
    monkeypatch.setitem(DRAWS, verifier, draws)
    observed, accepted = joint_law.draw(
        REPLICATES, SLOTS, verifier=verifier, budget=3 * draws * SLOTS, drafter=drafter
    )
    return joint_law.p_value(observed), accepted


def short_memory(ops, device):
    """A graph that is quick to believe what a token was last followed by."""
    one = GraphConfig(
        orders=(1, 2), smoothing=WEIGHT_ONE // 4, prompt_weight=WEIGHT_ONE // 2, trust=0.98,
        own_weight=1.0, decay=1.0,
    )  # fmt: skip
    return ConsensusGraph(ops, device, one)


@pytest.mark.parametrize(("verifier", "draws"), [("canonical", 2), ("recursive", 3), ("kseq", 2)])
def test_joint_law(verifier, draws, monkeypatch):
    p, accepted = law_of(verifier, draws, monkeypatch)
    assert p > 1e-4
    assert accepted > 0.1


def test_a_pool_that_drops_its_least_likely_draw_is_found_out(monkeypatch):
    right = sampled_tree.draw

    def picky(law, words):
        """One draw more than asked for, of which the least likely goes."""
        drawn = right(law, words) + right(law, (words[:1] * 2654435761 + 1) % 2**32)
        # places are by falling probability
        drawn.remove(max(drawn))
        return drawn

    monkeypatch.setattr(sampled_tree, "draw", picky)
    assert law_of("canonical", 2, monkeypatch)[0] < 1e-6


def test_drafting_words_without_the_step_number_are_found_out(monkeypatch):
    assert law_of("canonical", 1, monkeypatch, short_memory)[0] > 1e-4
    monkeypatch.setattr(sampled_tree, "stepped", lambda stream, step: step * 0 | stream)
    assert law_of("canonical", 1, monkeypatch, short_memory)[0] < 1e-6


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


@verifiers
def test_a_call_repeats_itself(verifier):
    """With a whole budget; and it stops where it is told to."""
    e = engine(PrefixSum(sharpness=4.0), Letters(), max_slots=3)
    options = dict(num_samples=9, max_new_tokens=40, seed=2, budget=12, stop_token_ids=[5, 11])
    first = csd.generate(e, "hello", verifier=verifier, **options)
    again = csd.generate(e, "hello", verifier=verifier, **options)
    assert first.tokens == again.tokens and first.logprobs == again.logprobs
    assert first.stats.nodes_accepted == again.stats.nodes_accepted > 0
    for sample in first:
        ends = [i for i, t in enumerate(sample.tokens) if t in (5, 11)]
        assert ends == ([len(sample.tokens) - 1] if sample.finish_reason == "stop" else [])
        assert sample.finish_reason == "stop" or len(sample.tokens) == 40


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
    message = "verifier must be one of 'match', 'canonical', 'recursive', 'kseq', got 'single'"
    with pytest.raises(ValueError, match=message):
        csd.generate(e, "ab", verifier="single")
    for _ in range(2):
        with pytest.raises(ValueError, match="drafter must be 'consensus', got PromptLookup"):
            csd.generate(e, "ab", verifier="kseq", drafter="prompt-lookup", max_new_tokens=2)
    elsewhere = SimpleNamespace(table=SimpleNamespace(step=torch.empty(1, device="meta")))
    with pytest.raises(NotImplementedError, match="verifier 'kseq' runs on CPU only"):
        Sampler("kseq", elsewhere, reference())


def state(live=3, slots=4, **changes):
    """Slots of one group in the middle of their samples."""
    s = Slots.empty(slots, 8, 40, CONFIG.context)
    s.live[:live] = True
    s.group[:live] = 0
    s.group_key[:2] = torch.tensor([7, 9])
    # of a group that has said nothing
    s.group[2] = 1 if live > 2 else -1
    s.prompt_len[:2] = 5
    s.key.copy_(torch.arange(slots) * 77 + 5)
    s.sample.copy_(torch.arange(slots))
    s.generated[:live] = torch.arange(live, dtype=torch.int32)
    s.context.copy_(torch.tensor([[1, 2, 3, 4], [2, 3, 4, 5], [6, 6, 6, 6], [0, 0, 0, 0]]))
    s.max_new.fill_(40)
    for name, value in changes.items():
        getattr(s, name).fill_(value)
    return s


def graph(slots):
    drafter = ConsensusGraph(reference(), torch.device("cpu"), CONFIG)
    drafter.start(7, [1, 2, 3, 4, 5, 1, 2, 4, 1, 3, 2, 1, 2, 3, 5, 1, 1, 4], slots)
    return drafter


def grow(slots, nodes, draws=3, choose=len):
    trees = sampled_tree.SampledTrees(graph(slots), reference().draft_tree, draws)
    return trees.grow(slots, int(slots.live.sum()), nodes, choose)


@pytest.mark.parametrize("nodes", [0, 2, 3, 31, 400])
def test_trees_take_all_draws_of_a_node_or_none(nodes):
    slots = state()
    pool, drawn = grow(slots, nodes)
    used = int((pool.slot >= 0).sum())
    assert used == int(pool.slot_nodes.sum()) == len(drawn.nodes) <= 3 + nodes
    # of slot 2's group the graph knows nothing
    assert pool.slot_nodes.tolist()[2:] == [1, 0]
    if nodes < 400:
        assert used - 3 == nodes // 3 * 3
    else:
        assert pool.slot_nodes[:2].tolist() == [MAX_NODES, MAX_NODES]
    children: dict[int, list[int]] = {}
    for row in range(used):
        start = drawn.start[int(pool.slot[row])]
        parent = int(pool.parent[row])
        word = 1 << (row - start)
        if parent >= 0:
            children.setdefault(parent, []).append(row)
            word |= int(pool.ancestors[parent]) & (2**64 - 1)
            assert pool.depth[row] == pool.depth[parent] + 1
            assert pool.position[row] == pool.position[parent] + 1
            assert pool.context[row].tolist() == [
                int(pool.token[row]), *pool.context[parent].tolist()[:-1]
            ]  # fmt: skip
        assert int(pool.ancestors[row]) & (2**64 - 1) == word
    for parent, rows in children.items():
        node = drawn.nodes[parent]
        assert len(rows) == 3
        assert pool.token[rows].tolist() == [node.kept.token[i] for i in node.drafts]
    # expanded in order of the path's probability: none that was left out is likelier, save equal
    # draws and slots that are full
    for s in (0, 1):
        rows = [r for r in range(used) if pool.slot[r] == s]
        costs = {True: [], False: []}
        for r in rows:
            node = drawn.nodes[r]
            first = all(
                drawn.nodes[c].token != node.token for c in children.get(int(pool.parent[r]), [])
                if c < r
            )  # fmt: skip
            if first and (node.kept is None or node.kept.token):
                costs[r in children].append(node.cost)
        if nodes == 31:
            assert max(costs[True]) <= min(costs[False])


def test_trees_keep_within_limits():
    slots = state()
    slots.max_new[0] = slots.generated[0] + 3
    slots.stop_ids[1, 0] = 1
    pool, drawn = grow(slots, 200)
    assert int(pool.depth[pool.slot == 0].max()) == 2
    assert 1 not in pool.token[(pool.slot == 1) & (pool.depth > 0)].tolist()
    assert 1 in pool.token[(pool.slot == 0) & (pool.depth > 0)].tolist()
    for node in drawn.nodes:
        if node.children:
            assert abs(node.kept.law.sum() - 1) < 1e-12


def test_draws_depend_on_step_and_slot_alone():
    """The same words again; others in the next step and in another slot; none is shared."""
    first, _ = grow(state(), 90)
    again, _ = grow(state(), 90)
    assert torch.equal(first.token, again.token)
    later, _ = grow(state(step=1), 90)
    assert not torch.equal(first.token, later.token)
    slots = state()
    _, drawn = grow(slots, 90)
    words = [(n.slot, int(w)) for n in drawn.nodes if n.children for w in n.words]
    assert len(set(words)) == len(words)
    # one slot's draws are the same beside others, where there is room for all
    alone = state(live=1)
    pool, _ = grow(alone, 30)
    both, _ = grow(state(), 90)
    n = min(int(pool.slot_nodes[0]), int(both.slot_nodes[0]))
    assert n > 9
    assert pool.token[:n].tolist() == both.token[:n].tolist()


def test_the_budget_decides_before_a_node_is_drawn():
    """What it is shown does not depend on the words of the node at stake."""
    shown = {}
    for key in (1, 2):
        slots = state(live=1)
        slots.key.fill_(key)
        seen = shown[key] = []
        grow(slots, 30, choose=lambda costs, seen=seen: seen.append(list(costs)) or len(costs))
    assert shown[1][0] == shown[2][0]
    assert shown[1] != shown[2]
    pool, _ = grow(state(), 30, choose=lambda costs: min(len(costs), 6))
    assert int((pool.depth > 0).sum()) == 6


def test_a_budget_that_keeps_no_node_rests():
    """One draw would pay, the two of a node do not: nothing is drafted, and that is a miss."""
    slots = state(live=1)
    slots.context[0] = torch.tensor([1, 5, 3, 2])
    budget = AutoBudget(CostModel([1, 2, 3, 64], [1.0, 1.0, 9.0, 99.0]))
    sampler = Sampler("canonical", graph(slots), reference())
    rows = [int(sampler.propose(slots, 1, budget).slot_nodes[0]) for _ in range(4)]
    assert rows == [1] * 4
    asked = [budget.ask(1) > 0 for _ in range(8)]
    # after misses in steps 0 and 3 it looks again in step 8
    assert asked == [False] * 4 + [True] * 4


FILTERS = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=0.4, top_k=5),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=2.0, top_p=0.3, top_k=11),
    dict(temperature=1.5, min_p=0.2),
    dict(temperature=0.8, top_p=0.999999999, penalty=1.3),
    dict(temperature=1.0, top_p=0.6, min_p=0.1, penalty=0.7),
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_processed_is_what_verify_samples_from(options):
    """Its eight likeliest tokens and the log-probability of what it sampled, at every row."""
    vocab = 70
    generator = torch.Generator().manual_seed(4)
    slots = state()
    slots.seen = torch.randint(-(2**31), 2**31 - 1, (4, 3), generator=generator, dtype=torch.int32)
    for name, value in options.items():
        getattr(slots, name)[:2] = value
    slots.min_new.fill_(2)
    slots.ban_ids[:, 0], slots.ban_ids[:, 1] = 5, 6
    pool, _ = grow(slots, 30)
    logits = torch.randn(pool.rows, vocab, generator=generator, dtype=torch.float64) * 5
    # equal values on both sides of a cut, and tokens far below
    logits[:, 20:30] = logits[:, 20:21]
    logits[:, 40] = -torch.inf
    logits[:, 41:] -= 15
    rows = (pool.slot >= 0).nonzero()[:, 0]
    law = processed(logits, rows, pool, slots)
    verdict = reference().verify(logits, pool, slots)
    assert (law.sum(-1) - 1).abs().max() < 1e-12
    top = verdict.top_token[rows].long()
    shown = torch.where(top >= 0, law.gather(1, top.clamp(min=0)), 0)
    assert (shown - verdict.top_prob[rows]).abs().max() < 1e-6
    beyond = law.scatter(1, top.clamp(min=0), 0).amax(-1)
    # where the head has fewer than eight, all others are below exp(-11.1)
    assert (beyond <= verdict.top_prob[rows][:, -1] + 1.6e-5).all()
    chosen = law.gather(1, verdict.sample[rows].long()[:, None])[:, 0]
    assert (chosen.log() - verdict.logprob[rows]).abs().max() < 1e-9
    early = (slots.generated[pool.slot[rows].long()] + pool.depth[rows]) < 2
    assert (law[early][:, 5:7] == 0).all() and early.any()


def test_processed_excludes_what_verify_excludes():
    """The whole support, by drawing from it often."""
    slots = state(live=1, temperature=1.0, top_p=0.8)
    pool = roots(slots, 1)
    logits = torch.linspace(0, 3, 8, dtype=torch.float64)[None]
    logits[0, 2:5] = logits[0, 3]
    law = processed(logits, torch.tensor([0]), pool, slots)[0]
    drawn = set()
    for i in range(300):
        slots.sample.fill_(i)
        drawn.add(int(reference().verify(logits, pool, slots).sample[0]))
    assert drawn == set(law.nonzero()[:, 0].tolist())
    assert len(drawn) < 8
