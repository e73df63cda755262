"""Caches, slots and drafter of an engine, allocated for a call and reused by calls that fit.

A call of `generate` has pages for the longest samples of all its slots. An `AsyncEngine` has as
many pages as fit in memory, and a request waits until enough of them are free.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from csd.engine.requests.request import Request
from csd.engine.resources.model import EngineModel
from csd.engine.resources.sizes import (
    CacheSizes,
    Demand,
    Room,
    ServedSizes,
    graph_tokens,
    slots_that_fit,
)
from csd.engine.resources.weights import logits_digest
from csd.engine.rules.changes import Changes
from csd.engine.rules.tables import asked_by, changed_bytes, count_sets
from csd.engine.step.budget import nodes_of
from csd.engine.step.static_step import StaticStep, sizes_for
from csd.engine.step.step import Step
from csd.graph.drafter import Drafter, StaticDrafter
from csd.graph.prior import Prior
from csd.graph.registry import make_drafter
from csd.state.kv_cache import PAGE, KVCache, pages_for
from csd.state.logit_rules import RuleKinds
from csd.state.slots import Slots
from csd.utils.device import free_bytes

# most pages for idle units: 262,144 tokens of prompts, more than the memory of all but tiny models
MAX_SPARE = 4096
# tokens per slot that a served graph has room for; a fuller graph drops its oldest contexts
GRAPH_TOKENS = 1024
# changes of rows that a served request may need
ANY_CHANGE = RuleKinds(functions=True, grammar=True, words=True)


class Caches:
    """The memory of an engine: `step` over caches and slots, and the drafter of its calls.

    max_slots, memory, prefill_chunk, prefix_cache, share_rows: as in `csd.Engine`.
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        max_slots: int,
        memory: float,
        prefill_chunk: int,
        prefix_cache: float,
        share_rows: bool,
    ):
        self._model = model
        self.max_slots, self.memory = max_slots, memory
        self.prefill_chunk, self.prefix_cache = prefill_chunk, prefix_cache
        self.share_rows = share_rows
        self._drafter_name: Any = None  # the argument that `drafter` was made from
        self.drop()

    def drop(self) -> None:
        """Free the caches; the next call allocates anew."""
        # without a call's settings; None before the first call
        self.step: Step | None = None
        self.drafter: Any = None  # of the calls that use `step`
        # bytes of the current caches, as estimated before they were allocated
        self.demand: Demand | None = None
        self.changes: Changes | None = None  # rules of rows, whose tensors later calls reuse
        self._limited: Room | None = None  # room that a call wanted but memory could not hold
        self._counted = 0  # bytes of the changed rows of its steps
        self._text = 0, False  # tokens that the drafter was made for, and True if for a history
        self._dropped = 0  # dropped contexts at the last call

    def prepare(
        self, requests: list[Request], drafter: Any, prior: Prior | None = None, nodes: int = 0
    ) -> Step:
        """Returns a step whose caches are large enough for `requests`; reuses the current if so.

        drafter: the argument of `csd.generate`. prior: n-grams that the drafts are to use. nodes:
        drafted nodes per step, if their number is given.
        """
        self._use_drafter(drafter)
        model = self._model
        config, dtype = model.decoder.config, model.dtype
        wanted = CacheSizes.of(requests, self.max_slots, self._reach, self.prefill_chunk)
        tokens = graph_tokens(requests, wanted)
        contexts = 0 if prior is None else prior.config.capacity
        history = any(r.history for r in requests)
        asked = asked_by(requests)
        sets = count_sets(requests) if asked is not None else 0

        def rows(slots: int, prompt_pages: int = wanted.prompt_pages) -> int:
            return self.rows(slots, nodes, prompt_pages * PAGE)

        def changed(rows: int) -> int:
            longest = (wanted.prompt_pages + wanted.slot_pages + 1) * PAGE
            return changed_bytes(asked, sets, rows, longest, config.vocab, dtype)

        least = Room.least(wanted, rows(wanted.slots))
        before = idle = None
        if self.step is not None:
            before = Room.of(self.step.cache)
            fits = before == before.with_room_for(least) or least == self._limited
            # changed rows are not part of the caches: this call may be the first that needs them
            more = changed(before.rows) - self._counted
            fits = fits and (more <= 0 or more <= self.memory * free_bytes(model.device))
            if fits and self._suits(tokens, history, contexts, 1):
                return self.step
            # caches only grow: otherwise calls that alternate between two sizes would reallocate
            # them, and capture all graphs again, at every call
            tokens, history = max(tokens, self._text[0]), history or self._text[1]
            tokens = max(tokens, before.with_room_for(least).rounded_pages * PAGE)
            same = self.step.cache.dtype == dtype
            idle = self.step.cache.copy_idle(free_bytes(model.device) // 4) if same else None
            # drop the old caches first: their memory counts as free below
            self.drop()

        made = self._make_drafter(tokens, history, contexts)

        def demand(slots: int) -> Demand:
            sizes = replace(wanted, slots=slots)
            own = Demand.of(config, dtype, sizes, rows(slots), model.ops.gathers)
            step = own.step + changed(rows(slots))
            return replace(own, step=step, drafter=made.cache_bytes(sizes.pages))

        def needed(room: Room) -> int:
            own = room.bytes(config, dtype, model.ops.gathers)
            return own + made.cache_bytes(room.pages) + changed(room.rows)

        free = int(self.memory * free_bytes(model.device))
        slots = slots_that_fit(demand, wanted.slots, free)
        self.demand, room = demand(slots), Room.least(replace(wanted, slots=slots), rows(slots))
        self._limited = least if slots < wanted.slots else None
        if before is not None and self._limited is None:
            room = room.grown(before, self.max_slots, rows, lambda room: needed(room) <= free)
        self._counted = changed(room.rows)
        spare = self._spare_pages(free - needed(room), made)
        units = spare * PAGE // self.unit if self.unit and self._states_bytes else None
        room = replace(room, pages=room.pages + spare)
        return self._install(room, made, (tokens, history), spare=spare, units=units, idle=idle)

    def most_slots(self, requests: list[Request]) -> int:
        """Estimate of the slots, at most `max_slots`, that `prepare` would fit into the memory.

        Without the bytes of a draft model and of changed rows.
        """
        model = self._model
        wanted = CacheSizes.of(requests, self.max_slots, self._reach, self.prefill_chunk)

        def demand(slots: int) -> Demand:
            sizes, rows = replace(wanted, slots=slots), self.rows(slots)
            return Demand.of(model.decoder.config, model.dtype, sizes, rows, model.ops.gathers)

        free = int(self.memory * free_bytes(model.device))
        return slots_that_fit(demand, wanted.slots, free)

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
        config, dtype = self._model.decoder.config, self._model.dtype
        contexts, parts = priors[0].config.capacity if priors else 0, max(len(priors), 1)
        context = min(config.context, sizes.requested or config.context)
        table, slots = pages_for(context), self.max_slots
        rows = self.rows(slots, nodes, context)
        tokens = slots * min(context, GRAPH_TOKENS)
        if self.step is not None:
            before = Room.of(self.step.cache)
            fits = sizes.pages and before == before.with_room_for(
                Room(slots, table, table, sizes.pages, rows)
            )
            if fits and self._suits(tokens, False, contexts, parts):
                return self.step
        # drop the old caches first: their memory counts as free below
        self.drop()
        made = self._make_drafter(tokens, False, contexts, parts)
        free = int(self.memory * free_bytes(self._model.device))
        # later requests may need any change of rows, each a different one
        changed = changed_bytes(ANY_CHANGE, slots, rows, context, config.vocab, dtype)

        def needed(pages: int, units: int = 0) -> int:
            room = Room(slots, table, table, pages, rows)
            own = room.bytes(config, dtype, self._model.ops.gathers) + made.cache_bytes(pages)
            return own + changed + units * states

        # copies of the states of recurrent layers are not in pages: they leave room for a longest
        # text
        states = self._states_bytes
        left = max(free - needed(table + 1), 0)
        units = min(int(self.prefix_cache * free), left) // states if states else None
        # at most the pages of a longest prompt and a longest sample per slot
        sizes.pages = bisect_right(
            range(1, 2 * slots * table + 1), free, key=lambda n: needed(n, units or 0)
        )
        if sizes.pages < 2:
            raise MemoryError(
                f"{slots} slots need {needed(2)} bytes in addition to the weights for texts of "
                f"{PAGE} tokens, but only {free} may be used: lower max_slots, max_tokens or "
                "prefill_chunk, or raise memory"
            )
        # for any division into prompt and sample, which have separate pages
        sizes.longest = min(context, (sizes.pages - 1) * PAGE)
        room = Room(slots, table, table, sizes.pages, rows)
        return self._install(room, made, (tokens, False), units=units)

    def _use_drafter(self, drafter: Any) -> None:
        """Drop the caches if the drafter differs from the current one."""
        if drafter != self._drafter_name:
            self._drafter_name = drafter
            self.drop()

    def _make_drafter(self, tokens: int, history: bool, contexts: int, parts: int = 1) -> Any:
        ops, device = self._model.ops, self._model.device
        # tensors that later calls reuse must not be inference tensors of one caller
        with torch.inference_mode(False):
            return make_drafter(self._drafter_name, ops, device, tokens, history, contexts, parts)

    def _suits(self, tokens: int, history: bool, contexts: int, parts: int) -> bool:
        """True if the drafter has room for so many tokens and for priors of these sizes, and the
        caches have the model's dtype."""
        assert self.step is not None
        priors = self.drafter.prior_contexts, self.drafter.prior_parts
        same = priors == (contexts, parts) and self.step.cache.dtype == self._model.dtype
        return same and self.drafter.suits(tokens, history)

    def _install(
        self,
        room: Room,
        drafter: Any,
        text: tuple[int, bool],
        *,
        spare: int = 0,
        units: int | None = None,
        idle: Any = None,
    ) -> Step:
        """Allocate a step for `room` and attach the drafter; idle: units of the caches before."""
        with torch.inference_mode(False):
            # set first: `allocate` chooses the class of the step by the drafter
            self.drafter, self._text = drafter, text
            step = self.allocate(room, drafter.context, spare=spare, units=units)
            if idle is not None:
                step.cache.paste_idle(idle)
            drafter.attach(self._model.decoder, step.cache)
        if isinstance(step, StaticStep):
            from csd.engine.first_call.compile_kernels import compile_kernels

            compile_kernels(replace(step, drafter=drafter), self._model.exact)
        # set last: if the drafter does not fit the model, the next call allocates anew
        self.step = step
        return step

    def allocate(
        self, room: Room, context: int, *, spare: int = 0, units: int | None = None
    ) -> Step:
        """Allocate a step without a drafter; slots keep `context` tokens.

        spare: of the pages, those that samples and prompts in flight do not need. units: most units
        of the prefix index; None: as many as there are pages.
        """
        model, config = self._model, self._model.decoder.config
        cache = KVCache(
            config,
            slots=room.slots,
            pages=room.pages,
            prompt_pages=room.prompt_pages,
            slot_pages=room.slot_pages,
            rows=room.rows,
            dtype=model.dtype,
            device=model.device,
            reach=self._reach,
            unit=self.unit,
            units=units,
            spare=spare,
        )
        slots = Slots.empty(
            room.slots,
            config.vocab,
            room.slot_pages * PAGE,
            context,
            torch.promote_types(model.dtype, torch.float32),
            model.device,
        )
        static = model.static and isinstance(self.drafter, StaticDrafter)
        kind = StaticStep if static else Step
        return kind(model.decoder, None, cache, slots, model.ops, share_rows=self.share_rows)

    def small_step(self, slots: int) -> Step:
        """Allocate a step of `slots` empty slots over one page, to time steps and hash logits."""
        with torch.inference_mode(False):
            return self.allocate(Room(slots, 1, 1, 1, self.rows(slots)), 1)

    def fingerprint(self) -> str:
        """A digest of logits (`logits_digest`), the dtype, and "exact" or "rounding".

        Equal fingerprints mean equal weights, dtype and arithmetic, whatever file the weights came
        from. Called while no call runs.
        """
        kind = "exact" if self._model.exact else "rounding"
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"csd-{logits_digest(self.small_step(1))}-{dtype}-{kind}"

    @property
    def _reach(self) -> int | None:
        """Largest number of keys that a row of any layer sees, which limits pages; None: no limit.

        None with a drafter that has its own keys and values: it may use the same page tables and
        see the whole text.
        """
        if not isinstance(self._drafter_name, str):
            return None
        return getattr(self._model.decoder.config, "reach", None)

    def rows(self, slots: int, nodes: int = 0, prompt: int = 0) -> int:
        """Largest number of rows of a pool, with at most `nodes` drafted nodes if given, or of a
        chunk of a prompt of at most `prompt` tokens."""
        pool = slots + max(512, nodes_of(slots, nodes))
        return max(min(self.prefill_chunk, prompt), pool, sizes_for(slots)[-1])

    @property
    def unit(self) -> int | None:
        """Tokens of a unit of the prefix index; None if prompts share nothing.

        A unit's keys and values must follow from its text alone. Products and norms of an exact
        decoder do so row by row, and attention on a CPU page by page. Else a whole chunk is needed,
        and so it is for states, which are copied at its end.
        """
        if not self.prefix_cache:
            return None
        by_pages = self._model.exact and self._model.device.type == "cpu"
        if by_pages and not self._states_bytes:
            return PAGE
        return math.lcm(self.prefill_chunk, PAGE)

    @property
    def _states_bytes(self) -> int:
        """Bytes of the states that a unit keeps; 0 for a model without recurrent layers."""
        states = getattr(self._model.decoder.config, "states", None)
        return states.slot_bytes(self._model.dtype) if states else 0

    def _spare_pages(self, free: int, drafter: Drafter) -> int:
        """Pages for idle units, of `free` bytes that a call leaves."""
        if self.unit is None:
            return 0
        page = KVCache.bytes_per_page(self._model.decoder.config, self._model.dtype)
        page += drafter.cache_bytes(1) + self._states_bytes * PAGE // self.unit
        return min(int(self.prefix_cache * max(free, 0)) // page, MAX_SPARE)

    def forget_stale_units(self, cache: KVCache) -> None:
        """Drop the units of prompts that another model, or one with other values, has read."""
        index = cache.allocator.index
        if index is None:
            return
        key = self._model.key, self.prefill_chunk, torch.get_num_threads()
        if key != index.key:
            cache.allocator.forget_all()
            index.key = key

    def fit_history(self, requests: list[Request]) -> None:
        """Drop the oldest past samples that do not fit in the graph; counts them in the stats."""
        with_history = [request for request in requests if request.history]
        groups = min(len(requests), self.max_slots)
        if with_history and self.drafter.max_history((), groups) is None:
            raise ValueError(
                f"history needs drafter='consensus', got drafter={self._drafter_name!r}"
            )
        for request in with_history:
            request.cut_history(self.drafter.max_history(request.history, groups))

    def newly_dropped(self, requests: list[Request]) -> int:
        """Number of contexts that did not fit in the graph since the previous call of this method.

        On a GPU 0 unless the call has a history: reading the count makes the host wait.
        """
        before = self._dropped
        dropped = None if self.drafter is None else self.drafter.dropped
        waits = self._model.device.type != "cpu" and not any(r.history for r in requests)
        if dropped is None or waits:
            return 0
        self._dropped = int(dropped)
        return self._dropped - before
