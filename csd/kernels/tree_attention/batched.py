"""Tree attention in a handful of PyTorch calls, whose result for a row has the same bits always.

The formula is in `csd/kernels/tree_attention/`. All keys and values that a step attends to are
copied to one buffer, the prompt's once per group and the generated ones once per tile
(`batched_work`). A row's scores are one line of a matrix, [prompt | body | tail]; its weights are
exp(score - m) with m the largest of the line, and masked ones are exact zeros. Values have a column
of ones, so that the sum of the weights comes from the same products.

The result is a function of the row's own query, keys and values, to the bit: it does not depend on
the other rows of the step, nor on which of its keys are nodes and which are committed. For products
that add their terms in order, it suffices that a row's terms are in the same order, with any zeros
between them. Libraries add in order up to some number of terms, more than `BLOCK` and a tail's
keys, so the values of the prompt, of each block of the body at its fixed place, and of the tail are
separate products, added in that order. `check_products` tests all this on the current machine.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from csd.kernels.tree_attention.batched_work import LEAST_KEYS, BatchedWork, batched_work
from csd.kernels.tree_attention.reference import without_autocast

# most generated keys of a product
BLOCK = 128
# columns added after a value, a whole vector; the first has ones
BEHIND = 8


@without_autocast
def tree_attention_batched(
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
    work: BatchedWork | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `tree_attention`, computed in at least float32. work: the step's `batched_work`.

    Fastest if pages and nodes, keys and values, are parts of one tensor, as in a `KVCache`.
    """
    H, D = q.shape[1:]
    K = node_k.shape[1]
    if work is None:
        work = batched_work(
            H, K, prompt_pages, prompt_len, slot_pages, slot_len, slot, ancestors, slot_start,
            slot_nodes, group_start,
        )  # fmt: skip
    R = work.rows
    out = torch.empty_like(q) if out is None else out
    if q.shape[0] > R:
        out[R:].zero_()
    if R == 0:
        return out
    parts = k_pages, v_pages, node_k, node_v
    memory, places = _memory(*parts)
    key = places, memory is None, q.dtype
    if key not in work.kept:
        work.kept[key] = _Layers(work, places, H, K, D, q)
    step: _Layers = work.kept[key]

    if memory is None:
        for x, (at, row) in zip(parts, step.apart(places), strict=True):
            step.found.index_copy_(0, at, x.reshape(-1, D).index_select(0, row))
    else:
        torch.index_select(memory, 0, step.index, out=step.found)
    step.wide[:, :D].copy_(step.found)
    rows = q[:R] if step.row is None else q.index_select(0, step.row)
    step.queries.copy_(rows.view(-1, K, H // K, D).transpose(0, 1)).mul_(scale)

    for part in step.prompts:
        _product(part.queries, part.keys, part.product)
        part.score.copy_(part.product[..., : part.score.shape[-1]])
    _product(step.own.queries, step.own.keys, step.own.product)
    # adding takes a fraction of the time that masking does
    torch.add(step.own.product.view(step.own.score.shape), step.bias, out=step.own.score)
    torch.sub(step.score, step.score.amax(-1, keepdim=True), out=step.weight).exp_()
    for part in step.prompts:
        _product(part.weight, part.values, part.sums)
    for weight, values in step.blocks:
        _add_product(step.own.sums, weight, values)

    # [K, R, each, D + BEHIND]
    sums = step.sums if step.place is None else step.sums.index_select(1, step.place)
    sums = sums.view(K, R, H // K, -1)
    torch.div(
        sums[..., :D], sums[..., D : D + 1], out=out[:R].view(R, K, H // K, D).transpose(0, 1)
    )
    return out


@dataclass(slots=True)
class _Part:
    """Operands of B products over shared keys, n query rows and P keys each."""

    queries: torch.Tensor  # [B, n, D]
    keys: torch.Tensor  # [B, D, P]
    values: torch.Tensor  # [B, P, D + BEHIND]
    product: torch.Tensor  # [B, n, P]: contiguous, which is faster and adds in the same order
    score: torch.Tensor  # view to which the scores of existing keys are copied
    weight: torch.Tensor  # [B, n, P]
    sums: torch.Tensor  # [B, n, D + BEHIND]


class _Layers:
    """Buffers that a step's layers share, and every view of them that the layers need.

    Allocating memory costs more than the arithmetic, and a view as much as a small operation.
    """

    def __init__(
        self,
        work: BatchedWork,
        places: tuple[int, ...],
        H: int,
        K: int,
        D: int,
        q: torch.Tensor,
    ):
        device, dtype = q.device, torch.promote_types(q.dtype, torch.float32)
        T, r, each = work.tiles, work.tile_rows, H // K
        n, W = r * each, work.token.shape[1]

        def whole(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def host(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        same = T * r == work.rows
        self.row = None if same else host(work.row)
        self.place = None if same else host(work.place)
        prompts = [_filled(g.tokens, work.row[g.first * r]) for g in work.groups]
        indices = [_index(x, places, K) for x in (work.token, *prompts)]
        self.index = host(np.concatenate([i.ravel() for i in indices]))
        self._apart: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.found = torch.empty(self.index.shape[0], D, dtype=q.dtype, device=device)
        self.wide = whole(self.index.shape[0], D + BEHIND)
        self.wide[:, D:] = 0
        self.wide[:, D] = 1

        longest = max(x.size for x in prompts)
        self.queries = whole(K, T * r, each, D)
        self.score = whole(K, T * n, longest + W).fill_(float("-inf"))
        self.weight = torch.empty_like(self.score)
        sums = whole(K, T * n, D + BEHIND)
        self.sums = sums.view(K, T * r, -1)
        self.bias = host(np.where(work.hidden, -np.inf, 0.0)[:, :, None]).to(dtype)

        queries = self.queries.view(K, -1, D)
        at, (keys, values) = 2 * K * T * W, self.wide[: 2 * K * T * W].view(2, K * T, W, -1)
        self.own = _Part(
            queries.view(K * T, n, D), keys[..., :D].mT, values, whole(K * T, n, W),
            self.score.view(K, T, r, each, -1)[..., longest:],
            self.weight.view(K * T, n, -1)[..., longest:], sums.view(K * T, n, -1),
        )  # fmt: skip
        cuts = [*range(0, work.body, BLOCK), work.body, W]
        self.blocks = [
            (self.own.weight[..., low:high], values[:, low:high])
            for low, high in pairwise(cuts)
            if low < high
        ]
        self.prompts = []
        for group, filled in zip(work.groups, prompts, strict=True):
            P, rows = filled.size, slice(group.first * n, group.last * n)
            product = whole(K, rows.stop - rows.start, P)
            keys, values = self.wide[at : at + 2 * K * P].view(2, K, P, -1)
            at += 2 * K * P
            self.prompts.append(
                _Part(
                    queries[:, rows], keys[..., :D].mT, values, product,
                    self.score[:, rows, : group.tokens.size], self.weight[:, rows, :P],
                    sums[:, rows],
                )
            )  # fmt: skip

    def apart(self, places: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Indices in `found` of the rows of each part of the memory, and rows within the part."""
        if self._apart is None:
            part = torch.bucketize(self.index, self.index.new_tensor(places), right=True) - 1
            at = [(part == i).nonzero()[:, 0] for i in range(len(places))]
            self._apart = [(x, self.index[x] - n) for x, n in zip(at, places, strict=True)]
        return self._apart


def _filled(tokens: np.ndarray, row: int) -> np.ndarray:
    """Tokens of a prompt, padded with the node `row` to the LEAST_KEYS that a product needs."""
    return np.pad(tokens, (0, max(LEAST_KEYS - tokens.size, 0)), constant_values=-1 - row)


def _index(token: np.ndarray, places: tuple[int, ...], K: int) -> np.ndarray:
    """[2, K, *token.shape]: rows of the memory with keys and with values, by key-value head."""
    k, v, node_k, node_v = places
    heads = np.arange(K).reshape(-1, *[1] * token.ndim)
    is_node, row = token < 0, np.where(token < 0, -1 - token, token) * K
    return np.stack([np.where(is_node, n, x) + row + heads for x, n in ((k, node_k), (v, node_v))])


def _memory(*parts: torch.Tensor) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """One matrix whose rows are the parts' last dimension, and the first row of each part.

    The matrix is None if they are not parts of one tensor; rows then count the parts in sequence.
    """
    D = parts[0].shape[-1]
    storage = {x.untyped_storage().data_ptr() for x in parts}
    starts = [x.storage_offset() for x in parts]
    first = min(starts)
    together = len(storage) == 1 and all((start - first) % D == 0 for start in starts)
    if together and all(x.is_contiguous() for x in parts):
        end = max(start + x.numel() for start, x in zip(starts, parts, strict=True))
        memory = parts[0].as_strided(((end - first) // D, D), (D, 1), first)
        return memory, tuple((start - first) // D for start in starts)
    counts = [x.numel() // D for x in parts]
    return None, (0, counts[0], sum(counts[:2]), sum(counts[:3]))


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a b, [B, n, k] times [B, k, m].

    A single matrix is multiplied twice, in a batch of two: its rows alone may be split among
    threads, those of several matrices are not.
    """
    if a.shape[0] > 1:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1])


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b, in place; a single matrix is multiplied twice, as in `_product`."""
    if a.shape[0] > 1:
        out.baddbmm_(a, b)
    else:
        twice = [x.expand(2, -1, -1) for x in (out, a, b)]
        out.copy_(torch.baddbmm(*twice)[:1])
