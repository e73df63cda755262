"""State of the slots and groups: one device tensor a property, never a captured scalar.

A slot holds one sample in flight, a group one prompt. Slot s is live when `live[s]` is true; a
dead slot has no rows in the pool. Everything a kernel needs to know of a sample is here, so that
a replayed step sees refills and new limits without being captured again.
"""

from dataclasses import dataclass

import torch

MAX_STOP_IDS = 16


@dataclass(slots=True)
class Slots:
    """S slots, G groups, N tokens of context, T tokens at most a sample, V vocabulary."""

    # what the sample is
    live: torch.Tensor  # [S] bool
    group: torch.Tensor  # [S] int32, the group's index, -1 when the slot is free
    key: torch.Tensor  # [S] int64, Philox key of (seed, prompt)
    sample: torch.Tensor  # [S] int32, sample index
    # where it stands
    generated: torch.Tensor  # [S] int32, tokens generated; also tokens in the slot's KV cache
    context: torch.Tensor  # [S, N] int32, its last tokens, latest first, -1 before the start
    step: torch.Tensor  # [S] int32, steps the slot has made
    tokens: torch.Tensor  # [S, T] int32, what it has generated
    logprobs: torch.Tensor  # [S, T] float32 or float64, of the processed distribution
    raw_logprobs: torch.Tensor  # [S, T], of the model at temperature 1
    pace: torch.Tensor  # [S] int32, its head start a token (`csd.pool.head_starts`)
    # how it samples; float64 holds what the user wrote
    temperature: torch.Tensor  # [S] float64, 0 is greedy
    top_k: torch.Tensor  # [S] int32, 0 is off
    top_p: torch.Tensor  # [S] float64, 1 is off
    min_p: torch.Tensor  # [S] float64, 0 is off
    penalty: torch.Tensor  # [S] float64, repetition penalty, 1 is off
    seen: torch.Tensor  # [S, ceil(V / 32)] int32, bitmap of the tokens in prompt and sample
    # when it stops
    max_new: torch.Tensor  # [S] int32
    min_new: torch.Tensor  # [S] int32, end tokens cannot be sampled before
    stop_ids: torch.Tensor  # [S, MAX_STOP_IDS] int32, -1 is unused; these end the sample
    ban_ids: torch.Tensor  # [S, MAX_STOP_IDS] int32, what `min_new` keeps from being sampled
    # the groups
    prompt_len: torch.Tensor  # [G] int32, tokens in the group's prompt region: all but the last
    group_key: torch.Tensor  # [G] int64, never-reused id of the group in flight, -1 when free

    @classmethod
    def empty(
        cls,
        slots: int,
        vocab: int,
        max_new: int,
        context: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> "Slots":
        """All slots free. As many groups as slots: a group in flight has at least one."""
        s = slots

        def full(
            shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.int32
        ) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            live=full((s,), False, torch.bool),
            group=full((s,), -1),
            key=full((s,), 0, torch.int64),
            sample=full((s,), 0),
            generated=full((s,), 0),
            context=full((s, context), -1),
            step=full((s,), 0),
            tokens=full((s, max_new), -1),
            logprobs=full((s, max_new), 0, dtype),
            raw_logprobs=full((s, max_new), 0, dtype),
            pace=full((s,), 0),
            temperature=full((s,), 1, torch.float64),
            top_k=full((s,), 0),
            top_p=full((s,), 1, torch.float64),
            min_p=full((s,), 0, torch.float64),
            penalty=full((s,), 1, torch.float64),
            seen=full((s, (vocab + 31) // 32), 0),
            max_new=full((s,), 0),
            min_new=full((s,), 0),
            stop_ids=full((s, MAX_STOP_IDS), -1),
            ban_ids=full((s, MAX_STOP_IDS), -1),
            prompt_len=full((s,), 0),
            group_key=full((s,), -1, torch.int64),
        )

    @property
    def count(self) -> int:
        return self.live.shape[0]
