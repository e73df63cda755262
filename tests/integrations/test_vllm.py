"""vLLM's proposer, on buffers that are filled as vLLM fills them; vLLM itself is not imported."""

import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from targets import few

from csd.engine.traces.traces import Trace
from csd.evaluate.replay import replay
from csd.graph.chain import ConsensusChain
from csd.integrations.vllm import Proposer
from csd.kernels.ops import reference
from csd.state.context_table import ANY, WEIGHT_ONE
from csd.state.pool_builder import roots

END = 99


class Batch:
    """The part of vLLM that a proposer sees: a persistent batch whose rows requests hold.

    requests: name -> (prompt, all that it will sample).
    """

    def __init__(self, proposer, requests, rows, length=512):
        self.proposer, self.requests = proposer, requests
        self.ids = np.zeros((rows, length), np.int32)
        self.count = np.zeros(rows, np.int32)
        self.row = {}  # of the requests in the batch
        self.done = dict.fromkeys(requests, 0)  # tokens sampled
        self.drafts = dict.fromkeys(requests, ())
        self.tokens = self.row_steps = 0

    def put(self, name, row):
        """Into a row, as at its start, after preemption or where another row has become free."""
        prompt, sample = self.requests[name]
        text = [*prompt, *sample[: self.done[name]]]
        self.ids[row] = -7
        self.ids[row, : len(text)], self.count[row] = text, len(text)
        self.row[name] = row

    def remove(self, name):
        del self.row[name]
        self.drafts[name] = ()

    def step(self, prefilling=(), propose=True):
        """Verify the drafts of all requests in the batch and propose the next ones."""
        sampled = [[] for _ in range(max(self.row.values()) + 1)]
        for name, row in self.row.items():
            if name in prefilling:
                continue
            sample, at = self.requests[name][1], self.done[name]
            right = 0
            for drafted in self.drafts[name]:
                if at + right + 1 >= len(sample) or drafted != sample[at + right]:
                    break
                right += 1
            sampled[row] = sample[at : at + right + 1]
            end = self.count[row] + right + 1
            self.ids[row, self.count[row] : end], self.count[row] = sampled[row], end
            self.done[name] += right + 1
            self.tokens, self.row_steps = self.tokens + right + 1, self.row_steps + 1
        drafts = [[]] * len(sampled)
        if propose:
            drafts = self.proposer.propose(sampled, self.count, self.ids, slot_mappings=None)
        assert len(drafts) == len(sampled)
        for name, row in list(self.row.items()):
            self.drafts[name] = drafts[row]
            if self.done[name] == len(self.requests[name][1]):
                self.remove(name)

    def run(self):
        while self.row:
            self.step()


def config(k=4, rows=8, length=512):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(
            max_model_len=length,
            hf_config=SimpleNamespace(eos_token_id=END),
            try_get_generation_config=dict,
        ),
    )


def proposer(k=4, rows=8, length=512, **options):
    return type("Options", (Proposer,), options)(config(k, rows, length))


def samples(count, tokens, seed=0):
    """Variations of one text that repeats itself, of differing lengths, each with an end token."""
    draw = random.Random(seed)
    text = [draw.randrange(30) for _ in range(15)] * (tokens // 15 + 1)
    return [
        [t if draw.random() < 0.9 else draw.randrange(30) for t in text[: tokens - 3 * s]] + [END]
        for s in range(count)
    ]


PROMPT = [*range(40, 60)]


def begun(p, requests, rows=8):
    batch = Batch(p, requests, rows)
    for row, name in enumerate(requests):
        batch.put(name, row)
    return batch


def group_of(p, prompt=PROMPT):
    return p.rows.groups[np.array(prompt, np.int32).tobytes()]


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
                self.table, slots, 64 * slots.count, replace(self.config, frontier=16), noise
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


def test_a_prompt_that_goes_on_where_a_sample_ended_is_another_group():
    """A conversation's next turn, read later: its prompt begins with the last one's."""
    text = samples(1, 20)[0]
    p = proposer()
    batch = begun(p, {0: (PROMPT, text)})
    batch.run()
    p.propose([], batch.count, batch.ids)
    longer = [*PROMPT, *text, 31, 32, 33]
    batch = begun(p, {0: (longer, text)})
    batch.run()
    assert group_of(p).begun == group_of(p, longer).begun == 1


def test_a_later_epoch_drafts_from_history():
    text = samples(1, 60)[0]
    p = proposer(8, patience=3)
    batch = begun(p, {s: (PROMPT, text) for s in range(2)})
    batch.run()
    first = batch.row_steps
    for _ in range(5):
        p.propose([], batch.count, batch.ids)
    assert not p.rows.groups and not p.rows.samples
    assert [e.tokens.tolist() for e in p.history.of(PROMPT)] == [text, text]
    # groups leave nothing else behind
    assert (p.graph.table.entry_group >= 0).any() and (p._slots.group_key == -1).all()
    batch = begun(p, {s: (PROMPT, text) for s in range(2)})
    batch.run()
    assert batch.row_steps < 0.6 * first

    off = proposer(8, patience=3, history_samples=0)
    assert off.history is None


def test_history_is_bounded():
    p = proposer(patience=1, history_samples=2, history_tokens=100)
    for prompt in range(10):
        batch = begun(p, {s: ([prompt] * 5, samples(1, 20, s)[0]) for s in range(4)})
        batch.run()
    for _ in range(3):
        p.propose([], batch.count, batch.ids)
    assert 0 < p.history.size <= 100
    assert len(p.history.of([9] * 5)) == 2


def test_more_prompts_than_places_release_the_idlest():
    p = proposer(rows=2)
    for prompt in range(10):
        batch = begun(p, {0: ([prompt] * 5, [1, 2, 3, END])}, rows=2)
        batch.run()
    assert len(p.rows.groups) == p.rows.places == 4
    assert [bytes(np.array([n] * 5, np.int32)) in p.rows.groups for n in (5, 6, 9)] == [
        False, True, True
    ]  # fmt: skip
    assert [0] * 5 in p.history


def test_long_prompts_enter_by_pieces():
    """A step waits for few pieces; when all are in, the graph has the whole prompt."""
    draw = random.Random(2)
    prompt = [draw.randrange(1000) for _ in range(9000)]
    text = prompt[5000:5040]
    p = proposer(4, length=9100)
    batch = Batch(p, {0: (prompt, text)}, 8, length=9100)
    batch.put(0, 0)
    batch.step()
    assert p._entering
    for _ in range(3):
        batch.step()
    assert not p._entering
    assert batch.drafts[0] == text[batch.done[0] :][:4]


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


def test_importing_it_does_not_import_vllm():
    code = "import sys, csd.integrations.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
