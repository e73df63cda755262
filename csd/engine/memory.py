"""How much memory the caches may take, and how many slots fit into it."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from csd.engine.requests import Request
from csd.state.kv_cache import PAGE, KVCache, pages_for


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the caches of a call must hold."""

    slots: int  # samples in flight
    groups: int  # prompts in flight, each with pages of its own
    slot_pages: int  # of a sample's tokens
    prompt_pages: int  # of the longest prompt

    @classmethod
    def of(cls, requests: list[Request], max_slots: int) -> "Sizes":
        slots = min(max_slots, sum(len(r.samples) for r in requests))
        return cls(
            slots=slots,
            groups=min(slots, len(requests)),
            slot_pages=pages_for(max(r.params.max_new_tokens for r in requests)),
            prompt_pages=max(1, max(pages_for(len(r.prompt) - 1) for r in requests)),
        )

    @property
    def pages(self) -> int:
        # each group in flight has at least one slot
        return self.slots * self.slot_pages + min(self.slots, self.groups) * self.prompt_pages

    def fit(self, cache: KVCache, rows: int) -> bool:
        """Whether the cache of an earlier call is large enough, with steps of so many rows."""
        return (
            cache.node_k.shape[1] >= rows
            and cache.slot_pages.shape[0] >= self.slots
            and cache.slot_pages.shape[1] >= self.slot_pages
            and cache.prompt_pages.shape[1] >= self.prompt_pages
            and len(cache.allocator) >= self.pages
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that caches take beside the weights, with some samples in flight at once."""

    slots: int  # samples in flight
    new: int  # keys and values of their tokens, reserved whole
    prompts: int  # of the prompts in flight, each stored once
    step: int  # of the rows of a step or a chunk, and their logits
    drafter: int = 0  # keys and values of a draft model

    @classmethod
    def of(
        cls,
        config: Any,
        dtype: torch.dtype,
        *,
        slots: int,
        groups: int,
        slot_pages: int,
        prompt_pages: int,
        rows: int,
        gathers: bool = False,
    ) -> "Demand":
        """slot_pages, prompt_pages: of a sample's tokens and of a prompt; rows: of a step.

        gathers: whether attention copies a layer's keys and values, as the batched one does: once
        as they are, and once as float32.
        """
        page = KVCache.bytes_per_page(config, dtype)
        new = slots * slot_pages * page
        # each group in flight has at least one slot
        prompts = min(slots, groups) * prompt_pages * page
        step = rows * (page // PAGE + config.vocab * dtype.itemsize)
        if gathers:
            wide = max(torch.float32.itemsize, dtype.itemsize)
            step += (new + prompts) // config.layers * (dtype.itemsize + wide) // dtype.itemsize
        return cls(slots, new, prompts, step)

    @property
    def total(self) -> int:
        return self.new + self.prompts + self.step + self.drafter

    def check(self, room: int) -> None:
        """Raises MemoryError with the numbers when `room` bytes are too few."""
        if self.total > room:
            new, prompts, step, total, most = map(
                _size, (self.new, self.prompts, self.step, self.total, room)
            )
            step += " for a step"
            if self.drafter:
                step += f", {_size(self.drafter)} for a draft model's"
            raise MemoryError(
                f"{self.slots} at once need {total} beside the weights ({new} for keys and values "
                f"of new tokens, {prompts} for those of prompts, {step}), {most} may be "
                "taken: lower max_new_tokens, shorten the prompt, lower budget or the engine's "
                "prefill_chunk, or raise its memory"
            )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def slots_that_fit(demand: Callable[[int], Demand], wanted: int, room: int) -> int:
    """The most slots, at most `wanted`, whose demand fits into `room` bytes.

    Raises MemoryError with the numbers when not even one slot fits.
    """
    demand(1).check(room)
    # it grows with the slots
    return bisect_right(range(1, wanted + 1), room, key=lambda n: demand(n).total)
