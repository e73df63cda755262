"""Keys and values in pages of 64 tokens: prompts stored once a group, committed tokens a slot."""

from typing import Any

import torch

from csd.state.device import upload
from csd.state.recurrent import StateCache

PAGE = 64


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class PageAllocator:
    """Hands out pages; neighbours where it can, since a run of pages can be read as one piece."""

    def __init__(self, pages: int):
        self._free = list(range(pages))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, the first run of neighbours that is long enough if there is one."""
        if count == 0:
            return []
        if count > len(self._free):
            raise MemoryError(f"{count} pages asked for, {len(self._free)} are free")
        at = next(
            (
                i
                for i in range(len(self._free) - count + 1)
                if self._free[i + count - 1] - self._free[i] == count - 1
            ),
            0,
        )
        taken = self._free[at : at + count]
        del self._free[at : at + count]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self._free = sorted(self._free + pages)


class KVCache:
    """L layers, K key-value heads, D head size; page tables are int32, -1 where there is no page.

    k, v: [L, pages, 64, K, D]; node_k, node_v: [L, rows, K, D], the scratch of a step's nodes. A
    layer's are parts of one tensor, so that one call can gather from all of them.
    """

    def __init__(
        self,
        config: Any,  # anything with layers, kv_heads and head_dim
        *,
        slots: int,
        pages: int,
        prompt_pages: int,
        slot_pages: int,
        rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ):
        L, K, D = config.layers, config.kv_heads, config.head_dim
        # [L, keys and values, tokens, K, D]
        memory = torch.empty(L, 2, pages * PAGE + rows, K, D, dtype=dtype, device=device)
        committed, nodes = memory.split((pages * PAGE, rows), dim=2)
        self.k, self.v = committed.unflatten(2, (pages, PAGE)).unbind(1)
        self.node_k, self.node_v = nodes.zero_().unbind(1)
        self.prompt_pages = torch.full((slots, prompt_pages), -1, dtype=torch.int32, device=device)
        self.slot_pages = torch.full((slots, slot_pages), -1, dtype=torch.int32, device=device)
        self.allocator = PageAllocator(pages)
        sizes = getattr(config, "states", None)
        # of layers whose memory of a text is not keys and values
        self.states = StateCache(sizes, slots, rows, dtype, device) if sizes else None

    @staticmethod
    def bytes_per_page(config: Any, dtype: torch.dtype) -> int:
        return 2 * config.layers * PAGE * config.kv_heads * config.head_dim * dtype.itemsize

    def take(self, table: torch.Tensor, row: int, tokens: int) -> list[int]:
        """Reserve pages for `tokens` tokens and enter them in a row of a page table."""
        pages = self.allocator.take(pages_for(tokens))
        table[row].fill_(-1)
        if pages:
            host = torch.tensor(pages, dtype=torch.int32)
            table[row, : len(pages)].copy_(upload(host, table.device))
        return pages

    def reset(self) -> None:
        """All pages free."""
        self.allocator = PageAllocator(self.k.shape[1])
        if self.states is not None:
            self.states.prompts.clear()
        self.prompt_pages.fill_(-1)
        self.slot_pages.fill_(-1)
