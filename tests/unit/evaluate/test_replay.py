"""Replay, of drafters and recordings of which it is known what must come out."""

import json
import math

import pytest
import torch
from helpers.targets import slow

from csd.evaluate.replay import Recording, replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.state.context_table import GraphConfig
from csd.state.pool import OWN, Pool
from csd.traces.traces import Trace, read_traces

VOCAB = 6


def consensus(**options):
    config = GraphConfig(capacity=1 << 12, **options)
    return ConsensusGraph(reference(), torch.device("cpu"), config)


class Scripted:
    """Drafts a chain for every live slot: what `tokens(slot, place)` says comes at each place."""

    context = 4

    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length

    def observe_prompt(self, group_key, prompt, observed, read, slots):
        return read

    def insert(self, pool, slots, verdict, defer=False):
        pass

    def propose(self, slots, rows, noise=None):
        live = slots.live.nonzero()[:, 0].tolist()
        length = min(self.length, rows // len(live) - 1)
        pool = Pool.empty(rows, slots.count, slots.count, self.context)
        row = 0
        for s in live:
            pool.slot_start[s], pool.slot_nodes[s] = row, length + 1
            for depth in range(length + 1):
                generated = int(slots.generated[s])
                root = int(slots.context[s, 0])
                pool.token[row] = self.tokens(s, generated + depth - 1) if depth else root
                pool.parent[row] = row - 1 if depth else -1
                pool.slot[row], pool.depth[row] = s, depth
                pool.ancestors[row] = (1 << (depth + 1)) - 1
                pool.source[row] = OWN if depth else 0
                row += 1
        return pool


def trace(samples, prompt=(1, 2, 3), top=None):
    return Trace(0, list(prompt), samples, 0.7, top)


SAMPLES = [[(3 * i + s) % 7 for i in range(20 - 3 * s)] for s in range(3)]


def test_without_right_drafts_a_step_commits_one_token():
    for drafter in (Scripted(lambda s, i: 99, 4), Scripted(lambda s, i: 0, 0)):
        result = replay(trace(SAMPLES), drafter, 3, 4)
        assert result.tau == 1
        assert result.steps == result.plain_steps == 20
        assert result.tokens == sum(map(len, SAMPLES))
        assert result.sources[OWN] == 0


@pytest.mark.parametrize("length", [1, 3, 4])
def test_right_drafts_commit_their_length_and_one(length):
    def tokens(s, i):
        return SAMPLES[s][i] if i < len(SAMPLES[s]) else 99

    result = replay(trace(SAMPLES), Scripted(tokens, length), 3, 4)
    steps = [math.ceil(len(x) / (length + 1)) for x in SAMPLES]
    assert result.sample_steps == sum(steps)
    assert result.steps == max(steps)
    assert result.tokens == sum(map(len, SAMPLES))
    assert result.nodes == length * sum(steps)
    # of each step's tokens one was sampled off the tree, unless the sample ended inside it
    short = sum(len(x) % (length + 1) == 0 for x in SAMPLES)
    assert result.tokens - result.sources[OWN] in (sum(steps), sum(steps) - short)


def test_a_wrong_token_cuts_the_path():
    def tokens(s, i):
        return SAMPLES[s][i] if i < len(SAMPLES[s]) and i % 4 != 2 else 99

    result = replay(trace(SAMPLES[:1]), Scripted(tokens, 4), 1, 4)
    # 0 1 2 | 3 4 5 6 | 7 8 9 10 | .. | 19
    assert result.steps == 6


def test_the_budget_follows_the_living_or_is_shared():
    seen = []

    class Watch(Scripted):
        def propose(self, slots, rows, noise=None):
            seen.append((int(slots.live.sum()), rows))
            return super().propose(slots, rows)

    for share in (False, True):
        seen.clear()
        replay(trace(SAMPLES), Watch(lambda s, i: 99, 4), 3, 4, share=share)
        assert {live for live, _ in seen} == {1, 2, 3}
        assert all(rows == live + 4 * (3 if share else live) for live, rows in seen)


def test_equal_samples_pay():
    text = [i * i % 31 for i in range(60)]
    result = replay(trace([text] * 4), consensus(hard_weight=1 << 16), 4, 8)
    assert result.tokens == 240
    # they advance together, so only repeats help; the text repeats after 31 tokens
    assert result.tau > 1.5
    apart = replay(trace([text[:20]]), consensus(hard_weight=1 << 16), 1, 8)
    assert apart.tau < result.tau


def markov(seed, tokens):
    """Samples of a Markov chain, drawn with keyed Gumbels, their `top`, and the Gumbels."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(VOCAB, VOCAB, generator=generator, dtype=torch.float64) ** 4
    probs = (probs / probs.sum(1, keepdim=True)).mul(1000).round().clamp(min=1)
    probs /= probs.sum(1, keepdim=True)
    S = 6
    gumbel = -(-torch.rand(S, tokens + 17, VOCAB, generator=generator).double().log()).log()
    samples, top = [], []
    for s in range(S):
        last, text, tops = 0, [], []
        for i in range(tokens):
            q = probs[last]
            last = int((q.log() + gumbel[s, i]).argmax())
            text.append(last)
            order = q.argsort(descending=True)
            tops.append([order.tolist(), q[order].tolist()])
        samples.append(text)
        top.append(tops)
    return Trace(0, [1, 0], samples, 1.0, top), probs, gumbel


def test_posterior_noise_draws_the_recording():
    recorded, probs, _ = markov(0, 80)
    recording = Recording(recorded, 6)
    slot = torch.arange(6).repeat_interleave(80)
    position = torch.arange(80).repeat(6)
    token = torch.arange(VOCAB).expand(480, VOCAB)
    g = recording.noise(slot, position, token)
    text = torch.tensor(recorded.samples)
    last = torch.cat([torch.zeros(6, 1, dtype=torch.int64), text[:, :-1]], 1).flatten()
    assert torch.equal((probs[last].log() + g).argmax(1), text.flatten())
    # the same noise whenever it is asked for, other noise for another seed
    assert torch.equal(g[:7, 1:3], recording.noise(slot[:7], position[:7], token[:7, 1:3]))
    other = Recording(recorded, 6, seed=1).noise(slot, position, token)
    assert not torch.isclose(g, other).any()


def test_posterior_noise_is_gumbel_over_recordings():
    recorded, _, _ = markov(1, 400)
    recording = Recording(recorded, 6)
    slot, position = torch.arange(6).repeat_interleave(400), torch.arange(400).repeat(6)
    g = recording.noise(slot, position, torch.arange(VOCAB).expand(2400, VOCAB))
    # exp(-exp(-g)) is uniform for every token, whatever its probability
    for u in (-(-g).exp()).exp().T:
        distance = (u.sort().values - (torch.arange(2400) + 0.5) / 2400).abs().max()
        assert distance < 1.95 / math.sqrt(2400)


@slow
def test_replay_with_true_and_posterior_noise_agree():
    recorded, _, gumbel = markov(2, 300)

    def true(slot, position, token):
        return gumbel[slot[:, None], position[:, None], token]

    known = replay(recorded, consensus(), 6, 3, noise=true).tau
    drawn = [replay(recorded, consensus(), 6, 3, seed=s).tau for s in range(3)]
    plain = replay(recorded, consensus(), 6, 3, coupled=False).tau
    assert abs(sum(drawn) / 3 / known - 1) < 0.05
    assert known > plain * 1.03


def test_tokens_outside_the_recorded_top_have_fresh_noise():
    top = [[[[5, 7], [0.6, 0.3]]]]
    recording = Recording(trace([[9]], top=top), 1)
    zero = torch.zeros(1, dtype=torch.int64)
    g = recording.noise(zero, zero, torch.tensor([[5, 7, 9, 11]]))[0]
    score = g[:3] + torch.tensor([0.6, 0.3, 0.1]).double().log()
    # the recorded token stands for the rest, and won
    assert score.argmax() == 2
    # past the recording nothing is known
    beyond = recording.noise(zero, zero + 5, torch.tensor([[5, 7]]))
    assert beyond.isfinite().all()


def test_a_drafter_sees_no_more_than_was_committed():
    # two recordings that differ late are drafted alike until then
    first = [1, 2, 3, 4] * 8
    second = [*first[:20], *[9] * 12]
    seen = []
    for text in (first, second):
        drafter, pools = consensus(), []
        propose = drafter.propose

        def watch(slots, rows, noise=None, propose=propose, pools=pools):
            pools.append((int(slots.generated[0]), propose(slots, rows, noise)))
            return pools[-1][1]

        drafter.propose = watch
        replay(trace([text]), drafter, 1, 4)
        seen.append(dict(pools))
    early = [p for p in seen[0] if p <= 20 and p in seen[1]]
    assert len(early) > 2
    for place in early:
        assert torch.equal(seen[0][place].token, seen[1][place].token)


def test_trace_files_are_read(tmp_path):
    lines = [
        {
            "problem": 3,
            "prompt_ids": [1, 2],
            "samples": [[3]],
            "temperature": 0.5,
            "top": [[[[3], [0.9]]]],
        },
        {"prompt_ids": [1], "samples": [[4, 5]]},
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_traces(path)
    assert (first.problem, first.prompt, first.temperature) == (3, [1, 2], 0.5)
    assert first.top == [[[[3], [0.9]]]]
    assert (second.samples, second.temperature, second.top) == ([[4, 5]], 1.0, None)
