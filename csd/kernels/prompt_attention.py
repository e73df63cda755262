"""Causal attention of chunks of prompts, each over its own prompt so far.

    out[r, h] = sum over t <= start + r of softmax(scale * q[r, h] . k[t, h // (H / K)]) v[t, ..]

for row r of each chunk, which follows `start` tokens of its prompt, over the keys of that prompt.
Rows and keys of the chunks are concatenated. PyTorch's own attention computes it: in 16 bits on a
GPU by one launch of flash attention over ragged lengths, else by one call per chunk. Both give a
chunk the same bits whatever other chunks there are: neither splits keys by the number of chunks,
and no block of queries has rows of two chunks.
"""

from dataclasses import dataclass

import torch

from csd.kernels.checks import check_tensor
from csd.kernels.chunk_attention import attend_chunk, takes_flash

aten = torch.ops.aten


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
        found: torch.Tensor = aten._flash_attention_forward(
            q, k, v, chunks.row_ends, chunks.key_ends, *longest, 0.0, True, False, scale=scale
        )[0]
        return found
    parts = zip(q.split(rows), k.split(keys), v.split(keys), chunks.starts, strict=True)
    outs = [attend_chunk(*part, scale) for part in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs)
