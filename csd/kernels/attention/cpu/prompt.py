"""Attention of a chunk of a prompt by the loop of a step, so that it adds in the same order.

Each page of the chunk is a slot of a group of its own: the rows of the page are a chain of drafted
nodes, the page's tokens before the chunk are committed ones, and the pages before it are the
group's prompt. So a row's bits follow from its keys and its place in the prompt alone, whatever the
chunks, and are those that a step would give the row.
"""

import numpy as np
import torch

from csd.kernels.attention import prompt
from csd.kernels.attention.cpu.attention import attend_rows, attention_kinds
from csd.kernels.numba.tensors import readable, require
from csd.state.kv_cache import PAGE


def attend_chunk(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [start + R, K, D]
    v: torch.Tensor,  # [start + R, K, D]
    start: int,
    scale: float,
) -> torch.Tensor:
    """Attention [R, H, D] of rows r that are the prompt's tokens start + r, with scale > 0.

    Raises TypeError for tensors that loops do not read.
    """
    require(readable(q, k, v), "prompt_attention", q, k, v)
    q, k, v = (x.contiguous() for x in (q, k, v))
    (R, H, D), K = q.shape, k.shape[1]
    out, keys = torch.empty_like(q), K * D * q.element_size()
    kind = np.float64 if q.dtype == torch.float64 else np.float32
    attend_rows(
        R * H * (start + R) * D // 8,
        (R, H, K, D, D, -(-(start + R) // PAGE)),
        q.data_ptr(),
        # the nodes: the chunk's own keys and values
        k.data_ptr() + start * keys,
        v.data_ptr() + start * keys,
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        attention_kinds(q.dtype, D),
        kind(scale),
        None,
        # a head's keys at a time: scores of all rows of a page fill much memory
        (K, 1),
        _layout(start, R),
    )
    return out


def _layout(start: int, rows: int) -> tuple[np.ndarray, ...]:
    """The layout of a chunk, as `attend_rows` takes it."""
    int32 = np.int32
    page = np.arange(start // PAGE, -(-(start + rows) // PAGE), dtype=int32)
    begin = np.maximum(page * PAGE, start)
    end = np.minimum((page + 1) * PAGE, start + rows)
    count = (end - begin).astype(int32)
    place = np.arange(rows) - np.repeat(begin - start, count)
    ancestors = np.uint64(0xFFFFFFFFFFFFFFFF) >> (63 - place).astype(np.uint64)
    of_prompt = np.broadcast_to(np.arange(page[-1] + 1, dtype=int32), (len(page), page[-1] + 1))
    # late pages have more keys: each thread takes early and late ones
    early = np.arange(len(page))
    order = np.stack((early, early[::-1]), 1).flatten()[: len(page)]
    return (
        np.ascontiguousarray(of_prompt),
        page * int32(PAGE),
        page[:, None].copy(),
        (begin - page * PAGE).astype(int32),
        np.repeat(np.arange(len(page), dtype=int32), count),
        ancestors.view(np.int64),
        (begin - start).astype(int32),
        count,
        np.append(begin - start, rows).astype(int32),
        order,
    )


def prompt_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: prompt.Chunks, scale: float
) -> torch.Tensor:
    """`csd.kernels.attention.prompt.prompt_attention` by the `attend_chunk` of this file."""
    return prompt.prompt_attention(q, k, v, chunks, scale, attend_chunk)
