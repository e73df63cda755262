"""Prefill of a drafting network: prompts, and committed tokens of samples.

Prompts are read with the target, chunk by chunk. Committed tokens are read when a step drafts;
steps without drafts leave more tokens unread. A network on the target's hidden states reads each
token with the target's state of the token before it, so those states are stored until then.
"""

import torch

from csd.kernels.ops import Ops
from csd.research.draft_models.cache import DraftCache, DraftNetwork
from csd.research.draft_models.slots import DraftSlots, take
from csd.state.kv_cache import pages_for
from csd.state.slots import Slots

# most tokens of a prompt per forward pass
CHUNK = 512


class DraftPrefill:
    """The network's cache, and the target's states that the network has not read yet."""

    def __init__(self, net: DraftNetwork, ops: Ops, device: torch.device):
        self.net, self.ops, self.device = net, ops, device
        self.cache: DraftCache | None = None
        # [M, hidden], the target's states of the rows that it read last
        self.hidden: torch.Tensor | None = None
        self._key: dict[int, int] = {}  # key of each group
        self._last: dict[int, int] = {}  # by group, the last token of its prompt
        self._before: dict[int, torch.Tensor] = {}  # the target's state [1, hidden] before `_last`
        self._unread: dict[int, list[torch.Tensor]] = {}  # by slot, unread states of the target

    def allocate(self, **sizes: int) -> None:
        self.cache = DraftCache(self.net, self.ops, self.device, **sizes)

    def read_prompt(self, key: int, prompt: list[int], read: int, slots: Slots) -> None:
        """Read the prompt up to the target's position `read`; opens its group if it is new."""
        if self.cache is None:
            self._allocate_for(prompt, slots)
        cache = self.cache
        assert cache is not None
        group = next((g for g, k in self._key.items() if k == key), -1)
        if group < 0:
            group = cache.open(key, len(prompt), slots)
            self._key[group], self._last[group] = key, prompt[-1]
            self._before.pop(group, None)
        end = min(read, cache.tokens_of(len(prompt)))
        begin = cache.base[group]
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            if not self.net.wants_hidden:
                cache.read_prompt(group, prompt[start:stop], None)
                continue
            assert self.hidden is not None
            # the target's last rows are its tokens begin .. read - 1
            cache.read_prompt(
                group, prompt[start + 1 : stop + 1], self.hidden[start - begin : stop - begin]
            )
        if self.net.wants_hidden and read == len(prompt) - 1:
            assert self.hidden is not None
            self._before[group] = self.hidden[-1:].clone()

    def _allocate_for(self, prompt: list[int], slots: Slots) -> None:
        """Allocate without an engine: pages for the slots and a prompt of this length."""
        slot_pages, prompt_pages = pages_for(slots.tokens.shape[1] + 1), pages_for(len(prompt)) + 1
        self.allocate(
            slots=slots.count,
            pages=slots.count * (slot_pages + prompt_pages),
            slot_pages=slot_pages,
            prompt_pages=prompt_pages,
        )

    def catch_up(self, host: DraftSlots, slots: Slots) -> torch.Tensor:
        """Read unread committed tokens, roots included; returns root states [live, hidden]."""
        cache = self.cache
        assert cache is not None
        cache.claim(host, slots)
        tokens, recent = slots.tokens.numpy(force=True), {}
        hidden: dict[int, torch.Tensor] | None = {} if self.net.wants_hidden else None
        for s in host.live:
            first, last = cache.length[s], host.generated[s]
            recent[s] = tokens[s, max(first - 1, 0) : last].tolist()
            if first == 0:
                recent[s].insert(0, self._last[host.group[s]])
            if hidden is not None:
                if last == 0:
                    self._unread[s] = [self._state_before(host.group[s])]
                hidden[s] = torch.cat([x.to(self.net.dtype) for x in self._unread.pop(s)])
        return cache.read(recent, hidden, host)

    def observe(self, slots: Slots, paths: list[list[int]]) -> None:
        """Store the target's states of a step; paths: by slot, rows of committed tokens."""
        if not self.net.wants_hidden:
            return
        assert self.hidden is not None and self.cache is not None
        host = DraftSlots.of(slots)
        for s, rows in enumerate(paths):
            if not rows or s not in host.live:
                continue
            fresh = host.generated[s] == len(rows)
            if fresh and not self.cache.holds(s, host.owner(s)):
                self._unread[s] = [self._state_before(host.group[s])]
            self._unread.setdefault(s, []).append(take(self.hidden, rows))

    def _state_before(self, group: int) -> torch.Tensor:
        """State [1, hidden] before a sample's first token; zeros for a prompt of one token."""
        state = self._before.get(group)
        if state is None:
            width = self.net.state_width
            state = torch.zeros(1, width, dtype=self.net.dtype, device=self.device)
        return state
