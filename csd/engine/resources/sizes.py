"""Memory of the caches, and the number of slots that fit into the memory available."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from csd.engine.requests.request import Request
from csd.state.kv_cache import PAGE, KVCache, layer_shapes, pages_for, pages_held
from csd.utils.device import as_size


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Cache sizes that a call needs."""

    slots: int  # samples in flight
    groups: int  # prompts in flight, each with its own pages
    slot_pages: int  # pages of a sample's tokens
    prompt_pages: int  # pages of the longest prompt
    # the most of these that are held at once
    slot_held: int
    prompt_held: int

    @classmethod
    def of(
        cls, requests: list[Request], max_slots: int, reach: int | None = None, chunk: int = 0
    ) -> "CacheSizes":
        """reach: most keys that a row attends to; chunk: prompt tokens read per pass."""
        slots = min(max_slots, sum(len(r.samples) for r in requests))
        slot_pages = pages_for(max(r.params.max_new_tokens for r in requests))
        prompt_pages = max(1, max(pages_for(len(r.prompt) - 1) for r in requests))
        return cls(
            slots=slots,
            groups=min(slots, len(requests)),
            slot_pages=slot_pages,
            prompt_pages=prompt_pages,
            slot_held=pages_held(slot_pages, reach),
            prompt_held=pages_held(prompt_pages, reach, chunk),
        )

    @property
    def pages(self) -> int:
        # each group in flight has at least one slot
        return self.slots * self.slot_held + min(self.slots, self.groups) * self.prompt_held


@dataclass(slots=True)
class ServedSizes:
    """Sizes of an `AsyncEngine`'s caches; the last two are set when these are allocated."""

    requested: int | None  # tokens of a prompt and a sample together; None: the model's context
    longest: int = 0  # the largest such number that is served
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes that allocated caches have room for, whichever call they were made for."""

    slots: int
    slot_pages: int
    prompt_pages: int
    pages: int  # in total, of all samples and prompts in flight
    rows: int  # rows of a step

    @classmethod
    def of(cls, cache: KVCache) -> "Room":
        slots, slot_pages = cache.slot_pages.shape
        prompt_pages = cache.prompt_pages.shape[1]
        return cls(slots, slot_pages, prompt_pages, cache.pages - cache.spare, cache.rows)

    @classmethod
    def least(cls, sizes: CacheSizes, rows: int) -> "Room":
        return cls(sizes.slots, sizes.slot_pages, sizes.prompt_pages, sizes.pages, rows)

    def with_room_for(self, other: "Room") -> "Room":
        return Room(*map(max, astuple(self), astuple(other)))

    @property
    def rounded_pages(self) -> int:
        """`pages`, rounded up to a power of two."""
        return _power_of_two(self.pages)

    def grown(
        self,
        before: "Room",
        max_slots: int,
        rows_of: Callable[[int, int], int],
        fits: Callable[["Room"], bool],
    ) -> "Room":
        """Returns sizes for this room and `before`, as far as they fit; else this room.

        First choice: sizes rounded up to powers of two, so that slowly growing calls seldom
        allocate. Second: the larger of each of the two sizes.

        rows_of: (slots, prompt pages) -> rows that a step and a chunk of such a prompt need.
        """
        both = self.with_room_for(before)
        slots = min(_power_of_two(both.slots), max(max_slots, both.slots))
        prompt_pages = _power_of_two(both.prompt_pages)
        rows = max(both.rows, rows_of(slots, prompt_pages))
        tables = _power_of_two(both.slot_pages), prompt_pages
        rounded = Room(slots, *tables, both.rounded_pages, rows)
        return next((room for room in (rounded, both) if fits(room)), self)

    def bytes(self, config: Any, dtype: torch.dtype, gathers: bool) -> int:
        """Bytes of the cache, of a step's rows, and of the slots' tokens and log-probabilities.

        gathers: as in `Demand.of`.
        """
        page, (state, state_row) = KVCache.bytes_per_page(config, dtype), _states(config, dtype)
        own = torch.int32.itemsize + 2 * max(torch.float32.itemsize, dtype.itemsize)
        step = self.rows * (page // PAGE + config.vocab * dtype.itemsize + state_row)
        if gathers:
            step += _gathered(self.pages * page, config, dtype)
        # states of the samples, and of up to as many prompts in flight
        states = 2 * self.slots * state
        return self.pages * page + step + states + self.slots * self.slot_pages * PAGE * own


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _states(config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the recurrent states of a sample or a prompt, and of a row of a step."""
    sizes = getattr(config, "states", None)
    return (sizes.slot_bytes(dtype), sizes.row_bytes(dtype)) if sizes else (0, 0)


def _gathered(cached: int, config: Any, dtype: torch.dtype) -> int:
    """Bytes of the largest layer's keys and values, in `dtype` and in at least float32.

    cached: bytes of the keys and values of all layers.
    """
    wide = max(torch.float32.itemsize, dtype.itemsize)
    numbers = [shape.numbers for shape in layer_shapes(config)]
    return cached * max(numbers) // sum(numbers) * (dtype.itemsize + wide) // dtype.itemsize


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that are needed in addition to the weights, for a number of samples in flight."""

    slots: int  # samples in flight
    new: int  # keys and values of their new tokens, reserved in full, and their states
    prompts: int  # keys and values of the prompts in flight, each stored once, and their states
    step: int  # rows of a step or a chunk, and their logits
    drafter: int = 0  # keys and values of a draft model

    @classmethod
    def of(
        cls, config: Any, dtype: torch.dtype, sizes: CacheSizes, rows: int, gathers: bool = False
    ) -> "Demand":
        """Returns the demand of a model for cache sizes and the rows of a step.

        gathers: whether attention copies a layer's keys and values, as the reference does: once in
        their dtype, and once as float32.
        """
        page, (state, state_row) = KVCache.bytes_per_page(config, dtype), _states(config, dtype)
        # each group in flight has at least one slot
        slots, groups = sizes.slots, min(sizes.slots, sizes.groups)
        step = rows * (page // PAGE + config.vocab * dtype.itemsize + state_row)
        if gathers:
            pages = slots * sizes.slot_pages + groups * sizes.prompt_pages
            step += _gathered(pages * page, config, dtype)
        new = slots * (sizes.slot_held * page + state)
        return cls(slots, new, groups * (sizes.prompt_held * page + state), step)

    @property
    def total(self) -> int:
        return self.new + self.prompts + self.step + self.drafter

    def check(self, room: int) -> None:
        """Raises MemoryError with the numbers if `room` bytes are too few."""
        if self.total > room:
            new, prompts, step, total, limit = map(
                as_size, (self.new, self.prompts, self.step, self.total, room)
            )
            step += " for a step"
            if self.drafter:
                step += f", {as_size(self.drafter)} for a draft model's"
            raise MemoryError(
                f"the samples in flight ({self.slots}) need {total} in addition to the weights "
                f"({new} for keys and values of new tokens, {prompts} for those of prompts, "
                f"{step}), but only {limit} may be used: lower max_new_tokens, shorten the prompt, "
                "lower the engine's prefill_chunk to 512, or raise its memory"
            )


def slots_that_fit(demand: Callable[[int], Demand], wanted: int, room: int) -> int:
    """Largest number of slots, at most `wanted`, whose demand fits into `room` bytes.

    Raises MemoryError with the numbers if not even one slot fits.
    """
    demand(1).check(room)
    # the demand grows with the slots
    return bisect_right(range(1, wanted + 1), room, key=lambda n: demand(n).total)


def graph_tokens(requests: list[Request], sizes: CacheSizes) -> int:
    """Most tokens in the graph: new ones of slots, prompts and past samples of groups in flight."""
    texts = sorted(len(r.prompt) + sum(map(len, r.history)) for r in requests)[-sizes.groups :]
    return sizes.slots * max(r.params.max_new_tokens for r in requests) + sum(texts)
