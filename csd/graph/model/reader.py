"""What a drafting network reads of prompts and samples, and when.

Prompts are read as the target reads them, chunk by chunk. What a step committed is read when the
next one drafts; steps that do not draft leave more to read. A network on the target's hidden states
reads each token beside the target's state of the token before it, so those are kept until then.
"""

import torch

from csd.graph.model.cache import DraftCache, Network
from csd.graph.model.host import HostSlots, take
from csd.kernels.ops import Ops
from csd.state.kv_cache import pages_for
from csd.state.slots import Slots

# tokens of a prompt that are read at once, where the target reads more
CHUNK = 512


class Reader:
    """The network's cache and what has not been read into it yet."""

    def __init__(self, net: Network, ops: Ops, device: torch.device):
        self.net, self.ops, self.device = net, ops, device
        self.cache: DraftCache | None = None
        # [M, hidden]: the target's, of the rows that it read last
        self.hidden: torch.Tensor | None = None
        self._key: dict[int, int] = {}  # of each group
        self._last: dict[int, int] = {}  # last token of its prompt
        self._before: dict[int, torch.Tensor] = {}  # the target's state [1, hidden] before it
        self._unread: dict[int, list[torch.Tensor]] = {}  # by slot, the target's states

    def allocate(self, **sizes: int) -> None:
        self.cache = DraftCache(self.net, self.ops, self.device, **sizes)

    def read_prompt(self, key: int, prompt: list[int], read: int, slots: Slots) -> None:
        """Read on, up to what the target has read."""
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
        for at in range(begin, end, CHUNK):
            stop = min(at + CHUNK, end)
            if not self.net.wants_hidden:
                cache.read_prompt(group, prompt[at:stop], None)
                continue
            assert self.hidden is not None
            # the target's last rows are its tokens begin .. read - 1
            cache.read_prompt(
                group, prompt[at + 1 : stop + 1], self.hidden[at - begin : stop - begin]
            )
        if self.net.wants_hidden and read == len(prompt) - 1:
            assert self.hidden is not None
            self._before[group] = self.hidden[-1:].clone()

    def _allocate_for(self, prompt: list[int], slots: Slots) -> None:
        """Without an engine: as many pages as the slots and a prompt of this length take."""
        slot_pages, prompt_pages = pages_for(slots.tokens.shape[1] + 1), pages_for(len(prompt)) + 1
        self.allocate(
            slots=slots.count, pages=slots.count * (slot_pages + prompt_pages),
            slot_pages=slot_pages, prompt_pages=prompt_pages,
        )  # fmt: skip

    def catch_up(self, host: HostSlots, slots: Slots) -> torch.Tensor:
        """Read what was committed and has not been read, roots included: [live, hidden]."""
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
        """A step is done; paths: by slot, the rows whose tokens were committed."""
        if not self.net.wants_hidden:
            return
        assert self.hidden is not None and self.cache is not None
        host = HostSlots.of(slots)
        for s, rows in enumerate(paths):
            if not rows or s not in host.live:
                continue
            fresh = host.generated[s] == len(rows)
            if fresh and not self.cache.holds(s, host.owner(s)):
                self._unread[s] = [self._state_before(host.group[s])]
            self._unread.setdefault(s, []).append(take(self.hidden, rows))

    def _state_before(self, group: int) -> torch.Tensor:
        """Before a prompt of one token there is none: zeros, which only make a worse guess."""
        found = self._before.get(group)
        if found is None:
            width = self.net.state_width
            found = torch.zeros(1, width, dtype=self.net.dtype, device=self.device)
        return found
