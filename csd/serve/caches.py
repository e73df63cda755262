"""Caches whose sizes are fixed at the start: slots, longest text, and the pages that fit in memory.

A call of `generate` has pages for the longest samples of all its slots. An `AsyncEngine` has as
many pages as fit in memory, and a request waits until enough of them are free.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from csd.engine.resources.caches import Resources
from csd.engine.resources.sizes import Room
from csd.engine.rules.tables import changed_bytes
from csd.engine.step.step import Step
from csd.graph.drafter_registry import make_drafter
from csd.graph.prior import Prior
from csd.state.kv_cache import PAGE, pages_for
from csd.state.logit_rules import Asked
from csd.utils.device import free_bytes

# tokens per slot that the graph has room for; a fuller graph drops its oldest contexts
GRAPH_TOKENS = 1024

EVERY = Asked(functions=True, grammar=True, words=True)


class ServedRoom:
    """Sizes of the caches of an `AsyncEngine`.

    longest: requested number of tokens of a prompt and a sample together; None: the context.
    """

    def __init__(self, longest: int | None):
        self.asked = longest
        self.longest = 0  # the largest such number that is served
        self.pages = 0

    def step(
        self, engine: Resources, drafter: Any, nodes: int, priors: Sequence[Prior] = ()
    ) -> Step:
        """The engine's step; allocates caches if the current ones are too small.

        nodes: drafted nodes per step, if their number is given. priors: of the requests, of
            equal sizes.

        Raises MemoryError with the numbers if not even one page of a prompt and one of a sample
        fit.
        """
        if drafter != engine._drafter_name:
            engine._drafter_name = drafter
            engine._drop()
        config = engine.decoder.config
        contexts, parts = priors[0].config.capacity if priors else 0, max(len(priors), 1)
        context = min(config.context, self.asked or config.context)
        table, slots = pages_for(context), engine.max_slots
        rows = engine._rows(slots, nodes, context)
        tokens = slots * min(context, GRAPH_TOKENS)
        if engine._step is not None:
            have = Room.of(engine._step.cache)
            wanted = Room(slots, table, table, self.pages, rows)
            at_hand = self.pages and have == have.with_room_for(wanted)
            same = engine._step.cache.dtype == engine.dtype
            has = engine._drafter.prior_contexts, engine._drafter.prior_parts
            same = same and has == (contexts, parts)
            if at_hand and same and engine._drafter.suits(tokens, False):
                return engine._step
        # drop the old caches first: their memory counts as free below
        engine._drop()
        with torch.inference_mode(False):
            made = make_drafter(drafter, engine._ops, engine.device, tokens, False, contexts, parts)
        gathers = engine._ops.name == "reference"
        free = int(engine.memory * free_bytes(engine.device))

        # later requests may need any change of rows, each a different one
        changed = changed_bytes(EVERY, slots, rows, context, config.vocab, engine.dtype)

        # copies of the states of recurrent layers, which are not in pages
        states = engine._states_bytes
        units = int(engine.prefix_cache * free) // states if states else None

        def taken(pages: int) -> int:
            room = Room(slots, table, table, pages, rows)
            own = room.bytes(config, engine.dtype, gathers) + made.cache_bytes(pages)
            return own + changed + (units or 0) * states

        # at most the pages of a longest prompt and a longest sample per slot
        self.pages = bisect_right(range(1, 2 * slots * table + 1), free, key=taken)
        if self.pages < 2:
            raise MemoryError(
                f"{slots} slots need {taken(2)} bytes in addition to the weights for texts of "
                f"{PAGE} tokens, but only {free} may be used: lower max_slots, max_tokens or "
                "prefill_chunk, or raise memory"
            )
        # for any division into prompt and sample, which have separate pages
        self.longest = min(context, (self.pages - 1) * PAGE)
        with torch.inference_mode(False):
            # set first: `_allocate` chooses the class of the step by the drafter
            engine._drafter, engine._text = made, (tokens, False)
            step = engine._allocate(
                slots, table, table, self.pages, made.context, rows, units=units
            )
            made.attach(engine.decoder, step.cache)
        # set last: if the drafter does not fit the model, the next run allocates anew
        engine._step = step
        return step
