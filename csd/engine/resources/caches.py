"""Caches, slots and graphs of an engine, allocated for a call and reused by calls that fit.

A call of `generate` has pages for the longest samples of all its slots. An `AsyncEngine` has as
many pages as fit in memory, and a request waits until enough of them are free.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from csd.engine.call import RunSettings
from csd.engine.first_call.time_steps import (
    NOT_WORTH,
    compile_loops,
    load_step_times,
    refined,
    save_step_times,
    sizes_to_time,
    step_times_key,
    time_graphs,
    time_steps,
)
from csd.engine.requests.request import Request
from csd.engine.resources.sizes import (
    Demand,
    Room,
    ServedSizes,
    Sizes,
    graph_tokens,
    slots_that_fit,
)
from csd.engine.rules.changes import Changes
from csd.engine.rules.tables import asked_by, changed_bytes, count_sets
from csd.engine.step.budget import (
    AutoBudget,
    AutoPool,
    FixedBudget,
    FixedPool,
    StepTimeTable,
    nodes_of,
)
from csd.engine.step.static_step import StaticStep, sizes_for
from csd.engine.step.step import Step
from csd.graph.drafter import Drafter, StaticDrafter
from csd.graph.drafter_registry import make_drafter
from csd.graph.prior import Prior
from csd.kernels.ops import Ops
from csd.models.fused.decoder import DecoderLike
from csd.state.kv_cache import PAGE, KVCache, pages_for
from csd.state.logit_rules import Asked
from csd.state.slots import Slots
from csd.utils.device import free_bytes
from csd.utils.torch_state import plain_torch

# most pages for idle units: 262,144 tokens of prompts, more than the memory of all but tiny models
MOST_SPARE = 4096
# tokens per slot that a served graph has room for; a fuller graph drops its oldest contexts
GRAPH_TOKENS = 1024
# changes of rows that a served request may need
ANY_CHANGE = Asked(functions=True, grammar=True, words=True)


class Resources:
    """Caches, slots, drafter and step costs of an `Engine`, which sets the fields declared here."""

    decoder: DecoderLike
    device: torch.device
    dtype: torch.dtype
    max_slots: int
    memory: float
    prefill_chunk: int
    prefix_cache: float
    static: bool
    exact: bool
    _ops: Ops
    _drafter_name: Any  # the argument that the current drafter was made from
    _cost: StepTimeTable | None

    def _drop(self) -> None:
        self._step: Step | None = None
        # bytes of the current caches, as estimated before they were allocated
        self.demand: Demand | None = None
        self._limited: Room | None = None  # room that a call wanted but memory could not hold
        self._counted = 0  # bytes of its steps' changed rows
        self._text = 0, False  # tokens that the drafter was made for, and True if for a history
        self._drafter: Any = None
        self._dropped = 0  # dropped contexts at the last call
        self._changes: Changes | None = None  # rules of rows, whose tensors later calls reuse

    @property
    def captured(self) -> dict:
        """CUDA graphs of the steps, by pool size and operation; empty on a CPU."""
        return self._step.captures.graphs if isinstance(self._step, StaticStep) else {}

    @property
    def _unit(self) -> int | None:
        """Tokens of a unit of the prefix index; None if prompts share nothing.

        A unit's keys and values must follow from its text alone. Products and norms of an exact
        decoder do so row by row, and attention on a CPU page by page. Else a whole chunk is needed,
        and so it is for states, which are copied at its end.
        """
        if not self.prefix_cache:
            return None
        by_pages = self.exact and self.device.type == "cpu" and self.prefill_chunk % PAGE == 0
        if by_pages and not getattr(self.decoder.config, "states", None):
            return PAGE
        return math.lcm(self.prefill_chunk, PAGE)

    @property
    def _states_bytes(self) -> int:
        """Bytes of the states that a unit keeps; 0 for a model without recurrent layers."""
        states = getattr(self.decoder.config, "states", None)
        return states.slot_bytes(self.dtype) if states else 0

    def _spare_pages(self, free: int, drafter: Drafter) -> int:
        """Pages for idle units, of `free` bytes that a call leaves."""
        if self._unit is None:
            return 0
        page = KVCache.bytes_per_page(self.decoder.config, self.dtype) + drafter.cache_bytes(1)
        page += self._states_bytes * PAGE // self._unit
        return min(int(self.prefix_cache * max(free, 0)) // page, MOST_SPARE)

    def _budget(self, settings: RunSettings, step: Step) -> FixedBudget | FixedPool:
        sizes = None
        if isinstance(step, StaticStep) and not step.verifier:
            sizes = sizes_for(step.slots.count)
        nodes = settings.budget if settings.speculate else 0
        if isinstance(nodes, int):
            return FixedPool(nodes, sizes) if sizes else FixedBudget(nodes)
        if self._cost is None:
            self._cost = self._step_times(step)
        return AutoPool(self._cost, sizes) if sizes else AutoBudget(self._cost)

    def _prepare(
        self, requests: list[Request], drafter: Any, prior: Prior | None = None, nodes: int = 0
    ) -> Step:
        """Returns a step whose caches are large enough for `requests`; reuses the current if so.

        prior: n-grams that the drafts are to use. nodes: drafted nodes per step, if their number is
        given.
        """
        self._use_drafter(drafter)
        wanted = Sizes.of(requests, self.max_slots, self._reach, self.prefill_chunk)
        tokens = graph_tokens(requests, wanted)
        contexts = 0 if prior is None else prior.config.capacity
        history = any(r.history for r in requests)

        asked = asked_by(requests)
        sets = count_sets(requests) if asked is not None else 0

        def rows(slots: int, prompt_pages: int = wanted.prompt_pages) -> int:
            return self._rows(slots, nodes, prompt_pages * PAGE)

        def changed(rows: int) -> int:
            longest = (wanted.prompt_pages + wanted.slot_pages + 1) * PAGE
            vocab = self.decoder.config.vocab
            return changed_bytes(asked, sets, rows, longest, vocab, self.dtype)

        least = Room.least(wanted, rows(wanted.slots))
        before = idle = None
        if self._step is not None:
            before = Room.of(self._step.cache)
            fits = before == before.with_room_for(least) or least == self._limited
            fits = fits and self._drafter.suits(tokens, history)
            fits = fits and self._has_prior(contexts, 1)
            # changed rows are not part of the caches: this call may be the first that needs them
            more = changed(before.rows) - self._counted
            fits = fits and (more <= 0 or more <= self.memory * free_bytes(self.device))
            if fits and self._step.cache.dtype == self.dtype:
                return self._step
            # caches only grow: otherwise calls that alternate between two sizes would reallocate
            # them, and capture all graphs again, at every call
            tokens, history = max(tokens, self._text[0]), history or self._text[1]
            tokens = max(tokens, before.with_room_for(least).rounded_pages * PAGE)
            same = self._step.cache.dtype == self.dtype
            idle = self._step.cache.copy_idle(free_bytes(self.device) // 4) if same else None
            # drop the old caches first: their memory counts as free below
            self._drop()

        # tensors that later calls reuse must not be inference tensors of one caller
        with torch.inference_mode(False):
            made = make_drafter(
                self._drafter_name, self._ops, self.device, tokens, history, contexts
            )
        gathers = self._ops.name == "reference"

        def demand(slots: int) -> Demand:
            sizes = replace(wanted, slots=slots)
            own = Demand.of(
                self.decoder.config, self.dtype, **asdict(sizes), rows=rows(slots), gathers=gathers
            )
            step = own.step + changed(rows(slots))
            return replace(own, step=step, drafter=made.cache_bytes(sizes.pages))

        free = int(self.memory * free_bytes(self.device))
        slots = slots_that_fit(demand, wanted.slots, free)
        self.demand, room = demand(slots), Room.least(replace(wanted, slots=slots), rows(slots))
        limited = least if slots < wanted.slots else None
        if before is not None and limited is None:
            config, dtype = self.decoder.config, self.dtype
            room = room.grown(
                before,
                self.max_slots,
                rows,
                lambda room: (
                    room.bytes(config, dtype, gathers)
                    + made.cache_bytes(room.pages)
                    + changed(room.rows)
                    <= free
                ),
            )
        self._counted = changed(room.rows)
        with torch.inference_mode(False):
            self._drafter, self._text, self._limited = made, (tokens, history), limited
            tables = room.slot_pages, room.prompt_pages
            used = room.bytes(self.decoder.config, self.dtype, gathers)
            used += made.cache_bytes(room.pages) + changed(room.rows)
            spare = self._spare_pages(free - used, made)
            units = spare * PAGE // self._unit if self._unit and self._states_bytes else None
            pages = room.pages + spare
            step = self._allocate(
                room.slots, *tables, pages, made.context, room.rows, spare=spare, units=units
            )
            if idle is not None:
                step.cache.paste_idle(idle)
            made.attach(self.decoder, step.cache)
        if isinstance(step, StaticStep) and isinstance(made, StaticDrafter):
            from csd.engine.first_call.compile_kernels import compile_kernels

            compile_kernels(replace(step, drafter=made), self.exact)
        # set last: if the drafter does not fit the model, the next call allocates anew
        self._step = step
        return step

    def prepare_served(
        self, sizes: ServedSizes, drafter: Any, nodes: int, priors: Sequence[Prior] = ()
    ) -> Step:
        """Returns a step for requests that arrive; allocates caches if the current are too small.

        nodes: drafted nodes per step, if their number is given. priors: of the requests, of
            equal sizes.

        Raises MemoryError with the numbers if not even one page of a prompt and one of a sample
        fit.
        """
        self._use_drafter(drafter)
        config = self.decoder.config
        contexts, parts = priors[0].config.capacity if priors else 0, max(len(priors), 1)
        context = min(config.context, sizes.requested or config.context)
        table, slots = pages_for(context), self.max_slots
        rows = self._rows(slots, nodes, context)
        tokens = slots * min(context, GRAPH_TOKENS)
        if self._step is not None:
            before = Room.of(self._step.cache)
            wanted = Room(slots, table, table, sizes.pages, rows)
            fits = sizes.pages and before == before.with_room_for(wanted)
            fits = (
                fits and self._step.cache.dtype == self.dtype and self._has_prior(contexts, parts)
            )
            if fits and self._drafter.suits(tokens, False):
                return self._step
        # drop the old caches first: their memory counts as free below
        self._drop()
        with torch.inference_mode(False):
            made = make_drafter(drafter, self._ops, self.device, tokens, False, contexts, parts)
        gathers = self._ops.name == "reference"
        free = int(self.memory * free_bytes(self.device))

        # later requests may need any change of rows, each a different one
        changed = changed_bytes(ANY_CHANGE, slots, rows, context, config.vocab, self.dtype)

        # copies of the states of recurrent layers, which are not in pages
        states = self._states_bytes
        units = int(self.prefix_cache * free) // states if states else None

        def needed(pages: int) -> int:
            room = Room(slots, table, table, pages, rows)
            own = room.bytes(config, self.dtype, gathers) + made.cache_bytes(pages)
            return own + changed + (units or 0) * states

        # at most the pages of a longest prompt and a longest sample per slot
        sizes.pages = bisect_right(range(1, 2 * slots * table + 1), free, key=needed)
        if sizes.pages < 2:
            raise MemoryError(
                f"{slots} slots need {needed(2)} bytes in addition to the weights for texts of "
                f"{PAGE} tokens, but only {free} may be used: lower max_slots, max_tokens or "
                "prefill_chunk, or raise memory"
            )
        # for any division into prompt and sample, which have separate pages
        sizes.longest = min(context, (sizes.pages - 1) * PAGE)
        with torch.inference_mode(False):
            # set first: `_allocate` chooses the class of the step by the drafter
            self._drafter, self._text = made, (tokens, False)
            step = self._allocate(slots, table, table, sizes.pages, made.context, rows, units=units)
            made.attach(self.decoder, step.cache)
        # set last: if the drafter does not fit the model, the next run allocates anew
        self._step = step
        return step

    def _use_drafter(self, drafter: Any) -> None:
        """Drop the caches if the drafter differs from the current one."""
        if drafter != self._drafter_name:
            self._drafter_name = drafter
            self._drop()

    def _has_prior(self, contexts: int, parts: int) -> bool:
        """True if the drafter has room for priors of these sizes."""
        return (self._drafter.prior_contexts, self._drafter.prior_parts) == (contexts, parts)

    def _fit_history(self, requests: list[Request]) -> None:
        """Drop the oldest past samples that do not fit in the graph; counts them in the stats."""
        with_history = [request for request in requests if request.history]
        groups = min(len(requests), self.max_slots)
        if with_history and self._drafter.max_history((), groups) is None:
            raise ValueError(
                f"history needs drafter='consensus', got drafter={self._drafter_name!r}"
            )
        for request in with_history:
            count = self._drafter.max_history(request.history, groups)
            left = request.history[count:]
            request.history = request.history[:count]
            request.stats.history_tokens = sum(map(len, request.history))
            request.stats.history_left_out = sum(map(len, left))

    @property
    def _reach(self) -> int | None:
        """Largest number of keys that a row of any layer sees, which limits pages; None: no limit.

        None with a drafter that has its own keys and values: it may use the same page tables and
        see the whole text.
        """
        if not isinstance(self._drafter_name, str):
            return None
        return getattr(self.decoder.config, "reach", None)

    def _rows(self, slots: int, nodes: int = 0, prompt: int = 0) -> int:
        """Largest number of rows of a pool, with at most `nodes` drafted nodes if given, or of a
        chunk of a prompt of at most `prompt` tokens."""
        pool = slots + max(512, nodes_of(slots, nodes))
        return max(min(self.prefill_chunk, prompt), pool, sizes_for(slots)[-1])

    def _allocate(
        self,
        slots: int,
        slot_pages: int,
        prompt_pages: int,
        pages: int,
        context: int,
        rows: int | None = None,
        *,
        spare: int = 0,
        units: int | None = None,
    ) -> Step:
        """Allocate a step without a drafter; slots keep `context` tokens, pools have `rows`.

        spare: of the pages, those that samples and prompts in flight do not need. units: most units
        of the prefix index; None: as many as there are pages.
        """
        cache = KVCache(
            self.decoder.config,
            slots=slots,
            pages=pages,
            prompt_pages=prompt_pages,
            slot_pages=slot_pages,
            rows=self._rows(slots) if rows is None else rows,
            dtype=self.dtype,
            device=self.device,
            reach=self._reach,
            unit=self._unit,
            units=units,
            spare=spare,
        )
        state = Slots.empty(
            slots,
            self.decoder.config.vocab,
            slot_pages * PAGE,
            context,
            torch.promote_types(self.dtype, torch.float32),
            self.device,
        )
        static = self.static and isinstance(self._drafter, StaticDrafter)
        kind = StaticStep if static else Step
        return kind(self.decoder, None, cache, state, self._ops)

    @plain_torch()
    def measure_steps(self, worth: float = NOT_WORTH, repeats: int = 3) -> StepTimeTable:
        """Seconds of forward and verify for a few pool sizes, measured on empty slots.

        worth: on a CPU, sizes after the first that takes `worth` times the smallest are left out.
        repeats: most timings of each size.
        """
        static = self.static and self.device.type == "cuda"
        sizes = sizes_to_time(self.max_slots, static)
        with torch.inference_mode(False):
            step = self._allocate(sizes[-1], 1, 1, 1, 1)
        return time_steps(step, sizes, worth, repeats)

    @plain_torch()
    def step_times(self) -> StepTimeTable:
        """Seconds of steps without drafts by their rows, from the cache or measured and cached."""
        if self._cost is None:
            sizes = sizes_to_time(self.max_slots, False)
            with torch.inference_mode(False):
                step = self._allocate(sizes[-1], 1, 1, 1, 1)
            self._cost = self._step_times(step)
        return self._cost

    def _step_times(self, step: Step) -> StepTimeTable:
        """Cached step times; if there are none, measures and caches them.

        step: the call's step; if it has CUDA graphs, these are measured instead and not cached.
        """
        if isinstance(step, StaticStep) and self.device.type == "cuda":
            return time_graphs(step, sizes_for(step.slots.count))
        sizes = sizes_to_time(self.max_slots, False)
        key = step_times_key(self.decoder, self.dtype, self._ops.name, sizes)
        table = load_step_times(key) if key else None
        if table is None or not table.settled:
            table = refined(table, self.measure_steps(repeats=1)) if table else self.measure_steps()
            if key:
                save_step_times(key, table)
            return table
        with torch.inference_mode(False):
            compile_loops(self._allocate(sizes[-1], 1, 1, 1, 1), sizes)
        return table

    def _newly_dropped(self, requests: list[Request]) -> int:
        """Number of contexts that did not fit in the graph since the previous call of this method.

        On a GPU 0 unless the call has a history: reading the count makes the host wait.
        """
        before = self._dropped
        dropped = None if self._drafter is None else self._drafter.dropped
        waits = self.device.type != "cpu" and not any(r.history for r in requests)
        if dropped is None or waits:
            return 0
        self._dropped = int(dropped)
        return self._dropped - before
