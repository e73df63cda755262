"""Plain PyTorch reference of the tree attention, made to be cheap on a CPU too.

The formula is in `csd/kernels/tree_attention/`. What the host must know of a step (page runs,
row ranges, the mask of the nodes) is worked out once by `host_work` and serves every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from csd.state.kv_cache import PAGE


@dataclass(slots=True)
class HostSlot:
    """A slot's rows within its group's, and where its committed tokens are."""

    first: int
    last: int
    tokens: slice | torch.Tensor
    count: int


@dataclass(slots=True)
class HostGroup:
    """A group's rows of the pool, where its prompt's tokens are, and its slots with rows."""

    first: int
    last: int
    tokens: slice | torch.Tensor
    count: int
    hidden: torch.Tensor  # [R, 1, R] bool: the group's node j is not an ancestor of row i
    slots: list[HostSlot]
    # [K, R * H / K, W], shared by the layers: fresh memory costs more than the arithmetic
    score: torch.Tensor | None = None
    p: torch.Tensor | None = None


def host_work(
    prompt_pages: torch.Tensor,
    prompt_len: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    ancestors: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
) -> list[HostGroup]:
    """What `tree_attention_ref` must know on the host: made once a step, used by every layer."""
    starts, nodes, lens = slot_start.tolist(), slot_nodes.tolist(), slot_len.tolist()
    prompt_lens, bounds = prompt_len.tolist(), group_start.tolist()
    live = sorted((starts[s], s) for s in range(len(starts)) if nodes[s])
    groups = []
    for g in range(len(bounds) - 1):
        first, last = bounds[g], bounds[g + 1]
        if first == last:
            continue
        members = [
            HostSlot(
                row - first, row - first + nodes[s], token_places(slot_pages[s], lens[s]), lens[s]
            )
            for row, s in live
            if first <= row < last
        ]
        places = token_places(prompt_pages[g], prompt_lens[g])
        hidden = _hidden(slot[first:last], ancestors[first:last], slot_start, first)
        groups.append(HostGroup(first, last, places, prompt_lens[g], hidden, members))
    return groups


def token_places(pages: torch.Tensor, count: int) -> slice | torch.Tensor:
    """Token places of `count` tokens: a slice when their pages follow one another."""
    table = pages[: (count + PAGE - 1) // PAGE]
    ids = table.tolist()
    if not ids:
        return slice(0, 0)
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return slice(ids[0] * PAGE, ids[0] * PAGE + count)
    offset = torch.arange(count, device=pages.device)
    return table.long()[offset // PAGE] * PAGE + offset % PAGE


def _hidden(
    slot: torch.Tensor, ancestors: torch.Tensor, slot_start: torch.Tensor, first: int
) -> torch.Tensor:
    row = torch.arange(first, first + slot.shape[0], device=slot.device)
    # a place outside the slot's 64 nodes is another slot's and hidden whatever the word says
    place = (row - slot_start[slot.long()]).clamp(0, 63)
    seen = (ancestors[:, None] >> place) & 1 == 1
    return ~(seen & (slot[:, None] == slot)).unsqueeze(1)


def without_autocast(function: Callable) -> Callable:
    """Products stay in their operands' dtype: autocast would round them, and these are exact."""

    @wraps(function)
    def call(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kind = q.device.type
        if not torch.is_autocast_enabled(kind):
            return function(q, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(q, *args, **kwargs)

    return call


@without_autocast
def tree_attention_ref(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, D]
    prompt_pages: torch.Tensor,  # [G, PP] int32
    prompt_len: torch.Tensor,  # [G] int32
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    ancestors: torch.Tensor,  # [M] int64
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
    scale: float,
    work: list[HostGroup] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain PyTorch, in the inputs' dtype but at least float32. work: `host_work` of the step.

    A group's scores are one matrix with the columns [prompt | nodes | committed]: the prompt's and
    the nodes' of all its rows at once, then each slot's own tokens, padded to the longest.
    """
    if work is None:
        work = host_work(
            prompt_pages,
            prompt_len,
            slot_pages,
            slot_len,
            slot,
            ancestors,
            slot_start,
            slot_nodes,
            group_start,
        )
    H, D = q.shape[1:]
    K = node_k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q) if out is None else out.zero_()
    # [K, tokens, D]: one matrix a key-value head, without a copy
    k_pages, v_pages = (x.flatten(0, 1).transpose(0, 1) for x in (k_pages, v_pages))
    node_k, node_v = (x.transpose(0, 1).to(dtype) for x in (node_k, node_v))
    for group in work:
        first, last, prompt = group.first, group.last, group.count
        rows, each, nodes = last - first, H // K, prompt + last - first
        width = nodes + max((s.count for s in group.slots), default=0)
        # the query heads of a key-value head are rows of one matrix: [K, rows * each, D]
        packed = q[first:last].to(dtype).mul(scale).view(rows, K, each, D).transpose(0, 1)
        packed = packed.reshape(K, rows * each, D)

        if group.score is None or group.p is None:
            # what no slot writes is -inf for good: padding behind its committed tokens
            group.score = packed.new_full((K, rows * each, width), float("-inf"))
            group.p = torch.empty_like(group.score)
        score, p = group.score, group.p
        if prompt:
            score[:, :, :prompt] = packed.bmm(k_pages[:, group.tokens].to(dtype).mT)
        score[:, :, prompt:nodes] = packed.bmm(node_k[:, first:last].mT)
        score.view(K, rows, each, width)[..., prompt:nodes].masked_fill_(
            group.hidden, float("-inf")
        )
        for s in group.slots:
            if s.count:
                mine = slice(s.first * each, s.last * each)
                keys = k_pages[:, s.tokens].to(dtype)
                score[:, mine, nodes : nodes + s.count] = packed[:, mine].bmm(keys.mT)

        torch.softmax(score, -1, out=p)
        # [K, rows * each, D]
        acc = p[:, :, prompt:nodes].bmm(node_v[:, first:last])
        if prompt:
            acc.baddbmm_(p[:, :, :prompt], v_pages[:, group.tokens].to(dtype))
        for s in group.slots:
            if s.count:
                mine = slice(s.first * each, s.last * each)
                values = v_pages[:, s.tokens].to(dtype)
                acc[:, mine].add_(p[:, mine, nodes : nodes + s.count].bmm(values))
        heads = acc.view(K, rows, each, D).transpose(0, 1)
        out[first:last].view(rows, K, each, D).copy_(heads)
    return out
