"""Causal attention of chunks of prompts, each over its own prompt so far, and the rows of a pass.

    out[r, h] = sum over t <= start + r of softmax(scale * q[r, h] . k[t, h // (H / K)]) v[t, ..]

for row r of a chunk, which follows `start` tokens of its prompt. PyTorch's own attention computes
it on every device: a prompt is read only once, and PyTorch's kernels are hard to beat there. In
float32 on a CPU a step's loop does (`cpu/prompt.py`), which is as fast and has its bits everywhere.

`attend_chunk` takes one chunk. `attend_visible` takes a chunk with a window, a chunk size, a cap on
scores or sinks (`reference.py` has the formula); with a cap or sinks it multiplies as the reference
does. `prompt_attention` takes several chunks, whose rows and keys are concatenated: in 16 bits on a
GPU by one launch of flash attention over ragged lengths, else by one call per chunk. Both give a
chunk the same bits whatever other chunks there are: neither splits keys by the number of chunks,
and no block of queries has rows of two chunks.

On a CPU every call has the rows of one whole page (`pieces_of`), so a row's bits follow from the
prompt and the row's place in it, whatever the chunks. On a GPU they follow from the chunks' places
too.

`PromptRows` has the rows of a pass and their places in the pages, computed once per pass. Place p
of prompt g is token p % 64 of page prompt_pages[g, p // 64]; `index` counts the tokens of all
pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.backends import cuda as backend
from torch.nn.utils.rnn import pad_sequence

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
    # [1, heads, tokens, D]
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    if takes_flash(*heads):
        # its causal mask is aligned to the last query and the last key
        out = aten._scaled_dot_product_flash_attention(*heads, 0.0, True, scale=scale)[0]
        return out[0].transpose(0, 1)
    mask = None
    if start:
        # loads PyTorch's compiler, over a second: at the first long prompt, not at csd's import
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[0], k.shape[0])
    return _attended(q, k, v, mask, scale)


class PromptPiece(NamedTuple):
    """Rows of a chunk that one call of PyTorch's attention takes."""

    rows: slice  # of the chunk
    before: int = 0  # rows of zeros in place of earlier ones
    behind: int = 0  # rows, and keys, of zeros in place of later ones

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Rows [before + rows + behind, H, D] of a chunk's q [R, H, D]."""
        return _with_zeros(q[self.rows], self.before, self.behind)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [T + behind, K, D] of those x [T, K, D] up to the last row's."""
        return _with_zeros(x, 0, self.behind)

    def own(self, out: torch.Tensor) -> torch.Tensor:
        """The chunk's rows of a call's result."""
        return out[self.before : out.shape[0] - self.behind]


def _with_zeros(x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, 0, before, behind)) if before or behind else x


def pieces_of(start: int, rows: int, device: torch.device) -> list[PromptPiece]:
    """Pieces of a chunk at positions `start`: one on a GPU, one for each page on a CPU.

    PyTorch's kernel on a CPU takes blocks of rows and keys that depend on their numbers. So a piece
    there is a whole page, with zeros in place of the rows that the chunk does not have.
    """
    if device.type != "cpu":
        return [PromptPiece(slice(0, rows))]
    pieces = []
    for page in range(start // PAGE * PAGE, start + rows, PAGE):
        begin, end = max(start, page), min(start + rows, page + PAGE)
        pieces.append(
            PromptPiece(slice(begin - start, end - start), begin - page, page + PAGE - end)
        )
    return pieces


def _attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """`attend_chunk` on a CPU, by a call for each of `pieces_of` with the keys up to its end."""
    # zero up to a page, in which a row sees the tokens up to its own: the last columns are the page
    mask = q.new_zeros(PAGE, -(-k.shape[0] // PAGE) * PAGE)
    mask[:, -PAGE:].fill_(float("-inf")).triu_(1)
    outs = []
    for piece in pieces_of(start, q.shape[0], q.device):
        keys, values = (piece.keys(x[: start + piece.rows.stop]) for x in (k, v))
        outs.append(
            piece.own(_attended(piece.queries(q), keys, values, mask[:, -keys.shape[0] :], scale))
        )
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attended(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [T, K, D]
    v: torch.Tensor,  # [T, K, Dv]
    mask: torch.Tensor | None,  # [R, T], or None for a causal one
    scale: float,
) -> torch.Tensor:
    """PyTorch's attention [R, H, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


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
    """Keys of a prompt that at least one row of a piece attends to, in order of position."""

    piece: PromptPiece
    places: torch.Tensor  # [T] int64, indices among the tokens of all pages
    visible: torch.Tensor  # [R, T + piece.behind] bool: the row attends to the key


def visible_keys(
    places: torch.Tensor,  # [tokens] int64, of all tokens of the prompt up to the chunk's last
    start: int,
    window: int | None,
    chunk: int | None,
) -> list[VisibleKeys]:
    """Keys of each of `pieces_of` the chunk of the tokens from position `start` on."""
    device, keys = places.device, []
    for piece in pieces_of(start, len(places) - start, device):
        end = start + piece.rows.stop
        begin = start + piece.rows.start - piece.before
        first = 0 if window is None else max(0, begin - window + 1)
        if chunk is not None:
            first = max(first, begin // chunk * chunk)
        position, own = (torch.arange(x, end + piece.behind, device=device) for x in (first, begin))
        visible = in_reach(own[:, None], position, window, chunk)
        keys.append(VisibleKeys(piece, places[first:end], visible))
    return keys


@without_autocast
def attend_visible(
    q: torch.Tensor,  # [R, H, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    keys: list[VisibleKeys],
    properties: Properties,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns the attention [R, H, Dv] over the visible keys, which are read from the pages."""
    p, outs, dtype = properties, [], torch.promote_types(q.dtype, torch.float32)
    for piece, places, visible in keys:
        rows = piece.queries(q)
        k, v = (piece.keys(x.flatten(0, 1)[places]) for x in (k_pages, v_pages))
        if p.softcap is None and sinks is None:
            out = _attended(rows, k, v, visible, p.scale)
        else:
            queries = rows.to(dtype).unflatten(1, (p.kv_heads, -1)) * p.scale
            score = torch.einsum("rkgd,nkd->kgrn", queries, k.to(dtype))
            weight = weights(score, visible, p.softcap, sinks)
            out = torch.einsum("kgrn,nkd->rkgd", weight, v.to(dtype)).flatten(1, 2)
        outs.append(piece.own(out).to(q.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


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
    attend: Callable = attend_chunk,
) -> torch.Tensor:
    """Returns the attention [R, H, D]. R: sum of the chunks' rows; T: sum of their keys.

    attend: `attend_chunk`, or a backend's function in its place.
    """
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
    outs = [attend(*part, scale) for part in parts]
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
        lists = [
            torch.tensor([t for part in parts for t in part.tokens]),
            torch.cat([torch.arange(s, s + n) for s, n in zip(starts, rows, strict=True)]),
            torch.tensor([part.group for part in parts]).repeat_interleave(torch.tensor(rows)),
            *ends,
        ]
        host = pad_sequence(lists, batch_first=True).int()
        held = upload(F.pad(host, (0, -host.shape[1] % ALIGNED)), prompt_pages.device)
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

    def places(self) -> torch.Tensor:
        """[T] int64: places of the tokens of the only chunk's prompt so far, see `index`."""
        (group,), (count,) = self.groups, self.chunks.keys
        position = torch.arange(count, device=self.prompt_pages.device)
        return _index(self.prompt_pages[group], 0, position)

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


def _index(
    prompt_pages: torch.Tensor, group: torch.Tensor | int, position: torch.Tensor
) -> torch.Tensor:
    page = prompt_pages.flatten().index_select(0, group * prompt_pages.shape[-1] + position // PAGE)
    return page.long() * PAGE + position % PAGE
