"""Caches whose sizes are fixed at the start: slots, the longest text, and pages of what memory has.

A call of `generate` has pages for all of its slots' longest samples. A service does not: its pages
are as many as fit, and a request waits until there are some for it.
"""

from bisect import bisect_right
from typing import Any

import torch

from csd.engine.memory import Room
from csd.engine.resources import Resources
from csd.engine.rules import changed_bytes
from csd.engine.step import Step
from csd.graph.registry import make_drafter
from csd.state.device import free_bytes
from csd.state.kv_cache import PAGE, pages_for
from csd.state.rules import Asked

# tokens of a slot for which the graph has room; a fuller one drops its oldest contexts
GRAPH_TOKENS = 1024

EVERY = Asked(functions=True, grammar=True, words=True)


class ServedRoom:
    """longest: tokens of a prompt with its new ones that are asked for; None: the context."""

    def __init__(self, longest: int | None):
        self.asked = longest
        self.longest = 0  # that are served
        self.pages = 0

    def step(self, engine: Resources, drafter: Any, nodes: int) -> Step:
        """The engine's step; its caches are made where those at hand are smaller.

        nodes: that a step drafts where their number is given. Raises MemoryError with the numbers
        where not even a page of a prompt and one of a sample fit.
        """
        if drafter != engine._drafter_name:
            engine._drafter_name = drafter
            engine._drop()
        config = engine.decoder.config
        context = min(config.context, self.asked or config.context)
        table, slots = pages_for(context), engine.max_slots
        rows = engine._rows(slots, nodes, context)
        tokens = slots * min(context, GRAPH_TOKENS)
        if engine._step is not None:
            have = Room.of(engine._step.cache)
            wanted = Room(slots, table, table, self.pages, rows)
            at_hand = self.pages and have == have.with_room_for(wanted)
            same = engine._step.cache.dtype == engine.dtype
            if at_hand and same and engine._drafter.suits(tokens, False):
                return engine._step
        # its memory counts as free below
        engine._drop()
        with torch.inference_mode(False):
            made = make_drafter(drafter, engine._ops, engine.device, tokens, False)
        gathers = engine._ops.name == "reference"
        free = int(engine.memory * free_bytes(engine.device))

        # requests to come may ask for any change of rows, each for another
        changed = changed_bytes(EVERY, slots, rows, context, config.vocab, engine.dtype)

        def taken(pages: int) -> int:
            room = Room(slots, table, table, pages, rows)
            return room.bytes(config, engine.dtype, gathers) + made.cache_bytes(pages) + changed

        # at most a prompt and a sample of the longest for each slot
        self.pages = bisect_right(range(1, 2 * slots * table + 1), free, key=taken)
        if self.pages < 2:
            raise MemoryError(
                f"{slots} slots need {taken(2)} bytes beside the weights for texts of {PAGE} "
                f"tokens, {free} may be taken: lower max_slots, max_tokens or prefill_chunk, or "
                "raise memory"
            )
        # of any division into prompt and sample, each in pages of its own
        self.longest = min(context, (self.pages - 1) * PAGE)
        with torch.inference_mode(False):
            # which kind of step is made depends on the drafter
            engine._drafter, engine._text = made, (tokens, False)
            step = engine._allocate(slots, table, table, self.pages, made.context, rows)
            made.attach(engine.decoder, step.cache)
        # only now: the next run makes anew what a drafter that does not fit the model has left
        engine._step = step
        return step
