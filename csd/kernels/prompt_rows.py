"""Rows of a pass over chunks of prompts and their places in the pages, computed once per pass.

Place p of prompt g is token p % 64 of page prompt_pages[g, p // 64]; `index` counts the tokens of
all pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from csd.kernels.chunk_attention import tokens_of
from csd.kernels.prompt_attention import Chunks
from csd.state.device import upload
from csd.state.kv_cache import PAGE, pages_for

# int32 numbers in 16 bytes, an alignment that kernels may rely on
ALIGNED = 4


class PromptChunk(NamedTuple):
    """Tokens of a group's prompt that follow its first `start` tokens.

    scored: True if logits of all of its rows are read, not only those of the last one.
    """

    group: int
    tokens: Sequence[int]
    start: int
    scored: bool = False


@dataclass(slots=True)
class PromptRows:
    token: torch.Tensor  # [R] int32
    position: torch.Tensor  # [R] int32
    index: torch.Tensor  # [R] int64
    chunks: Chunks
    groups: list[int]
    prompt_pages: torch.Tensor  # [G, PP] int32
    _keys: torch.Tensor | None = field(default=None, repr=False)  # [T] int64

    @classmethod
    def of(cls, parts: Sequence[PromptChunk], prompt_pages: torch.Tensor) -> "PromptRows":
        """Builds the rows of the chunks `parts`, with one copy to the device."""
        starts = tuple(part.start for part in parts)
        rows = tuple(len(part.tokens) for part in parts)
        keys = tuple(map(sum, zip(starts, rows, strict=True)))
        ends = [torch.tensor((0, *x)).cumsum(0) for x in (rows, keys)]
        lists = (
            torch.tensor([t for part in parts for t in part.tokens]),
            torch.cat([torch.arange(s, s + n) for s, n in zip(starts, rows, strict=True)]),
            torch.tensor([part.group for part in parts]).repeat_interleave(torch.tensor(rows)),
            *ends,
        )
        width = -(-max(map(len, lists)) // ALIGNED) * ALIGNED
        host = torch.zeros(len(lists), width, dtype=torch.int32)
        for target, x in zip(host, lists, strict=True):
            target[: len(x)] = x
        held = upload(host, prompt_pages.device)
        token, position, group, row_ends, key_ends = (
            x[: len(given)] for x, given in zip(held, lists, strict=True)
        )
        index = _index(prompt_pages, group, position)
        groups = [part.group for part in parts]
        chunks = Chunks(starts, rows, row_ends, key_ends)
        return cls(token, position, index, chunks, groups, prompt_pages)

    @property
    def begin(self) -> bool:
        """True if each chunk begins its prompt, so that its own rows are all its keys."""
        return not any(self.chunks.starts)

    def keys_of(self, cache: torch.Tensor) -> torch.Tensor:
        """[T, K, D]: keys or values of the chunks' prompts so far, from a layer's pages `cache`."""
        keys = self.chunks.keys
        if len(keys) == 1:
            table = self.prompt_pages[self.groups[0], : pages_for(keys[0])]
            return tokens_of(cache, table)[: keys[0]]
        if self._keys is None:
            place = torch.cat([torch.arange(n) for n in keys])
            group = torch.tensor(self.groups).repeat_interleave(torch.tensor(keys))
            held = upload(torch.stack((group, place)).int(), cache.device)
            self._keys = _index(self.prompt_pages, *held)
        return cache.flatten(0, 1).index_select(0, self._keys)


def _index(prompt_pages: torch.Tensor, group: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    page = prompt_pages.flatten().index_select(0, group * prompt_pages.shape[1] + place // PAGE)
    return page.long() * PAGE + place % PAGE
