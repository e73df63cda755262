"""Cache of a drafting network's keys and values.

The cache holds the committed tokens of each sample, never drafts: a step's drafts are in separate
buffers, like the target's nodes, and rejected drafts are dropped with the buffers. Before a step
drafts, the network reads the tokens committed since the last drafting step, including the root.
"""

from typing import Any

import torch

from csd.kernels.attention.layer import LayerAttention, PromptAttention
from csd.kernels.attention.prompt import PromptChunk, PromptRows
from csd.kernels.ops import Ops
from csd.models.fused.config import scale_of
from csd.research.draft_models.slots import DraftSlots, SlotRows
from csd.state.kv_cache import KVCache
from csd.state.slots import Slots

# rows per slot in one forward pass: bits of an ancestor word without the sign bit
MAX_ROWS = 63
# most tokens of a prompt per forward pass
CHUNK = 512


class DraftNetwork:
    """A network that drafts: a smaller model, or a head on the target's hidden states."""

    config: Any  # layers, heads, kv_heads, head_dim and vocab
    dtype: torch.dtype
    # True if it reads each token with the target's hidden state of the token before: then keys and
    # values of a drafted token, whose hidden state was predicted, differ from an accepted token's
    wants_hidden = False
    state_width = 0  # width of the target's hidden states; 0 if it does not use them

    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        hidden: torch.Tensor | None,
        attend: Any,
        node_k: torch.Tensor,
        node_v: torch.Tensor,
        ops: Ops,
    ) -> torch.Tensor:
        """Return states [M, hidden] of tokens [M] at positions [M].

        hidden: hidden states of the tokens before, if used. node_k, node_v: written for these rows.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of the next tokens."""
        raise NotImplementedError

    def attach(self, decoder: Any) -> None:
        """Attach to the target, before its first forward pass."""

    def start_call(self) -> None:
        """Prepare for a call; called before its first step."""

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Select the network's input from the target's last pass; hidden: result of that pass."""
        return hidden


def new_kv(net: DraftNetwork, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for the keys and the values of rows: [layers, rows, kv_heads, head_dim]."""
    c = net.config
    shape = (c.layers, rows, c.kv_heads, c.head_dim)
    k, v = torch.zeros(2, *shape, dtype=net.dtype, device=device)
    return k, v


class NetworkCache:
    """A network's keys and values in the pages of `kv`, and its attention to them."""

    def __init__(self, net: DraftNetwork, ops: Ops, kv: KVCache, device: torch.device):
        self.net, self.ops, self.k, self.v, self.device = net, ops, kv.k, kv.v, device

    def read_chunks(
        self,
        group: int,
        prompt: list[int],
        begin: int,
        end: int,
        pages: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        """Read the network's tokens begin .. end - 1 of a prompt, chunk by chunk.

        hidden: the target's states of its tokens from `begin` on, if the network uses them; then it
        reads the tokens that follow. pages: of the groups' prompts.
        """
        skip, scale = int(self.net.wants_hidden), scale_of(self.net.config)
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            states = None if hidden is None else hidden[start - begin : stop - begin]
            chunk = PromptChunk(group, prompt[start + skip : stop + skip], start)
            rows = PromptRows.of([chunk], pages)
            node_k, node_v = new_kv(self.net, stop - start, self.device)
            attend = PromptAttention(
                self.ops.prompt_attention, node_k, node_v, self.k, self.v, rows, scale
            )
            self.net.forward(rows.token, rows.position, states, attend, node_k, node_v, self.ops)

    def attention(self, where: dict[str, torch.Tensor], node_k: Any, node_v: Any) -> LayerAttention:
        """Attention of a forward pass, with one layout for all layers; node_k, node_v: by layer."""
        c, plan, attention = self.net.config, self.ops.plan_attention, self.ops.tree_attention
        work = plan(heads=c.heads, kv_heads=c.kv_heads, **where)
        return LayerAttention(
            attention, node_k, node_v, self.k, self.v, where, work, scale_of(c), plan
        )


class DraftCache(NetworkCache):
    """Cache with as many slots, groups and pages as the target's `cache`."""

    def __init__(self, net: DraftNetwork, ops: Ops, cache: KVCache, device: torch.device):
        slots, slot_pages = cache.slot_pages.shape
        self.kv = KVCache(
            net.config,
            slots=slots,
            pages=cache.pages,
            prompt_pages=cache.prompt_pages.shape[1],
            slot_pages=slot_pages,
            rows=0,
            dtype=net.dtype,
            device=device,
        )
        super().__init__(net, ops, self.kv, device)
        self.base = [0] * slots  # per group, number of cached tokens of its prompt
        self.length = [0] * slots  # per slot, number of cached tokens after the prompt's
        self._owner: list[tuple[int, int] | None] = [None] * slots
        self._slot_pages: list[list[int]] = [[] for _ in range(slots)]
        self._group_pages: dict[int, tuple[int, list[int]]] = {}  # group -> its key, its pages

    # prompts

    def open(self, key: int, tokens: int, slots: Slots) -> int:
        """Reserve pages for a new group's prompt of `tokens` tokens; returns the group."""
        self._free_ended(slots)
        group = slots.group_key.tolist().index(key)
        count = self.tokens_of(tokens)
        pages = self.kv.take(self.kv.prompt_pages, group, count)
        self._group_pages[group] = key, pages
        self.base[group] = 0
        return group

    def tokens_of(self, prompt: int) -> int:
        """Number of a prompt's tokens that its samples share.

        Each sample reads the last token itself. A network on hidden states skips the first token,
        which has no hidden state before it.
        """
        return max(prompt - 1 - self.net.wants_hidden, 0)

    def holds(self, s: int, owner: tuple[int, int]) -> bool:
        """True if slot s has pages for the sample `owner`."""
        return self._owner[s] == owner

    # samples

    def claim(self, host: DraftSlots, slots: Slots) -> list[int]:
        """Reserve pages for new samples; returns their slots."""
        new = [s for s in host.live if self._owner[s] != host.owner(s)]
        if new:
            for s in new:
                self._release(s)
            self._free_ended(slots)
            max_new = slots.max_new.tolist()
            for s in new:
                self._slot_pages[s] = self.kv.take(self.kv.slot_pages, s, max_new[s])
                self._owner[s], self.length[s] = host.owner(s), 0
        return new

    def read(
        self, recent: dict[int, list[int]], hidden: dict[int, torch.Tensor] | None, host: DraftSlots
    ) -> torch.Tensor:
        """Read committed tokens, at least one per slot, and append them to the cache.

        recent: tokens not cached yet, by slot, in the order of `host.live`. hidden: by slot, states
        [tokens, hidden] of the tokens before them. Returns states [slots, hidden] of the last
        tokens.
        """
        last: dict[int, torch.Tensor] = {}
        while recent:
            piece = {s: tokens[:MAX_ROWS] for s, tokens in recent.items()}
            rows = SlotRows.of(recent, {s: len(x) for s, x in piece.items()})
            words = [(2 << i) - 1 for s in rows.slots for i in range(rows.count[s])]
            states = None
            if hidden is not None:
                states = torch.cat([hidden[s][:MAX_ROWS] for s in rows.slots])
                hidden = {s: x[MAX_ROWS:] for s, x in hidden.items()}
            node_k, node_v = new_kv(self.net, rows.total, self.device)
            out = self.run(
                rows,
                words,
                range(rows.total),
                [t for s in rows.slots for t in piece[s]],
                [self.position_of(s, host) + i for s in rows.slots for i in range(rows.count[s])],
                states,
                node_k,
                node_v,
                host,
            )
            taken = {
                s: list(range(rows.start[s], rows.start[s] + rows.count[s])) for s in rows.slots
            }
            self.commit(node_k, node_v, taken)
            last |= {s: out[taken[s][-1]] for s in rows.slots}
            recent = {s: x[MAX_ROWS:] for s, x in recent.items() if len(x) > MAX_ROWS}
        return torch.stack([last[s] for s in host.live if s in last])

    def commit(
        self, node_k: torch.Tensor, node_v: torch.Tensor, rows: dict[int, list[int]]
    ) -> None:
        """Append rows of node_k and node_v to the slots' cached tokens; rows: indices by slot."""
        S, width = len(self.length), max(map(len, rows.values()), default=0)
        if not width:
            return
        path = [rows.get(s, []) for s in range(S)]
        self.ops.commit_kv(
            node_k,
            node_v,
            self.k,
            self.v,
            self.kv.slot_pages,
            self._ints(self.length),
            self._ints([[*x, *[-1] * (width - len(x))] for x in path]),
            self._ints(map(len, path)),
        )
        for s, x in rows.items():
            self.length[s] += len(x)

    def run(
        self,
        rows: SlotRows,
        words: list[int],
        row_index: Any,
        token: list[int],
        position: list[int],
        hidden: torch.Tensor | None,
        node_k: torch.Tensor,
        node_v: torch.Tensor,
        host: DraftSlots,
    ) -> torch.Tensor:
        """Run the rows `row_index`, and write their keys and values to node_k and node_v, which
        already have those of the other rows. Returns states [len(row_index), hidden]."""
        kv = self.kv
        where = rows.tensors(len(self.length), host.group, self.device) | dict(
            prompt_pages=kv.prompt_pages,
            prompt_len=self._ints(self.base),
            slot_pages=kv.slot_pages,
            slot_len=self._ints(self.length),
            ancestors=torch.tensor(words).to(self.device),
        )
        whole = self.attention(where, node_k, node_v)
        index = torch.tensor(list(row_index)).to(self.device)
        new_k, new_v = new_kv(self.net, len(token), self.device)

        def attend(layer: int, q: torch.Tensor, **properties: Any) -> torch.Tensor:
            node_k[layer].index_copy_(0, index, new_k[layer])
            node_v[layer].index_copy_(0, index, new_v[layer])
            # rows of previous levels have no query
            wide = q.new_zeros(rows.total, *q.shape[1:]).index_copy_(0, index, q)
            return whole(layer, wide, **properties).index_select(0, index)

        return self.net.forward(
            self._ints(token), self._ints(position), hidden, attend, new_k, new_v, self.ops
        )

    def position_of(self, s: int, host: DraftSlots) -> int:
        """Position of the next token of slot s."""
        return self.base[host.group[s]] + self.length[s]

    def _ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32).to(self.device)

    def _free_ended(self, slots: Slots) -> None:
        """Free the pages of ended groups and samples."""
        keys, live = slots.group_key.tolist(), slots.live.tolist()
        for group, (key, pages) in list(self._group_pages.items()):
            if keys[group] != key:
                self.kv.allocator.give_back(pages)
                del self._group_pages[group]
        for s, runs in enumerate(live):
            if not runs:
                self._release(s)

    def _release(self, s: int) -> None:
        self.kv.allocator.give_back(self._slot_pages[s])
        self._slot_pages[s], self._owner[s] = [], None


class Scratch:
    """Keys and values of a step's drafts: the nodes of each slot, read level by level."""

    def __init__(self, cache: DraftCache, host: DraftSlots):
        self.cache, self.host = cache, host
        self.words: dict[int, list[int]] = {s: [] for s in host.live}
        self.rows = SlotRows.of([], {})
        self.k, self.v = new_kv(cache.net, 0, cache.device)

    def room(self, s: int) -> int:
        return MAX_ROWS - len(self.words[s])

    def level(
        self,
        slot: list[int],
        parent: list[int],
        token: list[int],
        depth: int,
        hidden: torch.Tensor | None,
    ) -> tuple[list[int], torch.Tensor]:
        """Read the nodes of one level. parent: number of each node's parent in the slot, or -1.

        Returns the nodes' numbers in their slots, and states [n, hidden] in the same order.
        """
        cache, old = self.cache, self.rows
        number = []
        for s, above in zip(slot, parent, strict=True):
            words = self.words[s]
            number.append(len(words))
            words.append(1 << len(words) | (words[above] if above >= 0 else 0))
        self.rows = rows = SlotRows.of(
            self.host.live, {s: len(words) for s, words in self.words.items()}
        )
        before = [rows.start[s] + i for s in old.slots for i in range(old.count[s])]
        k, v = new_kv(cache.net, rows.total, cache.device)
        if before:
            moved = torch.tensor(before).to(cache.device)
            k.index_copy_(1, moved, self.k)
            v.index_copy_(1, moved, self.v)
        self.k, self.v = k, v
        index = [rows.start[s] + n for s, n in zip(slot, number, strict=True)]
        out = cache.run(
            rows,
            [w for s in rows.slots for w in self.words[s]],
            index,
            token,
            [cache.position_of(s, self.host) + depth - 1 for s in slot],
            hidden,
            k,
            v,
            self.host,
        )
        return number, out

    def keep(self, numbers: dict[int, list[int]]) -> None:
        """Append accepted nodes to the slots' cached tokens; numbers: by slot."""
        rows = {s: [self.rows.start[s] + n for n in path] for s, path in numbers.items() if path}
        self.cache.commit(self.k, self.v, rows)
