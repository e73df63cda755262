"""vLLM's proposer, on buffers that are filled as vLLM fills them; vLLM itself is not imported."""

import random
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from helpers.targets import few
from vllm_batch import END, PROMPT, Batch, begun, group_of, proposer, samples

import csd
from csd.evaluate.replay import replay
from csd.integrations.vllm.rows import ConsensusChain
from csd.kernels.ops import reference
from csd.state.context_table import ANY, WEIGHT_ONE
from csd.state.pool_builder import roots
from csd.traces.traces import Trace


class AfterPrefill(ConsensusChain):
    """vLLM's prefill samples the first token: there are no drafts before."""

    def propose(self, slots, rows, noise=None, **limits):
        slots.stop_ids[:, 0] = END
        if not slots.generated.any():
            return roots(slots, rows)
        return super().propose(slots, rows, noise, **limits)


# with step_tokens=1 the rows share as many drafts as they are, with 1000 each drafts all it can
@few(3)
@pytest.mark.parametrize(
    "k, step_tokens, nodes", [(1, 1, 1), (6, 1, 1), (6, 1000, 6), (16, 1000, 16)]
)
@pytest.mark.parametrize("min_prob", [0.0, 0.2])
def test_tau_is_that_of_a_chain_replay(k, step_tokens, nodes, min_prob):
    texts = samples(6, 60)
    p = proposer(k, step_tokens=step_tokens, min_prob=min_prob)
    batch = begun(p, {s: (PROMPT, text) for s, text in enumerate(texts)})
    batch.run()
    drafter = AfterPrefill(reference(), "cpu", p.graph.config)
    same = replay(Trace(0, PROMPT, texts, 0.7, None), drafter, 6, nodes)
    assert (batch.tokens, batch.row_steps) == (same.tokens, same.sample_steps)
    assert same.tau > 1.3


def test_chains_are_the_likeliest_paths():
    """Against trees: every node of a chain is its parent's likeliest child there."""
    texts = samples(5, 40)
    trace = Trace(0, PROMPT, texts, 0.7, None)
    seen = []

    class Compare(ConsensusChain):
        def propose(self, slots, rows, noise=None, *, nodes=None):
            chain = super().propose(slots, slots.count * 5, noise)
            tree = self._ops.draft_tree(
                self.table, slots, 64 * slots.count, replace(self.config, frontier=8), noise
            )
            for s in slots.live.nonzero()[:, 0].tolist():
                first, count = int(chain.slot_start[s]), int(chain.slot_nodes[s])
                node = int(tree.slot_start[s])
                for row in range(first + 1, first + count):
                    children = (tree.parent == node).nonzero()[:, 0]
                    order = [(int(tree.cost[c]), int(tree.token[c]), int(c)) for c in children]
                    cost, token, node = min(order)
                    assert (cost, token) == (int(chain.cost[row]), int(chain.token[row]))
                    assert int(chain.parent[row]) == row - 1
                    seen.append(token)
            return chain

    drafter = Compare(reference(), "cpu", replace(proposer().graph.config, min_prob=0.02))
    replay(trace, drafter, 5, 4)
    assert len(seen) > 100


def test_step_tokens_bound_all_drafts():
    texts = samples(6, 60)
    for step_tokens, most in ((14, 8), (1, 6)):
        p = proposer(16, step_tokens=step_tokens, min_prob=0.0)
        batch = begun(p, {s: (PROMPT, text) for s, text in enumerate(texts)})
        for _ in range(6):
            batch.step()
            drafted = sum(map(len, batch.drafts.values()))
            assert 0 < drafted <= most


def test_drafts_stay_within_the_model_length():
    p = proposer(16, length=48, min_prob=0.0)
    text = [1, 2, 3, 4] * 10
    batch = Batch(p, {0: (PROMPT, text)}, 8)
    batch.put(0, 0)
    while batch.row:
        batch.step()
        # a step samples one token more than it was given drafts
        after = len(PROMPT) + batch.done[0] + len(batch.drafts[0])
        assert after < 48 or not batch.drafts[0]
        if batch.done[0] == 28:
            return
    raise AssertionError("it has not come to the model's length")


def drafted_by_name(requests, move):
    """Drafts of each request by its length, while `move(batch, step)` moves the rows."""
    p = proposer(6, step_tokens=10_000, min_prob=0.0)
    batch, got = begun(p, requests), {}
    for step in range(200):
        if not batch.row:
            return p, batch, got
        move(batch, step)
        batch.step()
        for name in batch.row:
            got[name, batch.done[name]] = list(batch.drafts[name])
    raise AssertionError("it does not end")


def requests_of_two_prompts():
    """Names interleave two groups, whose samples begin alike."""
    a, b = samples(3, 50, seed=1), samples(3, 50, seed=1)
    other = [*PROMPT[:-1], 77]
    return {i: ((PROMPT, other)[i % 2], (a, b)[i % 2][i // 2]) for i in range(6)}


def test_groups_interleave():
    p, _, _ = drafted_by_name(requests_of_two_prompts(), lambda batch, step: None)
    assert sorted(g.begun for g in p.rows.groups.values()) == [3, 3]


def test_moved_rows_stay_their_samples():
    requests = requests_of_two_prompts()
    draw = random.Random(5)

    def shuffle(batch, step):
        names = list(batch.row)
        rows = draw.sample(range(8), len(names))
        # unused rows hold what is left of others
        drafts = dict(batch.drafts)
        for name, row in zip(names, rows, strict=True):
            batch.put(name, row)
        batch.drafts = drafts

    _, still, expected = drafted_by_name(requests, lambda batch, step: None)
    p, batch, got = drafted_by_name(requests, shuffle)
    assert got == expected
    assert (batch.tokens, batch.row_steps) == (still.tokens, still.row_steps)
    assert sorted(g.begun for g in p.rows.groups.values()) == [3, 3]


def test_resumed_rows_are_counted_once():
    """Preempted, then read again by chunks: no draft meanwhile, then its own sample goes on."""
    texts = samples(3, 50)
    requests = {s: (PROMPT, text) for s, text in enumerate(texts)}
    p = proposer(6, min_prob=0.0)
    batch = begun(p, requests)
    for _ in range(4):
        batch.step()
    batch.remove(1)
    for _ in range(5):
        batch.step()
    batch.put(1, 5)
    for _ in range(2):
        batch.step(prefilling=[1])
        assert batch.drafts[1] == []
    batch.run()
    assert group_of(p).begun == 3
    assert total_of(p) == sum(map(len, texts)) + len(PROMPT) - 1


def total_of(p, prompt=PROMPT):
    """Tokens that the group's context of order 0 has counted."""
    table = p.graph.table
    whole = (table.entry_tokens[:, 0] == ANY) & (table.entry_group == group_of(p, prompt).key)
    return int(table.entry_total[whole].sum()) // WEIGHT_ONE


def test_prompts_that_are_read_by_chunks_begin_with_their_first_token():
    p = proposer()
    batch = begun(p, {0: (PROMPT, [1, 2, 1, 2, 1, 2, END])})
    for read in (8, 16):
        batch.count[0] = read
        batch.step(prefilling=[0])
        assert not p.rows.groups
    batch.count[0] = len(PROMPT)
    batch.step()
    assert group_of(p).begun == 1
    batch.run()


def test_calls_that_vllm_skips_leave_no_gap():
    texts = samples(2, 60)
    p = proposer(6)
    batch = begun(p, {s: (PROMPT, text) for s, text in enumerate(texts)})
    for _ in range(3):
        batch.step()
    for _ in range(20):
        batch.step(propose=False)
    batch.run()
    assert group_of(p).begun == 2
    assert len(p.rows.groups) == 1
    assert all(s.length == len(PROMPT) + len(texts[s.number]) for s in p.rows.samples)


@pytest.mark.parametrize("k", [0, 17])
def test_drafter_reports_its_number_of_tokens(k):
    with pytest.raises(ValueError, match=f"num_speculative_tokens must be from 1 to 16, got {k}"):
        proposer(k)


def test_nothing_is_drafted_behind_an_end_token():
    p = proposer(8, min_prob=0.0)
    batch = begun(p, {s: (PROMPT, [1, 2, 3, 1, 2, 3, END]) for s in range(3)})
    while batch.row:
        batch.step()
        for drafts in batch.drafts.values():
            assert END not in drafts


def test_importing_it_does_not_import_vllm(monkeypatch):
    # an import of it raises
    monkeypatch.setitem(sys.modules, "vllm", None)
    for module in (csd.integrations.vllm, csd.integrations.vllm.rows):
        # once more, under a name of its own
        spec = spec_from_file_location(f"{module.__name__}_again", module.__file__)
        again = module_from_spec(spec)
        # which dataclasses look up
        monkeypatch.setitem(sys.modules, spec.name, again)
        spec.loader.exec_module(again)
    assert again.ConsensusChain is not ConsensusChain
