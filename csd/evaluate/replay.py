"""Replay of recorded samples in lockstep: the tokens that each step would have committed.

The default verifier's output does not depend on drafts, so a recording determines which drafted
tokens would have been accepted. A drafter sees only committed tokens. The expected speed-up of
drafting is computed from replayed steps times the cost of a step (`gain`).

If the recording has the target's top probabilities, the noise that led to it is drawn from its
posterior. With q the target's distribution, y the recorded token, Z a standard Gumbel and h fresh
Gumbels, the noise of token t is

    g_y = Z - log q_y,    g_t = -log( exp(-Z) + exp(-(log q_t + h_t)) ) - log q_t

since the winning score is a standard Gumbel and the others are Gumbels below it. Tokens of
unknown probability have g_t = h_t.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from csd.engine.results.record import SOURCES
from csd.engine.step.budget import StepTimeTable
from csd.graph.history import PastSample
from csd.graph.registry import make_drafter
from csd.kernels.common.noise import gumbel, philox_words_ref, prompt_key
from csd.kernels.ops import reference
from csd.kernels.texts.reference import merge_ref, part_ref, spread_ref
from csd.kernels.verify.advance_slots import advance_slots_ref
from csd.state.pool import MAX_DEPTH, Pool, rooted
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, TOP, Verdict
from csd.traces.traces import Trace


def gain(
    traces: list[Trace],
    nodes: int,
    cost: StepTimeTable | None,
    samples: int | None = None,
    drafter: str = "consensus",
    share_rows: bool = False,
) -> dict:
    """Figures of all traces together, with at most `nodes` drafted tokens per sample and step.

    samples: number of samples per trace; None: all. share_rows: as in `csd.Engine`; drafters that
    need the rows they proposed do not share. Returns nodes; tau; nodes_used, the mean number
    drafted per sample and step; rows_per_token, rows of the model per drawn token; speedup,
    relative to one token per step and a row for each sample, computed from `cost` without the
    drafter's own time, or None without a cost.
    """
    tokens = steps = drafted = rows = 0
    plain = drafting = 0.0
    for trace in traces:
        count = len(trace.samples) if samples is None else samples
        made = make_drafter(drafter, reference(), torch.device("cpu"))
        shares = share_rows and (nodes == 0 or made.inserts_any_pool)
        result = replay(trace, made, count, nodes, share_rows=shares)
        tokens, steps = tokens + result.tokens, steps + result.sample_steps
        drafted += result.nodes
        rows += result.model_rows
        if cost is None:
            continue
        lengths = [len(x) for x in trace.samples[:count]]
        in_flight = (sum(x > i for x in lengths) for i in range(max(lengths)))
        plain += sum(cost(n) for n in in_flight)
        drafting += sum(map(cost, result.step_rows))
    return {
        "nodes": nodes,
        "tau": tokens / steps,
        "nodes_used": drafted / steps,
        "rows_per_token": rows / tokens,
        "speedup": plain / drafting if cost is not None else None,
    }


# value for a recorded probability of 0: recordings have three digits
TINY = 2.5e-4
# limits of a recording: a step takes milliseconds, and a position a few hundred bytes
LONGEST, MAX_POSITIONS = 1 << 17, 1 << 22
# noise streams of the posterior's random words
_WINNER, _OTHERS = 1, 0


@dataclass(slots=True)
class Replayed:
    """Totals of a replay over all steps."""

    problem: int | str = 0
    tokens: int = 0  # committed tokens
    sample_steps: int = 0  # live samples, summed over steps
    steps: int = 0  # steps until the last sample ended
    plain_steps: int = 0  # the same without speculation
    nodes: int = 0  # drafted nodes
    rows: list[tuple[int, int]] = field(default_factory=list)  # (live samples, nodes) per step
    # rows of the model per step: roots and nodes, those of equal text once if shared
    step_rows: list[int] = field(default_factory=list)
    sources: list[int] = field(
        default_factory=lambda: [0] * len(SOURCES)
    )  # committed tokens by node source
    ends: list[int] = field(default_factory=list)  # step in which each sample ended, from 1
    propose_seconds: float = 0.0
    insert_seconds: float = 0.0
    history_seconds: float = 0.0  # seconds of entering past samples

    @property
    def model_rows(self) -> int:
        return sum(self.step_rows)

    @property
    def tau(self) -> float:
        """Tokens committed per sample and step."""
        return self.tokens / max(self.sample_steps, 1)

    @property
    def seconds(self) -> float:
        """Seconds per step of the drafter."""
        return (self.propose_seconds + self.insert_seconds) / max(self.steps, 1)


class Recording:
    """A trace's samples as tensors, for S samples, the longest of T tokens."""

    def __init__(self, trace: Trace, samples: int, seed: int = 0):
        lists = trace.samples[:samples]
        self.temperature, self.prompt = trace.temperature, trace.prompt
        self.length = torch.tensor([len(x) for x in lists])
        S, T = len(lists), int(self.length.max())
        if T > LONGEST or S * T > MAX_POSITIONS:
            raise ValueError(
                f"problem {trace.problem!r} must have samples of at most {LONGEST} tokens and at "
                f"most {MAX_POSITIONS} tokens in all, got {S} samples of up to {T} tokens"
            )
        self.token = torch.full((S, T + MAX_DEPTH + 1), -1, dtype=torch.int32)
        for s, tokens in enumerate(lists):
            self.token[s, : len(tokens)] = torch.tensor(tokens)
        self.has_top = trace.top is not None
        self.top_token = torch.full((*self.token.shape, TOP), -1, dtype=torch.int32)
        self.top_prob = torch.zeros(*self.token.shape, TOP)
        for s, tops in enumerate(trace.top[:samples] if trace.top else []):
            for i, (tokens, probs) in enumerate(tops[: len(lists[s])]):
                n = min(len(tokens), TOP)
                self.top_token[s, i, :n] = torch.tensor(tokens[:n])
                self.top_prob[s, i, :n] = torch.tensor(probs[:n])
        # log q of the recorded tokens [S, T'] and of the top tokens [S, T', 8]
        prob = torch.where(self.top_token >= 0, self.top_prob.double().clamp(min=TINY), 0)
        rest = (1 - prob.sum(-1)).clamp(min=TINY)
        scale = prob.sum(-1) + rest
        hit = (self.top_token == self.token[:, :, None]) & (self.top_token >= 0)
        mass = torch.where(hit.any(-1), (prob * hit).sum(-1), rest)
        self.log_drawn = (mass / scale).log()
        self._log_top = (prob / scale[:, :, None]).log()
        self._key = torch.tensor(prompt_key(seed, trace.prompt))

    def noise(
        self, slot: torch.Tensor, position: torch.Tensor, token: torch.Tensor
    ) -> torch.Tensor:
        """Posterior Gumbels of tokens [F, W] at positions [F] of slots [F]."""
        s, i = slot.long(), position.long()
        index = (s[:, None], i[:, None])
        word = philox_words_ref(self._key, token, i[:, None], s[:, None], _OTHERS)
        h = gumbel(word, torch.float64)
        winner = philox_words_ref(self._key, torch.zeros_like(i), i, s, _WINNER)
        z = gumbel(winner, torch.float64)[:, None]
        same = (token[:, :, None] == self.top_token[index]) & (token >= 0)[:, :, None]
        q = torch.where(same, self._log_top[index], -torch.inf).amax(-1)
        has_prob = q > -torch.inf
        q = torch.where(has_prob, q, 0)
        other = -torch.logaddexp(-z, -(q + h)) - q
        drawn = z - self.log_drawn[index]
        g = torch.where(has_prob, other, h)
        return torch.where(token == self.token[index], drawn, g)

    def slots(self, context: int) -> Slots:
        """Slots with all samples at their start, in one group."""
        S, T = self.length.shape[0], int(self.length.max())
        slots = Slots.empty(S, 1, T, context)
        slots.live.fill_(True)
        slots.group.fill_(0)
        slots.leader.fill_(0)
        slots.sample.copy_(torch.arange(S))
        tail = torch.tensor(self.prompt[-context:][::-1], dtype=torch.int32)
        slots.context[:, : tail.shape[0]] = tail
        # the drafter sees the length of the longest sample, not where each one ends
        slots.max_new.fill_(T)
        slots.temperature.fill_(self.temperature)
        slots.prompt_len[0] = len(self.prompt) - 1
        slots.group_key[0] = 1
        return slots

    def verdict(self, pool: Pool, slots: Slots) -> Verdict:
        """The verdict on `pool` that verification would have reached."""
        s = pool.slot.clamp(min=0).long()
        i = (slots.generated[s] + pool.depth).long()
        # a node is on its sample's path if its parent is, and its token is the recorded one
        recorded = self.token[s, (i - 1).clamp(min=0)]
        path = rooted(pool, (pool.depth == 0) | (pool.token == recorded))
        row = path.nonzero()[:, 0]
        accept_row = torch.full((slots.count, MAX_DEPTH + 1), -1, dtype=torch.int32)
        accept_row[s[row], pool.depth[row].long()] = row.int()
        left = self.length - slots.generated
        count = torch.minimum((accept_row >= 0).sum(1), left).clamp(min=0)
        accepted = torch.arange(MAX_DEPTH + 1) < count[:, None]
        drawn = torch.where(path, self.log_drawn[s, i], 0).float()
        return Verdict(
            sample=torch.where(path, self.token[s, i], -1),
            logprob=drawn,
            raw_logprob=drawn,
            top_token=torch.where(path[:, None], self.top_token[s, i], -1),
            top_prob=torch.where(path[:, None], self.top_prob[s, i], 0),
            accept_row=torch.where(accepted, accept_row, -1),
            accept_count=count.int(),
            finish=torch.where(slots.live & (count == left), LENGTH, RUNNING).int(),
            bad=torch.zeros(slots.count, dtype=torch.bool),
        )


def replay(
    trace: Trace,
    drafter: Any,
    samples: int,
    nodes: int,
    *,
    share: bool = False,
    share_rows: bool = False,
    progress_penalty: int = 0,
    coupled: bool = True,
    noise: Callable | None = None,
    seed: int = 0,
    history: Sequence[PastSample] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Replayed:
    """Advance `samples` samples in lockstep with `nodes` drafted tokens per live sample and step.

    drafter: a drafter as in an engine, without any text in it. share: True if the nodes of ended
    samples go to the others. share_rows: True if samples with equal text share roots and nodes,
    and walk the trees of all of them (`csd/kernels/texts`). progress_penalty: as in `Slots`.
    coupled: for a trace with `top`, drafts may use the noise that led to the recording, drawn with
    `seed`, or `noise` in its place. history: past samples of the prompt, if the drafter accepts
    them. clock: returns the time, for the drafter's seconds.
    """
    recording = Recording(trace, samples, seed)
    slots = recording.slots(drafter.context)
    if noise is None and recording.has_top:
        noise = recording.noise
    if noise is None or not coupled:
        # at temperature 0 a drafter uses no noise
        slots.temperature.fill_(0)
    slots.progress_penalty.fill_(progress_penalty)
    result = Replayed(
        problem=trace.problem, plain_steps=int(recording.length.max()), ends=[0] * slots.count
    )
    drafter.observe_prompt(1, trace.prompt, 0, len(trace.prompt), slots)
    if history:
        start = clock()
        for _ in drafter.enter_history(1, trace.prompt, history, slots):
            pass
        result.history_seconds = clock() - start
    while live := int(slots.live.sum()):
        budget = nodes * (slots.count if share else live)
        start = clock()
        pool = drafter.propose(slots, live + budget, noise)
        result.propose_seconds += clock() - start
        if share_rows:
            pool = spread_ref(merge_ref(pool, slots), pool, slots)
        verdict = recording.verdict(pool, slots)
        depth = torch.arange(1, MAX_DEPTH + 1)
        row = verdict.accept_row[:, 1:][depth < verdict.accept_count[:, None]].long()
        for source in pool.source[row].tolist():
            result.sources[source] += 1
        trees = pool.computed
        drafted = int((trees.depth > 0).sum())
        result.tokens += int(verdict.accept_count.sum())
        result.sample_steps += live
        result.steps += 1
        result.nodes += drafted
        result.rows.append((live, drafted))
        result.step_rows.append(int((trees.slot >= 0).sum()))
        for s in verdict.finish.nonzero()[:, 0].tolist():
            result.ends[s] = result.steps
        advance_slots_ref(slots, verdict)
        part_ref(slots, verdict)
        start = clock()
        drafter.insert(pool, slots, verdict)
        result.insert_seconds += clock() - start
    result.sources[0] = result.tokens - sum(result.sources[1:])
    return result
