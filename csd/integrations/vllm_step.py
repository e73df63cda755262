"""Committed tokens of vLLM's batch, as slots, pool and verdict for a graph."""

import numpy as np
import torch

from csd.integrations.vllm_rows import Sample
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.slots import Slots
from csd.state.verdict import RUNNING, TOP, Verdict

# most tokens of a row per insertion
ENTERED = MAX_DEPTH + 1


def windows(sample: Sample, first: int, count: int, N: int) -> np.ndarray:
    """[count, N] int32: the N tokens before each of `count` places from `first` on, latest first.

    Entries before the text's start are -1.
    """
    text = sample.text[max(first - N, 0) : first + count - 1]
    text = np.pad(text, (N + count - 1 - text.size, 0), constant_values=-1)
    return np.lib.stride_tricks.sliding_window_view(text, N)[:, ::-1]


def committed(part: dict[int, Sample], at: int, slots: Slots) -> tuple[Pool, Verdict]:
    """Pool and verdict of a step that commits each row's new tokens from `at` on, at most ENTERED.

    The rows of the pool are the accepted ones; only the fields that a graph reads are filled in.
    """
    new = [s.new[at : at + ENTERED] for s in part.values()]
    N, M = slots.context.shape[1], sum(map(len, new))
    count = np.array([len(x) for x in new])
    slot, start = np.array(list(part)), count.cumsum() - count
    depth = np.arange(M) - start.repeat(count)
    pool = Pool.empty(M, slots.count, slots.group_key.shape[0], N)
    pool.slot.copy_(torch.from_numpy(slot.repeat(count)))
    pool.depth.copy_(torch.from_numpy(depth))
    pool.context.copy_(torch.from_numpy(np.concatenate([
        windows(s, s.length - len(s.new) + at, n, N)
        for s, n in zip(part.values(), count.tolist(), strict=True)
    ])))  # fmt: skip
    accept_row = torch.full((slots.count, ENTERED), -1, dtype=torch.int32)
    accept_row[pool.slot.long(), pool.depth.long()] = torch.arange(M, dtype=torch.int32)
    none = torch.zeros(M)
    return pool, Verdict(
        sample=torch.tensor([t for x in new for t in x], dtype=torch.int32),
        logprob=none,
        raw_logprob=none,
        top_token=torch.full((M, TOP), -1, dtype=torch.int32),
        top_prob=torch.zeros(M, TOP),
        accept_row=accept_row,
        accept_count=(accept_row >= 0).sum(1, dtype=torch.int32),
        finish=torch.full((slots.count,), RUNNING, dtype=torch.int32),
        bad=torch.zeros(slots.count, dtype=torch.bool),
    )


def empty_slots(rows: int, groups: int, context: int) -> Slots:
    """Make slots with temperature 0, since drafts cannot use vLLM's sampling noise."""
    slots = Slots.empty(rows, vocab=1, max_new=1, context=context)
    slots.temperature.fill_(0)
    slots.group_key = torch.full((groups,), -1)
    slots.prompt_len = torch.zeros(groups, dtype=torch.int32)
    return slots
