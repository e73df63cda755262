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


@dataclass(slots=True)
class Prefill:
    """Reads all but the last token of a prompt; the last one is the first root of its samples.

    Chunks begin at multiples of `chunk_size`, whatever is read or run between two of them, so that
    a prompt's keys and values are the same in every batch.
    """

    step: Step
    request: Request
    key: int  # of the group, never used before
    chunk_size: int
    at: int = 0  # number of tokens read
    observed: int = 0  # tokens that the drafter has processed, by its own count
    pieces: Iterator[int] | None = None  # enters past samples; rows of each piece

    @classmethod
    def begin(
        cls,
        step: Step,
        request: Request,
        group: int,
        key: int,
        chunk_size: int,
    ) -> "Prefill":
        """Reserve the pages of a group for the request's prompt."""
        request.group = group
        tokens = len(request.prompt) - 1
        request.pages = step.cache.take(step.cache.prompt_pages, group, tokens, chunk_size)
        # from here on, other groups cannot reuse the drafter's memory for this one
        step.slots.group_key[group].fill_(key)
        step.slots.prior_part[group].fill_(request.prior_part)
        return cls(step, request, key, chunk_size)

    @property
    def chunk(self) -> int:
        """Number of tokens of the next chunk, 0 once all are read."""
        return min(self.chunk_size, len(self.request.prompt) - 1 - self.at)

    def next_chunk(self) -> PromptChunk:
        """Returns the part of the prompt that the next pass reads."""
        tokens = self.request.prompt[self.at : self.at + self.chunk]
        return PromptChunk(self.request.group, tokens, self.at, self.request.scores is not None)

    def finish_chunk(self, hidden: torch.Tensor) -> None:
        """Process a chunk after its pass; hidden: last hidden states [T, hidden] of its rows."""
        self.step.observe_hidden(hidden)
        end = self.at + self.chunk
        if self.request.scores is not None:
            following = self.request.prompt[self.at + 1 : end + 1]
            self.request.scores.read(self.step.decoder.logits, hidden, following)
        self.at = end
        self._observe(end)

    def enter_history(self) -> int:
        """Enter the next piece of the past samples; returns its number of rows, 0 at the end.

        The size of a piece bounds how long a step waits, whatever the history.
        """
        if self.pieces is None:
            prompt = self.request.prompt
            self._observe(len(prompt))
            self.pieces = iter(())
            step = self.step
            if step.drafting and step.drafter is not None:
                history = self.request.history
                if history:
                    self.pieces = step.drafter.enter_history(self.key, prompt, history, step.slots)
        return next(self.pieces, 0)

    def end(self) -> None:
        """Set the group's prompt length in the slots, so that its samples can begin."""
        self.step.slots.prompt_len[self.request.group].fill_(len(self.request.prompt) - 1)

    def _observe(self, read: int) -> None:
        step = self.step
        if step.drafting and step.drafter is not None:
            self.observed = step.drafter.observe_prompt(
                self.key, self.request.prompt, self.observed, read, step.slots
            )


def read_chunks(prefills: Sequence[Prefill]) -> None:
    """Run the next chunk of each prompt in one pass; keys and values go to the groups' pages."""
    step, parts = prefills[0].step, [prefill.next_chunk() for prefill in prefills]
    found = read_prompts(step, parts)
    for prefill, hidden in zip(prefills, found, strict=True):
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
        return _read_prompts(step, parts)


def _read_prompts(step: Step, parts: Sequence[PromptChunk]) -> list[torch.Tensor]:
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
