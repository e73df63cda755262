"""Trace-forced decoding: steps run completely, but commit the tokens of a trace.

It times a model's shape without its weights. Random weights would deviate from the recording after
one token, and no draft would be accepted. Therefore the model runs, its logits are sampled, and
then the sampled token of every row is replaced. With y the recorded tokens of the row's sample:

    a row is on the trace when it is a root, or its parent is on it and its token at depth d is
        y[generated + d - 1]
    sample = y[generated + d] on the trace, -1 off it
    top 8  = the recorded ones on the trace, none off it

A trace that csd recorded has its seed, so each slot has the noise of the recording, and drafts
couple to it as they did then: a request's key is that of the recorded prompt, without the tokens
put in front to lengthen it. All tensors here have fixed shapes and stay on the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from csd.engine.engine import Engine
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.evaluate.replay import Recording
from csd.kernels.common.noise import prompt_key
from csd.kernels.verify.reference import descend_ref
from csd.state.pool import MAX_DEPTH, Pool, rooted
from csd.state.slots import Slots
from csd.state.verdict import RUNNING, STOP, Verdict
from csd.traces.traces import Trace


def cut(trace: Trace, samples: int, tokens: int | None = None) -> Trace:
    """Returns a trace with its first `samples` samples, at most `tokens` tokens of each."""
    return replace(
        trace,
        samples=[sample[:tokens] for sample in trace.samples[:samples]],
        top=trace.top and [top[:tokens] for top in trace.top[:samples]],
        indices=trace.indices and trace.indices[:samples],
    )


class Forced:
    """A step's `verify` whose sampled tokens are replaced by those of `traces`.

    A slot is matched by its key and sample index. Slots without a match sample as usual.
    R samples over all traces, T recorded tokens of the longest.
    """

    def __init__(self, verify: Callable, traces: list[Trace], device: str | torch.device):
        self._verify = verify
        recordings = [(t, Recording(t, len(t.samples))) for t in traces]
        rows = [(_key(t), i) for t, _ in recordings for i in _indices(t)]
        if len(set(rows)) < len(rows):
            raise ValueError("traces must not hold a sample of a prompt and seed twice")
        longest = max(r.token.shape[1] for _, r in recordings)

        def stack(of: Callable, value: int) -> torch.Tensor:
            tables = []
            for _, recording in recordings:
                x = of(recording)
                shape = (x.shape[0], longest - x.shape[1], *x.shape[2:])
                tables.append(torch.cat([x, torch.full(shape, value, dtype=x.dtype)], 1))
            return torch.cat(tables).to(device)

        self._key, self._index = torch.tensor(rows).to(device).unbind(1)  # [R]
        self._length = torch.cat([r.length for _, r in recordings]).to(device)  # [R]
        self._token = stack(lambda r: r.token, -1)  # [R, T]
        self._top_token = stack(lambda r: r.top_token, -1)  # [R, T, 8]
        self._top_prob = stack(lambda r: r.top_prob, 0)
        self._logprob = stack(lambda r: r.log_drawn.float(), 0)  # [R, T]

    def __call__(
        self, logits: torch.Tensor, pool: Pool, slots: Slots, *args: Any, **kwargs: Any
    ) -> Verdict:
        verdict = self._verify(logits, pool, slots, *args, **kwargs)
        # [S, R]
        same = (slots.key[:, None] == self._key) & (slots.sample[:, None] == self._index)
        known, entry = same.any(1), same.int().argmax(1)
        live = pool.slot >= 0
        s = pool.slot.clamp(min=0).long()
        r, forced = entry[s], known[s] & live
        place = (slots.generated[s] + pool.depth).long().clamp(max=self._token.shape[1] - 1)
        recorded = self._token[r, (place - 1).clamp(min=0)]
        on = rooted(pool, (pool.depth == 0) | (pool.token == recorded)) & forced

        sample = torch.where(on, self._token[r, place], torch.where(forced, -1, verdict.sample))
        top_token = torch.where(on[:, None], self._top_token[r, place], -1)
        top_prob = torch.where(on[:, None], self._top_prob[r, place], 0)
        logprob = torch.where(on, self._logprob[r, place], 0).to(verdict.logprob.dtype)
        rows, count, finish = descend_ref(sample, pool, slots)
        left = (self._length[entry] - slots.generated).clamp(min=0)
        cut = known & (pool.slot_nodes > 0) & (count >= left)
        # if the slot's own rules end it at the same token, their reason is kept
        finish = torch.where(cut & (finish == RUNNING), STOP, finish)
        count = torch.where(known, torch.minimum(count, left), count)
        depth = torch.arange(MAX_DEPTH + 1, device=rows.device)

        verdict.sample.copy_(sample)
        verdict.logprob.copy_(torch.where(forced, logprob, verdict.logprob))
        verdict.raw_logprob.copy_(torch.where(forced, logprob, verdict.raw_logprob))
        verdict.top_token.copy_(torch.where(forced[:, None], top_token, verdict.top_token))
        verdict.top_prob.copy_(torch.where(forced[:, None], top_prob, verdict.top_prob))
        verdict.accept_row.copy_(torch.where(depth < count[:, None], rows, -1))
        verdict.accept_count.copy_(count)
        verdict.finish.copy_(finish)
        return verdict


@contextmanager
def forcing(engine: Engine, traces: list[Trace]) -> Iterator[None]:
    """Within the block, `engine` commits the samples of `traces` for `forced_requests`."""
    before = engine.ops
    forced = Forced(before.verify, traces, engine.device)
    engine.ops = replace(before, verify=forced, verify_all=forced)
    try:
        yield
    finally:
        engine.ops = before


def forced_requests(
    traces: list[Trace],
    *,
    samples: int | None = None,
    prompt_tokens: int = 0,
    max_new_tokens: int | None = None,
) -> list[Request]:
    """Make requests for `Engine.run`: one per trace, of its first `samples` samples.

    prompt_tokens: the least length of a prompt; shorter ones get random tokens in front, which
        drafts cannot use.
    max_new_tokens: the length of the longest sample when None; drafts do not reach beyond it.
    """
    requests = []
    for i, trace in enumerate(traces):
        indices = _indices(trace)
        samples_drawn = trace.samples[:samples]
        params = SamplingParams(
            temperature=trace.temperature,
            max_new_tokens=max_new_tokens or max(map(len, samples_drawn)),
            end_ids=trace.stop_ids,
        )
        generator = torch.Generator().manual_seed(i)
        missing = max(prompt_tokens - len(trace.prompt), 0)
        front = torch.randint(max(trace.prompt) + 1, (missing,), generator=generator).tolist()
        prompt, kept_indices = front + trace.prompt, indices[: len(samples_drawn)]
        requests.append(Request(i, prompt, params, kept_indices, _seed(trace), _key(trace)))
    return requests


def _seed(trace: Trace) -> int:
    if trace.seed is None:
        raise ValueError(f"trace {trace.problem!r} has no seed: csd's own recordings have one")
    return trace.seed


def _key(trace: Trace) -> int:
    return prompt_key(_seed(trace), trace.prompt)


def _indices(trace: Trace) -> range:
    first = trace.indices[0] if trace.indices else 0
    indices = range(first, first + len(trace.samples))
    if trace.indices and list(indices) != list(trace.indices):
        raise ValueError(f"indices of trace {trace.problem!r} must be consecutive")
    return indices
