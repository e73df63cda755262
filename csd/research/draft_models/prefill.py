"""Prefill of a drafting network: prompts, and committed tokens of samples.

Prompts are read with the target, chunk by chunk. Committed tokens are read when a step drafts;
steps without drafts leave more tokens unread. A network on the target's hidden states reads each
token with the target's state of the token before it, so those states are stored until then.
"""

import torch

from csd.research.draft_models.cache import DraftCache, DraftNetwork
from csd.research.draft_models.slots import DraftSlots, take
from csd.state.slots import Slots


class DraftPrefill:
    """The network's cache, and the target's states that the network has not read yet."""

    def __init__(self, net: DraftNetwork, device: torch.device):
        self.net, self.device = net, device
        self.cache: DraftCache | None = None
        # [M, hidden], the target's states of the rows that it read last
        self.hidden: torch.Tensor | None = None
        self._key: dict[int, int] = {}  # key of each group
        self._last: dict[int, int] = {}  # by group, the last token of its prompt
        self._before: dict[int, torch.Tensor] = {}  # the target's state [1, hidden] before `_last`
        self._unread: dict[int, list[torch.Tensor]] = {}  # by slot, unread states of the target

    def read_prompt(self, key: int, prompt: list[int], read: int, slots: Slots) -> None:
        """Read the prompt up to the target's position `read`; opens its group if it is new."""
        cache = self.cache
        assert cache is not None, "a draft model needs an engine, which attaches it"
        group = next((g for g, k in self._key.items() if k == key), -1)
        if group < 0:
            group = cache.open(key, len(prompt), slots)
            self._key[group], self._last[group] = key, prompt[-1]
            self._before.pop(group, None)
        hidden = self.hidden if self.net.wants_hidden else None
        begin, end = cache.base[group], min(read, cache.tokens_of(len(prompt)))
        # the target's last rows are its tokens begin .. read - 1
        cache.read_chunks(group, prompt, begin, end, cache.kv.prompt_pages, hidden)
        cache.base[group] = max(begin, end)
        if hidden is not None and read == len(prompt) - 1:
            self._before[group] = hidden[-1:].clone()

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
        zeros = torch.zeros(1, self.net.state_width, dtype=self.net.dtype, device=self.device)
        return self._before.get(group, zeros)
