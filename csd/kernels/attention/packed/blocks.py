"""The packed attention on a CPU: matrix products of blocks of rows with the blocks that they see.

The rows are cut into blocks of at most BLOCK, where a sample's rows end if that leaves no small
ones. A block of rows multiplies with every block of keys of which it sees one; most it sees whole,
and these need no mask. Query heads that share a key-value head are rows of one product. A key's
gradient is the sum over its rows in the order of their blocks, so two runs have equal bits.

PyTorch's flash attention for CPUs takes as long by key and row in float32, and has neither caps nor
shared heads; in 16 bits these products are computed in float32.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from csd.kernels.attention.packed.layout import visible_rows
from csd.kernels.attention.packed.reference import grad_of_sinks, wide_dtype
from csd.kernels.attention.reference import without_autocast

# rows of a block, and rows of a run that is a block of its own
BLOCK, SMALL = 128, 32


class Block(NamedTuple):
    number: int
    first: int
    last: int
    low: int  # least and largest end of its rows
    high: int

    @property
    def all(self) -> slice:
        return slice(self.first, self.last)


def cut_rows(end: list[int]) -> list[Block]:
    """Blocks of consecutive rows, in order."""
    runs, first = [], 0
    for row in range(1, len(end) + 1):
        if row == len(end) or end[row] != end[first]:
            runs.append((first, row))
            first = row
    cuts: list[tuple[int, int]] = []
    for first, last in runs:
        rows = last - first
        if cuts and min(rows, cuts[-1][1] - cuts[-1][0]) < SMALL and last - cuts[-1][0] <= BLOCK:
            cuts[-1] = cuts[-1][0], last
            continue
        parts = -(-rows // BLOCK)
        bounds = [first + rows * i // parts for i in range(parts + 1)]
        cuts += pairwise(bounds)
    return [Block(n, a, b, min(end[a:b]), max(end[a:b])) for n, (a, b) in enumerate(cuts)]


def keys_of(
    rows: Block,
    blocks: list[Block],
    layout: tuple[torch.Tensor, torch.Tensor, int | None, int | None],
) -> Iterator[tuple[Block, torch.Tensor | None]]:
    """Blocks of keys of which a row sees one, with [rows, keys] bool, or None for all True.

    layout: as `visible_rows` takes it. The rows' own block is first: then every row has seen a key,
    its own.
    """
    _, _, window, chunk = layout
    for keys in reversed(blocks[: rows.number + 1]):
        if keys.high <= rows.first:
            continue
        if keys.number < rows.number and keys.low >= rows.last and window is chunk is None:
            yield keys, None
            continue
        seen = visible_rows(*layout, rows.all, keys.all)
        if seen.any():
            yield keys, None if seen.all() else seen


def _by_kv_head(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[K, R H / K, ..] of x [R, H, ..]: a row's heads side by side."""
    return x.unflatten(1, (kv_heads, -1)).transpose(0, 1).to(dtype).flatten(1, 2).contiguous()


def _by_row(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The reverse of `_by_kv_head`: [R, H, ..] in the dtype of `like`, which has R rows."""
    R = like.shape[0]
    return x.unflatten(1, (R, -1)).transpose(0, 1).flatten(1, 2).to(like.dtype).contiguous()


class _Operands:
    """Rows and keys by key-value head, and the scores of blocks."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None):
        self.each, self.softcap = q.shape[1] // k.shape[1], softcap
        wide = wide_dtype(q)
        # [K, R H / K, D], [K, R, D]
        self.q = _by_kv_head(q, k.shape[1], wide) * scale
        self.k = _by_kv_head(k, k.shape[1], wide)

    def rows(self, block: Block) -> slice:
        return slice(block.first * self.each, block.last * self.each)

    def by_head(self, sinks: torch.Tensor | None, rows: Block) -> torch.Tensor:
        """[K, rows H / K, 1]: each head's sink, or -inf."""
        K, count = self.k.shape[0], rows.last - rows.first
        if sinks is None:
            return self.k.new_full((K, count * self.each, 1), float("-inf"))
        return sinks.to(self.k.dtype).view(K, 1, -1).repeat(1, count, 1).view(K, -1, 1)

    def scores(
        self, rows: Block, keys: Block, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[K, rows H / K, keys], and the cap's derivative at each if there is a cap."""
        k = self.k[:, keys.all]
        score, slope = torch.bmm(self.q[:, self.rows(rows)], k.transpose(1, 2)), None
        if self.softcap is not None:
            tanh = score.div_(self.softcap).tanh_()
            slope = 1 - tanh * tanh
            score = tanh.mul_(self.softcap)
        if seen is not None:
            hidden = ~seen[None, :, None]
            score.unflatten(1, (-1, self.each)).masked_fill_(hidden, float("-inf"))
        return score, slope


@without_autocast
def packed_attention_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    end: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse, as `packed_attention_ref`."""
    operands, layout = _Operands(q, k, scale, softcap), (end, position, window, chunk)
    blocks = cut_rows(end.tolist())
    values = _by_kv_head(v, k.shape[1], operands.k.dtype)
    out = values.new_empty(*operands.q.shape[:2], v.shape[2])
    lse = values.new_empty(*operands.q.shape[:2], 1)
    for rows in blocks:
        part = operands.rows(rows)
        acc = torch.zeros_like(out[:, part])
        # a sink is a score without a value
        peak = operands.by_head(sinks, rows)
        total = torch.isfinite(peak).to(peak.dtype)
        for keys, seen in keys_of(rows, blocks, layout):
            score, _ = operands.scores(rows, keys, seen)
            top = torch.maximum(peak, score.amax(-1, keepdim=True))
            shrink, peak = peak.sub_(top).exp_(), top
            weight = score.sub_(top).exp_()
            total.mul_(shrink).add_(weight.sum(-1, keepdim=True))
            acc.mul_(shrink).baddbmm_(weight, values[:, keys.all])
        out[:, part] = acc.div_(total)
        lse[:, part] = total.log_().add_(peak)
    return _by_row(out, q), _by_row(lse, operands.k[0, :, 0])[..., 0]


@without_autocast
def packed_backward_blocks(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    end: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq, dk, dv and dsinks, as `packed_attention_backward_ref`."""
    if lse is None:
        none = v.new_empty(*v.shape[:2], 0)
        lse = packed_attention_blocks(
            q, k, none, end, position, scale, window, chunk, softcap, sinks
        )[1]
    operands, layout = _Operands(q, k, scale, softcap), (end, position, window, chunk)
    blocks = cut_rows(end.tolist())
    wide, K = operands.k.dtype, k.shape[1]
    dout, values = (_by_kv_head(x, K, wide) for x in (grad, v))
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    dsinks = grad_of_sinks(sinks, lse.to(wide), delta, q)
    # [K, R H / K, 1], subtracted inside the products
    less_lse, less_delta = (_by_kv_head(-x[..., None], K, wide) for x in (lse, delta))
    dq, dk, dv = (torch.zeros_like(x) for x in (operands.q, operands.k, values))
    for rows in blocks:
        part = operands.rows(rows)
        q_block, dout_block = operands.q[:, part], dout[:, part]
        for keys, seen in keys_of(rows, blocks, layout):
            columns = keys.all
            score, slope = operands.scores(rows, keys, seen)
            weight = score.add_(less_lse[:, part]).exp_()
            dv[:, columns].baddbmm_(weight.transpose(1, 2), dout_block)
            dscore = torch.baddbmm(
                less_delta[:, part], dout_block, values[:, columns].transpose(1, 2)
            )
            dscore.mul_(weight)
            if slope is not None:
                dscore.mul_(slope)
            dq[:, part].baddbmm_(dscore, operands.k[:, columns])
            dk[:, columns].baddbmm_(dscore.transpose(1, 2), q_block)
    return _by_row(dq.mul_(scale), q), _by_row(dk, k), _by_row(dv, v), dsinks
