"""Prefill: prompts are read into the caches chunk by chunk, so that steps can run in between."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from csd.engine.requests.request import Request
from csd.engine.step.step import Step
from csd.kernels.attention.layer import PromptAttention
from csd.kernels.attention.prompt import PromptChunk, PromptRows
from csd.kernels.states.prompt import PromptStates
from csd.models.exact import by_chunks, reads_together
from csd.models.fused.config import scale_of
from csd.state.kv_cache import PAGE
from csd.state.prefix_cache import Unit


@dataclass(slots=True)
class Prefill:
    """Reads all but the last token of a prompt; the last one is the first root of its samples.

    The beginning that the prefix index has is not read. The rest is read in chunks that begin at
    multiples of `chunk_size`, or of a unit of the index, whatever is read or run between two of
    them, so that a prompt's keys and values are the same in every batch.
    """

    step: Step
    request: Request
    chunk_size: int
    position: int = 0  # number of tokens whose keys and values are in the pages
    num_units: int = 0  # number of units of the prefix index that are among them
    observed: int = 0  # tokens that the drafter has processed, by its own count
    pieces: Iterator[int] | None = None  # enters past samples; rows of each piece

    @classmethod
    def begin(
        cls, step: Step, request: Request, group: int, chunk_size: int, observed: int
    ) -> "Prefill":
        """Reserve the pages of a group for the request's prompt; observed: number of its
        first tokens that the group's graph has."""
        request.place.group = group
        cache, tokens = step.cache, len(request.prompt) - 1
        # digests of an earlier run may be of other units
        request.place.units = None
        units = units_of(step, request, chunk_size)
        pages = [page for unit in units for page in unit.pages]
        request.place.pages = cache.take(cache.prompt_pages, group, tokens, chunk_size, pages)
        request.progress.stats.cached_tokens = len(pages) * PAGE
        if units and cache.states is not None:
            cache.states.prompts[group] = units[-1].states.copy()
        # from here on, other groups cannot reuse the drafter's memory for this one
        step.slots.group_key[group].fill_(request.place.graph_key)
        step.slots.prior_part[group].fill_(request.prior_part)
        return cls(step, request, chunk_size, len(pages) * PAGE, len(units), observed)

    @property
    def chunk(self) -> int:
        """Number of tokens of the next chunk, 0 once all are read."""
        return min(self.chunk_size, len(self.request.prompt) - 1 - self.position)

    def next_chunk(self) -> PromptChunk:
        """Returns the part of the prompt that the next pass reads."""
        request, first = self.request, self.position
        tokens, scored = request.prompt[first : first + self.chunk], request.progress.scores
        return PromptChunk(request.place.group, tokens, first, scored is not None)

    def finish_chunk(self, hidden: torch.Tensor) -> None:
        """Process a chunk after its pass; hidden: last hidden states [T, hidden] of its rows."""
        self.step.observe_hidden(hidden)
        end = self.position + self.chunk
        if (scores := self.request.progress.scores) is not None:
            following = self.request.prompt[self.position + 1 : end + 1]
            scores.read(self.step.decoder.logits, hidden, following)
        self.position = end
        self._keep_units()
        self._observe(end)

    def _keep_units(self) -> None:
        """Let later prompts use the units that have been read."""
        cache, digests = self.step.cache, self.request.place.units
        index = cache.allocator.index
        if index is None or not digests:
            return
        states = None
        for unit in range(self.num_units, min(len(digests), self.position // index.tokens)):
            first = unit * index.pages
            pages = self.request.place.pages[first : first + index.pages]
            if cache.states is not None:
                # a chunk of such a model is a unit
                states = cache.states.prompts[self.request.place.group].copy()
            cache.allocator.keep(digests[unit], pages, states)
            self.num_units = unit + 1

    def will_keep(self, digest: bytes) -> bool:
        """True if the unit of this digest is one that this prompt has still to read."""
        return digest in (self.request.place.units or [])[self.num_units :]

    def enter_history(self) -> int:
        """Enter the next piece of the past samples; returns its number of rows, 0 at the end.

        The size of a piece bounds how long a step waits, whatever the history.
        """
        if self.pieces is None:
            step, prompt, history = self.step, self.request.prompt, self.request.history
            self._observe(len(prompt))
            self.pieces = iter(())
            if step.drafting and step.drafter is not None and history:
                key = self.request.place.graph_key
                self.pieces = step.drafter.enter_history(key, prompt, history, step.slots)
        return next(self.pieces, 0)

    def end(self) -> None:
        """Set the group's prompt length in the slots, so that its samples can begin."""
        self.step.slots.prompt_len[self.request.place.group].fill_(len(self.request.prompt) - 1)

    def _observe(self, read: int) -> None:
        step, request = self.step, self.request
        if step.drafting and step.drafter is not None:
            self.observed = step.drafter.observe_prompt(
                request.place.graph_key, request.prompt, self.observed, read, step.slots
            )


def units_of(step: Step, request: Request, chunk_size: int) -> list[Unit]:
    """Units of the prefix index that the request's prompt begins with.

    Sets the digests of all of its units in `request.place`; none if it is read whole: its logits
    are read, its drafter reads the hidden states of all tokens, or it overwrites its own beginning.
    """
    index, tokens = step.cache.allocator.index, request.prompt[:-1]
    if index is None or request.scope is None or request.progress.scores is not None:
        return []
    reads_states = step.drafting and step.drafter is not None and step.drafter.reads_hidden
    if reads_states or step.cache.wraps(len(tokens), chunk_size):
        return []
    if request.place.units is None:
        request.place.units = index.digests(request.scope, tokens)
    return index.find(request.place.units)


def read_chunks(prefills: Sequence[Prefill]) -> None:
    """Run the next chunk of each prompt in one pass; keys and values go to the groups' pages."""
    step, parts = prefills[0].step, [prefill.next_chunk() for prefill in prefills]
    states = read_prompts(step, parts)
    for prefill, hidden in zip(prefills, states, strict=True):
        prefill.finish_chunk(hidden)


def reads_several(step: Step) -> bool:
    """True if `read_prompts` may be given chunks of several prompts."""
    cache = step.cache
    return cache.reach is None and cache.states is None and reads_together(step.decoder)


def read_prompt(step: Step, group: int, tokens: Sequence[int], start: int) -> torch.Tensor:
    """Write keys and values of a prompt's tokens, from place `start` on, to the group's pages.

    Returns the last hidden states, which the head would read.
    """
    return read_prompts(step, [PromptChunk(group, tokens, start)])[0]


def read_prompts(step: Step, parts: Sequence[PromptChunk]) -> list[torch.Tensor]:
    """`read_prompt` for several prompts in one pass; keys and values have the same bits."""
    with step.prompt_pass(parts):
        ops, cache = step.ops, step.cache
        decoder: Any = step.decoder
        rows = PromptRows.of(parts, cache.prompt_pages)
        node_k, node_v = cache.nodes(rows.token.shape[0])
        states = None
        if cache.states is not None:
            ((group, _, start, _),) = parts
            memory = cache.states.of_prompt(group, start)
            states = PromptStates(ops, memory, start, rows.token.shape[0])
        together = reads_several(step)
        attend = PromptAttention(
            ops.prompt_attention,
            node_k,
            node_v,
            cache.k,
            cache.v,
            rows,
            scale_of(decoder.config),
            states,
            late=together and rows.begin,
            last=not any(part.scored for part in parts),
        )
        if together:
            decoder = by_chunks(decoder, rows.chunks.rows)
        hidden = decoder.forward(rows.token, rows.position, attend, node_k, node_v, ops)
        attend.end()
        if states is not None:
            states.end()
        # with a single prompt a module may return fewer rows, so these are not split
        return [hidden] if len(parts) == 1 else list(hidden.split(rows.chunks.rows))
