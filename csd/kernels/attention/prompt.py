"""Causal attention of chunks of prompts, each over its own prompt so far, and the rows of a pass.

    out[r, h] = sum over t <= start + r of softmax(scale * q[r, h] . k[t, h // (H / K)]) v[t, ..]

for row r of a chunk, which follows `start` tokens of its prompt. PyTorch's own attention computes
it on every device: a prompt is read only once, and PyTorch's kernels are hard to beat there.

`attend_chunk` takes one chunk, on a CPU the rows of one page at a time. `attend_visible` takes rows
with a window, a chunk size, a cap on scores or sinks (`reference.py` has the formula); with a cap
or sinks it multiplies as the reference does. `prompt_attention` takes several chunks, whose rows
and keys are concatenated: in 16 bits on a GPU by one launch of flash attention over ragged lengths,
else by one call per chunk. Both give a chunk the same bits whatever other chunks there are: neither
splits keys by the number of chunks, and no block of queries has rows of two chunks.

`PromptRows` has the rows of a pass and their places in the pages, computed once per pass. Place p
of prompt g is token p % 64 of page prompt_pages[g, p // 64]; `index` counts the tokens of all
pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.backends import cuda as backend

from csd.kernels.attention.reference import Properties, in_reach, weights, without_autocast
from csd.state.kv_cache import PAGE, pages_for
from csd.state.record import check_tensor
from csd.utils.device import upload

aten = torch.ops.aten


def attend_chunk(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [start + R, K, D]
    v: torch.Tensor,  # [start + R, K, D]
    start: int,
    scale: float,
) -> torch.Tensor:
    """Returns the attention [R, H, D] of rows r that are the prompt's tokens start + r."""
    if q.device.type == "cpu":
        return _attend_pages(q, k, v, start, scale)
    rows, end = q.shape[0], k.shape[0]
    # [1, heads, tokens, D]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = None
    if takes_flash(q, k, v):
        # its causal mask is aligned to the last query and the last key
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
        return out[0].transpose(0, 1)
    if start:
        # loads PyTorch's compiler, over a second: at the first long prompt, not at csd's import
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(rows, end)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=start == 0,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def pieces_of(start: int, rows: int, device: torch.device) -> list[slice]:
    """Rows of a chunk at positions `start` on that one call of PyTorch's attention takes.

    On a CPU the rows of one page each: PyTorch's kernel there takes blocks of rows and keys that
    depend on their numbers, so only then do the bits of a whole page's rows follow from its place,
    whatever the chunk.
    """
    if device.type != "cpu":
        return [slice(0, rows)]
    ends = [*range(PAGE - start % PAGE, rows, PAGE), rows]
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def _attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """`attend_chunk` on a CPU, by a call for each of `pieces_of` with the keys up to its end."""
    # zero up to a page, in which a row sees the tokens up to its own: the last columns are the page
    mask = q.new_zeros(PAGE, -(-k.shape[0] // PAGE) * PAGE)
    mask[:, -PAGE:].fill_(float("-inf")).triu_(1)
    outs = []
    for piece in pieces_of(start, q.shape[0], q.device):
        begin, end = start + piece.start, start + piece.stop
        page = begin // PAGE * PAGE
        # [1, heads, tokens, D]
        rows, keys, values = (x.transpose(0, 1)[None] for x in (q[piece], k[:end], v[:end]))
        visible = mask[begin - page : end - page, mask.shape[1] - PAGE - page :][:, :end]
        out = F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=visible, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def takes_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if flash attention supports the operands, and so is called directly.

    PyTorch's own choice may be cuDNN's attention, which prepares for each new length.
    """
    if not q.is_cuda or q.shape[-1] % 8:
        return False
    return backend.can_use_flash_attention(backend.SDPAParams(q, k, v, None, 0.0, False, True))


def tokens_of(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Tokens [tokens, K, D] of the pages in `table`, a view if a CPU's page ids are consecutive.

    The host reads the table only if the cache is on a CPU.
    """
    if cache.device.type == "cpu":
        ids = table.tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            return cache[ids[0] : ids[0] + len(ids)].flatten(0, 1)
    return cache.index_select(0, table).flatten(0, 1)


class VisibleKeys(NamedTuple):
    """Keys of a prompt that at least one row of a chunk attends to, in order of position."""

    places: torch.Tensor  # [T] int64, indices among the tokens of all pages
    visible: torch.Tensor  # [R, T] bool: the row attends to the key


def visible_keys(
    pages: torch.Tensor,  # [PP] int32, the group's row of prompt_pages
    start: int,
    rows: int,
    window: int | None,
    chunk: int | None,
) -> VisibleKeys:
    """Keys that at least one row at positions start .. start + rows - 1 attends to."""
    end = start + rows
    first = 0 if window is None else max(0, start - window + 1)
    if chunk is not None:
        first = max(first, start // chunk * chunk)
    position, own = (
        torch.arange(*ends, device=pages.device) for ends in ((first, end), (start, end))
    )
    places = pages.long()[position // PAGE] * PAGE + position % PAGE
    return VisibleKeys(places, in_reach(own[:, None], position, window, chunk))


@without_autocast
def attend_visible(
    q: torch.Tensor,  # [R, H, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    keys: VisibleKeys,
    properties: Properties,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns the attention [R, H, Dv] over the visible keys, which are read from the pages."""
    p, (places, visible) = properties, keys
    k, v = (x.flatten(0, 1)[places] for x in (k_pages, v_pages))
    if p.softcap is None and sinks is None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=p.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(dtype).unflatten(1, (p.kv_heads, -1)) * p.scale
    score = torch.einsum("rkgd,nkd->kgrn", queries, k.to(dtype))
    weight = weights(score, visible, p.softcap, sinks)
    return torch.einsum("kgrn,nkd->rkgd", weight, v.to(dtype)).flatten(1, 2).to(q.dtype)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sizes of the chunks of C prompts that are read in one pass."""

    starts: tuple[int, ...]  # tokens of the prompt before the chunk
    rows: tuple[int, ...]  # tokens of the chunk, at least 1
    row_ends: torch.Tensor  # [C + 1] int32, sums of rows from 0
    key_ends: torch.Tensor  # [C + 1] int32, sums of starts + rows from 0

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.starts, self.rows, strict=True)))


def prompt_attention(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [T, K, D]
    v: torch.Tensor,  # [T, K, D]
    chunks: Chunks,
    scale: float,
) -> torch.Tensor:
    """Returns the attention [R, H, D]. R: sum of the chunks' rows; T: sum of their keys."""
    rows, keys = chunks.rows, chunks.keys
    if q.dim() != 3 or k.dim() != 3 or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q and k must be [R, H, D] and [T, K, D] with H a multiple of K, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    shape = (sum(keys), k.shape[1], q.shape[2])
    check_tensor("q", q, (sum(rows), None, None), None, q.device, any_layout=True)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, shape, q.dtype, q.device, rows_apart=True)
    if takes_flash(*(x.transpose(0, 1)[None] for x in (q, k, v))):
        # upper bounds of the lengths; with a bound of one row the kernel would use other code
        longest = max(2, *rows), max(2, *keys)
        out: torch.Tensor = aten._flash_attention_forward(
            q, k, v, chunks.row_ends, chunks.key_ends, *longest, 0.0, True, False, scale=scale
        )[0]
        return out
    parts = zip(q.split(rows), k.split(keys), v.split(keys), chunks.starts, strict=True)
    outs = [attend_chunk(*part, scale) for part in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


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
            x[: len(values)] for x, values in zip(held, lists, strict=True)
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
            position = torch.cat([torch.arange(n) for n in keys])
            group = torch.tensor(self.groups).repeat_interleave(torch.tensor(keys))
            held = upload(torch.stack((group, position)).int(), cache.device)
            self._keys = _index(self.prompt_pages, *held)
        return cache.flatten(0, 1).index_select(0, self._keys)


def _index(prompt_pages: torch.Tensor, group: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    page = prompt_pages.flatten().index_select(0, group * prompt_pages.shape[1] + position // PAGE)
    return page.long() * PAGE + position % PAGE
