"""Tree attention on a GPU whose result for a row has the same bits in every step.

Formula and layout are those of `csd/kernels/attention/`. Here the order in which a row's keys
are added is fixed. With n generated keys, including those on its path and its own:

    prompt   its pages by matrix products, cut at places that its length sets
    body     the slot's first T = 64 floor(max(n - 17, 0) / 64) tokens: whole pages, by the same
             products, cut every SLOT_PAGES pages
    tail     the other 1 to 80 keys, one row's alone, gathered in order of position

A node is at most 16 deep, so the body is committed whatever a step drafts, and a key of the tail is
read the same way whether it is committed or a node. Partial results are added in order of position.
Tiles always have the same number of rows, so that there is one kind of matrix instruction; masked
keys add exact zeros.

Two launches per layer: `pages_kernel` writes a partial result for every cut, `tail_kernel` adds a
row's up in order and continues with its tail. The work list of both is made once per step
(`exact_plan.py`). The reference is `tree_attention_ref`, which adds in another order: the two agree
up to rounding.
"""

import torch
import triton
import triton.language as tl

from csd.kernels.attention import (
    attention_operator,
    check_operands,
    check_properties,
    check_reach_of,
)
from csd.kernels.attention.layout import TreeLayout
from csd.kernels.attention.triton.exact_plan import (
    TAIL,
    ExactWork,
    cuts,
    plan_exact,
    plan_exact_ref,
    plan_exact_triton,
)
from csd.kernels.attention.triton.launch import DTYPES, Partials, attention_arguments
from csd.kernels.attention.triton.merge import add_partial, sinks_of
from csd.kernels.attention.triton.plan import programs_for
from csd.kernels.attention.triton.tile import (
    Operands,
    Tile,
    add_keys,
    no_keys,
    page_scores,
    put_partial,
    rows_of_heads,
    segment_of,
    store_heads,
    tile_heads,
    tile_scores,
)
from csd.state.record import check_tensor

__all__ = [
    "ExactWork",
    "exact_attention",
    "exact_attention_triton",
    "plan_exact",
    "plan_exact_ref",
    "plan_exact_triton",
]


@triton.jit
def _attend_segment(tile, limit, packed, DTYPE: tl.constexpr, C: tl.constexpr):
    """Writes the partial result of a segment for BLOCK_M packed rows of its tile, from `packed` on.

    limit: tokens of a prompt; -1 for a slot, where each row has its own limit.
    """
    work, low, high = tile.work, tile.segment.low, tile.segment.high
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    SUBS: tl.constexpr = C.PAGE // BLOCK_N
    offs_r, mask_r, row, q = rows_of_heads(tile, packed, BLOCK_M, DTYPE, C)
    acc, peak, total = no_keys(BLOCK_M, C.BLOCK_V)
    own = tl.load(work.row + row * 6 + 2, mask=mask_r & (limit < 0), other=0)
    # [BLOCK_M, 1]: end of the tokens that a row attends to
    sees = tl.where(limit < 0, own, limit)[:, None]
    last_end = tl.max(sees)
    if work.first is not None:
        # [BLOCK_M, 1]: the first token that it attends to
        part = (limit < 0).to(tl.int32)
        since = tl.load(work.first + row * 2 + part, mask=mask_r, other=0)[:, None]
    # with a cap the scores are scaled already
    unit = 1.0 if C.CAP else tile.scale
    end = high * SUBS
    page = tl.load(tile.segment.table_ptr + low)
    for i in range(low * SUBS, end):
        # [BLOCK_N]
        token = i * BLOCK_N + tl.arange(0, BLOCK_N)
        # tokens that no row attends to may be NaN, and 0 * NaN is not 0
        score, v, page = page_scores(tile, q, page, i, end, token < last_end, DTYPE, C)
        seen = token[None, :] < sees
        if work.first is not None:
            seen &= token[None, :] >= since
        score = tl.where(seen, score, float("-inf"))
        acc, peak, total = add_keys(acc, peak, total, score, v, unit, C)
    put_partial(tile, offs_r, mask_r, acc, peak, total, unit, C)


@triton.jit(do_not_specialize=["G", "prompt_width", "slot_width", "partial_rows", "programs"])
def pages_kernel(
    operands,
    layout,
    work,
    partials,  # out
    strides,
    G,
    prompt_width,
    slot_width,
    partial_rows,
    programs,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    K: tl.constexpr = C.K
    EACH: tl.constexpr = C.H // K
    BLOCK_M: tl.constexpr = C.BLOCK_M
    # neighbouring programs read neighbouring heads of the same tokens
    kv = tl.program_id(0) % K
    before = kv.to(tl.int64) * partial_rows
    results = (partials.o + before * C.DV, partials.lse + before)
    count = tl.load(work.total)
    for w in range(tl.program_id(0) // K, count, programs):
        segment = segment_of(layout, work, w, G, prompt_width, slot_width)
        source = segment.source
        limit = tl.load(layout.prompt_len + source, mask=source < G, other=-1)
        tile = Tile(operands, layout, work, results, strides, segment, kv, scale, cap)
        if BLOCK_M < C.PAGE:
            for packed in range(0, segment.rows * EACH, BLOCK_M):
                _attend_segment(tile, limit, packed, DTYPE, C)
        else:
            _attend_segment(tile, limit, 0, DTYPE, C)


@triton.jit(do_not_specialize=["M", "partial_rows", "prompt_cuts"])
def tail_kernel(
    operands,
    work,
    sinks_ptr,  # [H], or None
    partials,
    out_ptr,  # [M, H, DV]
    strides,
    M,
    partial_rows,
    prompt_cuts,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    TAIL: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,  # BLOCK_M: rows of a KV head's queries
):
    K: tl.constexpr = C.K
    D: tl.constexpr = C.D
    DV: tl.constexpr = C.DV
    EACH: tl.constexpr = C.H // K
    BLOCK_E: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_V: tl.constexpr = C.BLOCK_V
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1).to(tl.int64)
    # [BLOCK_E]
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < EACH
    acc = tl.zeros([BLOCK_E, BLOCK_V], tl.float32)
    peak, total = sinks_of(sinks_ptr, kv * EACH + offs_e, mask_e)
    for part in tl.static_range(2):
        first = part * prompt_cuts
        begin = first + tl.load(work.row + row * 6 + 4 + part)
        for i in range(begin, first + tl.load(work.row + row * 6 + part)):
            # a loop over cuts, not a block of offsets, so that nothing is reduced over cuts
            index = kv * partial_rows + (i * M + row) * EACH + offs_e
            acc, peak, total = add_partial(
                acc, peak, total, partials.lse, partials.o, index, mask_e, DV, BLOCK_V
            )

    at = row * strides.q + (kv * EACH + offs_e) * D
    q = tile_heads(operands.q, at, mask_e, D, BLOCK_D, DTYPE)
    length = tl.load(work.row + row * 6 + 3)
    if work.first is not None:
        # index of the first of the tail's keys that the row attends to
        since = tl.load(work.first + row * 2 + 1) - tl.load(work.row + row * 6 + 2)
    for j in range(0, length, BLOCK_N):
        # [BLOCK_N]
        t = j + tl.arange(0, BLOCK_N)
        key_index = tl.load(work.tail + row * TAIL + t, mask=t < length, other=-1).to(tl.int64)
        is_node, is_old = key_index < -1, key_index >= 0
        old, new = key_index * K + kv, -2 - key_index
        # [BLOCK_N, ..]
        k = tile_heads(operands.k_pages, old * D, is_old, D, BLOCK_D, DTYPE)
        fresh = tile_heads(operands.node_k, new * strides.node + kv * D, is_node, D, BLOCK_D, DTYPE)
        k = tl.where(is_node[:, None], fresh, k)
        v = tile_heads(operands.v_pages, old * DV, is_old, DV, BLOCK_V, DTYPE)
        fresh = tile_heads(
            operands.node_v, new * strides.node_v + kv * DV, is_node, DV, BLOCK_V, DTYPE
        )
        v = tl.where(is_node[:, None], fresh, v)
        # [BLOCK_E, BLOCK_N]
        score = tile_scores(q, k, scale, cap, C)
        if not C.CAP:
            score = score * scale
        seen = t < length
        if work.first is not None:
            seen &= t >= since
        score = tl.where(seen[None, :], score, float("-inf"))
        acc, peak, total = add_keys(acc, peak, total, score, v, 1.0, C)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    index = (row * K + kv) * EACH + offs_e
    store_heads(out_ptr, acc, index * DV, mask_e, DV, BLOCK_V)


# keys of a tail that are read at once
TAIL_KEYS = 32


def empty_exact_partials(layout: TreeLayout, H: int, K: int, DV: int) -> Partials:
    """Allocates the partial results of all cuts of a pool."""
    R = max(1, sum(cuts(layout))) * layout.slot.shape[0] * (H // K)
    device = layout.slot.device
    return Partials(
        torch.empty(K, R, DV, dtype=torch.float32, device=device),
        torch.empty(K, R, dtype=torch.float32, device=device),
    )


def exact_attention_triton(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    layout: TreeLayout,
    scale: float,
    work: ExactWork | None = None,
    programs: int | None = None,
    out: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns [M, H, Dv]. Two launches, and one or two more to make `work` if it is None.

    work: of `plan_exact_triton`. programs: per key-value head, to walk the segments; results do not
    depend on it. Raises ValueError if q is not float16, bfloat16 or float32.
    """
    (M, H, _), (K, DV), G = q.shape, node_v.shape[1:], layout.prompt_len.shape[0]
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    out = torch.empty(M, H, DV, dtype=q.dtype, device=q.device) if out is None else out
    if M == 0:
        return out
    if work is None:
        work = plan_exact_triton(layout, heads=H, kv_heads=K, window=window, chunk=chunk)
    programs = programs or programs_for(q.device, K)
    partials = empty_exact_partials(layout, H, K, DV)
    operands = Operands(q, node_k, node_v, k_pages, v_pages)
    common, tiles = attention_arguments(pages_kernel, operands, softcap, scale)
    common |= dict(
        work=work,
        partials=partials,
        partial_rows=partials.lse.shape[1],
        # else a product and a sum could be fused in one copy of a loop and not in another
        enable_fp_fusion=False,
    )
    pages_kernel[(programs * K,)](
        layout=layout,
        G=G,
        prompt_width=layout.prompt_pages.stride(0),
        slot_width=layout.slot_pages.stride(0),
        programs=programs,
        **common,
        **tiles,
    )
    block_e = max(16, triton.next_power_of_2(H // K))
    tail_kernel[(M, K)](
        sinks_ptr=sinks,
        out_ptr=out,
        M=M,
        prompt_cuts=cuts(layout)[0],
        TAIL=TAIL,
        num_warps=4,
        # for float32 the loads of one iteration fill the shared memory
        num_stages=1 if q.dtype == torch.float32 else 2,
        **common | dict(C=common["C"]._replace(BLOCK_M=block_e, BLOCK_N=TAIL_KEYS)),
    )
    return out


_exact_attention = attention_operator("exact_attention", exact_attention_triton, ExactWork)


def exact_attention(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    layout: TreeLayout,
    scale: float,
    work: ExactWork | None = None,
    out: torch.Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns the attention of all rows [M, H, Dv]. work: the step's `plan_exact`, made if None.

    window, chunk, softcap, sinks: as in `tree_attention`; `work` must be made for the same.

    CPU tensors run the reference, which needs no work list. Not differentiable;
    `packed_attention_backward` takes its result. No node may be deeper than MAX_DEPTH.
    """
    check_operands(q, node_k, node_v, k_pages, v_pages, layout, scale)
    check_properties(q, window, chunk, softcap, sinks)
    M = q.shape[0]
    if work is not None:
        check_reach_of(work, window, chunk)
        shapes = (None, 6), (1,), (M, 6), (M, TAIL), (M, 2)
        for name, table, shape in zip(ExactWork._fields, work, shapes, strict=True):
            if table is not None:
                check_tensor(f"work.{name}", table, shape, torch.int32, q.device)
    shape = M, q.shape[1], node_v.shape[2]
    out = q.new_empty(shape) if out is None else out
    check_tensor("out", out, shape, q.dtype, q.device)
    tables = [x for x in work or () if x is not None]
    operands = q, node_k, node_v, k_pages, v_pages, layout, scale, tables, out
    _exact_attention(*operands, window, chunk, softcap, sinks)
    return out
