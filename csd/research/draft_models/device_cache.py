"""Keys and values of a draft model on the device: fixed shapes, no reads by the host.

Page numbers equal the target's, so the target's page tables are used for both and nothing is
reserved or freed here. A forward pass has the same number of rows for every live slot, slot by
slot:

    reading    up to R unread committed tokens; if these are all of them, the root is the last
    a level    all nodes of this step so far; nodes of previous levels have keys and no query

Committed tokens are read again when the next step drafts, in one pass with the root, so a rejected
draft leaves no trace. A slot with more than R unread tokens, after steps without drafts, does not
draft until it has read them. A head reads in every step, because the buffer of the target's states
before unread tokens holds R per slot. It has no key of a prompt's first token, which has no state
before it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from csd.kernels.attention.layer import LayerAttention
from csd.kernels.ops import Ops
from csd.research.draft_models.cache import DraftNetwork, NetworkCache, new_kv
from csd.research.draft_models.slots import SlotOrder
from csd.state.kv_cache import KVCache
from csd.state.slots import Slots


@dataclass(slots=True)
class NodeCache:
    """Keys and values of a step's nodes so far, the same number per slot."""

    k: torch.Tensor  # [L, S, n, K, D]
    v: torch.Tensor
    words: torch.Tensor  # [S, read] int64, bit j: node j is this node or its ancestor


class DeviceCache(NetworkCache):
    """Cache with the pages of the target's `cache`. tokens: R, most tokens read per slot."""

    def __init__(
        self, net: DraftNetwork, ops: Ops, cache: KVCache, tokens: int, device: torch.device
    ):
        self.tokens = tokens
        self.prompt_pages, self.slot_pages = cache.prompt_pages, cache.slot_pages
        S, G = self.slot_pages.shape[0], self.prompt_pages.shape[0]
        own = KVCache(
            net.config,
            slots=1,
            pages=cache.pages,
            prompt_pages=1,
            slot_pages=1,
            rows=0,
            dtype=net.dtype,
            device=device,
        )
        super().__init__(net, ops, own, device)

        def full(size: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        # number of leading tokens of a prompt that are not cached
        self.skipped = int(net.wants_hidden)
        width = net.state_width
        # the target's states before each slot's unread tokens, and before each prompt's last token
        self.states = torch.zeros(S, tokens, width, dtype=net.dtype, device=device)
        self.before = torch.zeros(G, width, dtype=net.dtype, device=device)
        self.length = full(S, 0)  # per slot, number of cached tokens after the prompt's
        self.key, self.sample = full(S, -1, torch.int64), full(S, -1)  # sample that `length` is of
        self.last = full(G, 0)  # per group, the prompt's last token, which a slot reads first

    def base(self, slots: Slots) -> torch.Tensor:
        """Number of cached tokens of each group's prompt, [G] int32."""
        return (slots.prompt_len - self.skipped).clamp(min=0)

    def read_prompt(
        self,
        key: int,
        prompt: list[int],
        begin: int,
        end: int,
        slots: Slots,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Read the prompt's tokens begin .. end - 1, for which the target has pages.

        hidden: the target's states of these tokens, if the network reads each token with the
        previous token's state; then tokens begin + 1 .. end are read.
        """
        group = (slots.group_key == key).int().argmax()[None]
        self.last.index_fill_(0, group, prompt[-1])
        if hidden is not None and end == len(prompt) - 1 > begin:
            last = hidden[end - begin - 1 : end - begin]
            self.before.index_copy_(0, group, last.to(self.before.dtype))
        elif len(prompt) == 1:
            self.before.index_fill_(0, group, 0)
        pages = self.prompt_pages.index_select(0, group)
        end = min(end, len(prompt) - 1 - self.skipped)
        self.read_chunks(0, prompt, begin, end, pages, hidden)

    def read(self, order: SlotOrder, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Read committed tokens, up to R per slot, and append them to the cache.

        Returns states [S, hidden] at the roots and [S] bool, True if the root was reached, both in
        the slots' `order`.
        """
        S, R = self.length.shape[0], self.tokens
        group = slots.group.clamp(min=0).long()
        key = slots.group_key[group]
        # a new sample in the slot
        self.length.masked_fill_((self.key != key) | (self.sample != slots.sample), 0)
        self.key.copy_(key)
        self.sample.copy_(slots.sample)
        unread = slots.generated - self.length + 1
        count = torch.where(slots.live, unread.clamp(max=R), 0)
        step = torch.arange(R, dtype=torch.int32, device=self.device)
        # [S, R], numbers of the tokens; rows after the root repeat it and are not committed
        index = torch.minimum(self.length[:, None] + step, slots.generated[:, None])
        token = slots.tokens.gather(1, (index.long() - 1).clamp(min=0))
        token = torch.where(index == 0, self.last[group][:, None], token).clamp(min=0)
        position = self.base(slots)[group][:, None] + index
        states = None
        if self.skipped:
            first = (index == 0)[..., None]
            states = torch.where(first, self.before[group][:, None], self.states)
            states = states[order.slot].flatten(0, 1)
        where = order.layout(R)
        words = ((2 << step.long()) - 1).expand(S, R).reshape(-1)
        node_k, node_v = new_kv(self.net, S * R, self.device)
        attend = self._attention(where, words, slots, node_k, node_v)
        hidden = self.net.forward(
            token[order.slot].reshape(-1).int(),
            position[order.slot].reshape(-1),
            states,
            attend,
            node_k,
            node_v,
            self.ops,
        )
        row = torch.where(step < count[:, None], where["slot_start"][:, None] + step, -1)
        self.ops.commit_kv(node_k, node_v, self.k, self.v, self.slot_pages, self.length, row, count)
        self.length.add_(count)
        root = (unread[order.slot] - 1).clamp(0, R - 1).long()
        roots = hidden.unflatten(0, (S, R))[torch.arange(S, device=self.device), root]
        return roots, order.live & (unread[order.slot] <= R)

    def keep(self, hidden: torch.Tensor, path: torch.Tensor) -> None:
        """Store the target's states before the tokens that a step committed.

        hidden: [M, hidden] of the step's rows; path: [S, n], accepted rows, -1 after them.
        """
        path = path[:, : self.tokens].clamp(min=0).long()
        self.states[:, : path.shape[1]].copy_(hidden[path])

    def nodes(self, count: int) -> NodeCache:
        """Allocate `count` nodes per slot."""
        S = self.length.shape[0]
        k, v = (x.unflatten(1, (S, count)) for x in new_kv(self.net, S * count, self.device))
        return NodeCache(k, v, torch.zeros(S, 0, dtype=torch.int64, device=self.device))

    def read_level(
        self,
        order: SlotOrder,
        nodes: NodeCache,
        token: torch.Tensor,
        above: torch.Tensor,
        position: torch.Tensor,
        hidden: torch.Tensor,
        slots: Slots,
    ) -> torch.Tensor:
        """Read one level, F nodes per slot; returns states [S, F, hidden].

        token: [S, F]. above: ancestor words of their parents [S, F], 0 below the root. position:
        [S]. hidden: the network's states of their parents, [S, F, hidden]. Keys, values and words
        of the level are added to `nodes`.
        """
        (S, F), begin = token.shape, nodes.words.shape[1]
        end = begin + F
        bit = torch.ones_like(above) << torch.arange(begin, end, device=self.device)
        nodes.words = torch.cat([nodes.words, above | bit], 1)
        new_k, new_v = new_kv(self.net, S * F, self.device)
        # by layer, set once the layer has computed the level's keys and values
        node_k: dict[int, torch.Tensor] = {}
        node_v: dict[int, torch.Tensor] = {}
        words = nodes.words.reshape(-1)
        whole = self._attention(order.layout(end), words, slots, node_k, node_v)

        def attend(layer: int, q: torch.Tensor, **properties: Any) -> torch.Tensor:
            for new, old, scratch in ((new_k, nodes.k, node_k), (new_v, nodes.v, node_v)):
                old[layer, :, begin:end].copy_(new[layer].unflatten(0, (S, F)))
                scratch[layer] = old[layer, :, :end].reshape(S * end, *old.shape[3:])
            # nodes of previous levels have no query
            wide = q.new_zeros(S, end, *q.shape[1:])
            wide[:, begin:].copy_(q.unflatten(0, (S, F)))
            out = whole(layer, wide.flatten(0, 1), **properties)
            return out.unflatten(0, (S, end))[:, begin:].flatten(0, 1)

        row_position = position[:, None].expand(S, F).reshape(-1)
        hidden = self.net.forward(
            token.reshape(-1).int(),
            row_position,
            hidden.flatten(0, 1),
            attend,
            new_k,
            new_v,
            self.ops,
        )
        return hidden.unflatten(0, (S, F))

    def _attention(
        self, where: dict, words: torch.Tensor, slots: Slots, node_k: Any, node_v: Any
    ) -> LayerAttention:
        where = where | dict(
            prompt_pages=self.prompt_pages,
            prompt_len=self.base(slots),
            slot_pages=self.slot_pages,
            slot_len=self.length,
            ancestors=words,
        )
        return self.attention(where, node_k, node_v)
