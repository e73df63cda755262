"""The work list of a step's attention: made once on the device, walked by every layer.

Rows that share keys are tiles of `rows` pool rows, with the H / K query heads of a key-value head
that is at most 64 rows of a matrix product. A tile's keys are units of 64 tokens (a page):

    a group's tile    ceil(prompt_len / 64) units: its prompt
    a slot's tile     ceil(slot_len / 64) + 1 units: its committed tokens, then its nodes

All units in one line, group tiles first, both in the order of pool rows, are cut into `programs`
equal shares. Where tile n meets program p there is one segment of work. Tile and program only
ever grow along the line, so n + p names the segment, and a tile's or a program's segments follow
one another. A coincidence of cuts leaves a gap that nobody reads.

    segment[n + p]  = first pool row, pool rows, source (g, or G + s), first unit, last unit + 1,
                      first row of the partial result
    program[p]      = first segment, last segment + 1
    merge[m]        = first row of the partials, splits: of the prompt, then of the slot

A tile's partials are `rows` * H / K rows apart.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.aot import Job, Shape, programs_of

PAGE = 64
TILE = 64
BLOCK = 32


class Work(NamedTuple):
    segment: torch.Tensor  # [W, 6] int32
    program: torch.Tensor  # [programs, 2] int32
    merge: torch.Tensor  # [M, 4] int32


def tile_rows(heads: int, kv_heads: int) -> int:
    """Pool rows of a tile: what fits into TILE rows with the query heads of a key-value head."""
    return TILE // (heads // kv_heads)


def empty_work(
    rows: int, slots: int, groups: int, heads: int, kv_heads: int, programs: int, device
) -> Work:
    """Room for any work list of a pool of `rows` rows."""
    full = rows // tile_rows(heads, kv_heads)
    tiles = min(rows, full + groups) + min(rows, full + slots)

    def empty(*shape):
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Work(empty(tiles + programs, 6), empty(programs, 2), empty(rows, 4))


def plan_attention_ref(
    prompt_len: torch.Tensor,  # [G] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
    heads: int,
    kv_heads: int,
    programs: int,
    out: Work | None = None,
) -> Work:
    """Plain Python. Entries that nobody reads are -1."""
    M, S, G = slot.shape[0], slot_len.shape[0], prompt_len.shape[0]
    each, rows = heads // kv_heads, tile_rows(heads, kv_heads)
    work = out or empty_work(M, S, G, heads, kv_heads, programs, slot.device)
    bounds, starts, nodes = group_start.tolist(), slot_start.tolist(), slot_nodes.tolist()
    parts = (
        [(bounds[g], bounds[g + 1], g, -(-n // PAGE)) for g, n in enumerate(prompt_len.tolist())],
        sorted(
            (starts[s], starts[s] + nodes[s], G + s, -(-n // PAGE) + 1)
            for s, n in enumerate(slot_len.tolist())
            if nodes[s]
        ),
    )
    tiles = [
        (part, first, min(rows, last - first), source, units)
        for part, sources in enumerate(parts)
        for start, last, source, units in sources
        if units
        for first in range(start, last, rows)
    ]
    share = max(1, -(-sum(t[-1] for t in tiles) // programs))
    segment = [[-1] * 6 for _ in range(work.segment.shape[0])]
    program = [[0, 0] for _ in range(programs)]
    merge = [[0, 0, 0, 0] for _ in range(M)]
    a = 0
    for n, (part, first, count, source, units) in enumerate(tiles):
        b = a + units
        splits = range(a // share, (b - 1) // share + 1)
        for p in splits:
            base = (part * M + first + p * rows) * each
            low, high = max(a, p * share) - a, min(b, (p + 1) * share) - a
            segment[n + p] = [first, count, source, low, high, base]
            if p * share >= a:
                program[p][0] = n + p
            program[p][1] = n + p + 1
        for m in range(first, first + count):
            base = (part * M + m + splits[0] * rows) * each
            merge[m][2 * part : 2 * part + 2] = [base, len(splits)]
        a = b
    for target, values in zip(work, (segment, program, merge), strict=True):
        target.copy_(torch.tensor(values, dtype=torch.int32).view(target.shape))
    return work


@triton.jit
def _put_tiles(
    row,
    valid,
    first,
    last,
    source,
    units,
    units_before,
    tiles_before,
    share,
    total,
    part,
    M,
    segment_ptr,
    program_ptr,
    merge_ptr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # [BLOCK]: each row's tile and its place in the line
    t = (row - first) // ROWS
    tile_first = first + t * ROWS
    n = tiles_before + t
    a = units_before + t * units
    b = a + units
    split_first = a // share
    splits = tl.where(valid, (b - 1) // share + 1 - split_first, 0)
    base = (part * M + tile_first) * EACH

    in_pool = row < M
    result = base + split_first * ROWS * EACH + (row - tile_first) * EACH
    tl.store(merge_ptr + row * 4 + 2 * part, tl.where(valid, result, 0), mask=in_pool)
    tl.store(merge_ptr + row * 4 + 2 * part + 1, splits, mask=in_pool)

    # the first row of a tile writes its segments
    lead_splits = tl.where(row == tile_first, splits, 0)
    for i in range(0, tl.max(lead_splits, 0), BLOCK_P):
        # [BLOCK, BLOCK_P]
        offs = i + tl.arange(0, BLOCK_P)[None, :]
        p = split_first[:, None] + offs
        mask = offs < lead_splits[:, None]
        low = tl.maximum(a[:, None], p * share)
        high = tl.minimum(b[:, None], (p + 1) * share)
        at = segment_ptr + (n[:, None] + p) * 6
        tl.store(at, tile_first[:, None] + 0 * p, mask=mask)
        tl.store(at + 1, tl.minimum(last - tile_first, ROWS)[:, None] + 0 * p, mask=mask)
        tl.store(at + 2, source[:, None] + 0 * p, mask=mask)
        tl.store(at + 3, low - a[:, None], mask=mask)
        tl.store(at + 4, high - a[:, None], mask=mask)
        tl.store(at + 5, base[:, None] + p * ROWS * EACH, mask=mask)
        # one tile holds the first unit of a program, one the last
        opens = mask & (p * share >= a[:, None])
        closes = mask & (tl.minimum((p + 1) * share, total) <= b[:, None])
        tl.store(program_ptr + p * 2, n[:, None] + p, mask=opens)
        tl.store(program_ptr + p * 2 + 1, n[:, None] + p + 1, mask=closes)


@triton.jit(do_not_specialize=["M", "S", "G", "programs"])
def _plan_attention_kernel(
    prompt_len_ptr,  # [G] int32
    slot_len_ptr,  # [S] int32
    slot_ptr,  # [M] int32
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    group_start_ptr,  # [G + 1] int32
    segment_ptr,  # [W, 6] int32
    program_ptr,  # [programs, 2] int32
    merge_ptr,  # [M, 4] int32
    M,
    S,
    G,
    programs,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # [BLOCK]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row, mask=row < M, other=-1)
    live = slot >= 0
    slot_first = tl.load(slot_start_ptr + slot, mask=live, other=0)
    slot_last = slot_first + tl.load(slot_nodes_ptr + slot, mask=live, other=0)
    slot_units = tl.cdiv(tl.load(slot_len_ptr + slot, mask=live, other=0), PAGE) + 1

    # a sum over all groups and slots a row is cheaper than a launch for their prefix sums
    group = tl.zeros([BLOCK], tl.int32)
    group_first = tl.zeros([BLOCK], tl.int32)
    group_last = tl.zeros([BLOCK], tl.int32)
    group_units = tl.zeros([BLOCK], tl.int32)
    group_units_before = tl.zeros([BLOCK], tl.int32)
    group_tiles_before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros((), tl.int32)
    tiles_all = tl.zeros((), tl.int32)
    for z in range(0, G, BLOCK_Z):
        # [BLOCK_Z]
        g = z + tl.arange(0, BLOCK_Z)
        first = tl.load(group_start_ptr + g, mask=g < G, other=M)
        last = tl.load(group_start_ptr + g + 1, mask=g < G, other=M)
        units = tl.cdiv(tl.load(prompt_len_ptr + g, mask=g < G, other=0), PAGE)
        tiles = tl.where(units > 0, tl.cdiv(last - first, ROWS), 0)
        # [BLOCK, BLOCK_Z]
        mine = (first[None, :] <= row[:, None]) & (row[:, None] < last[None, :])
        before = last[None, :] <= row[:, None]
        group += tl.sum(tl.where(mine, g[None, :], 0), 1)
        group_first += tl.sum(tl.where(mine, first[None, :], 0), 1)
        group_last += tl.sum(tl.where(mine, last[None, :], 0), 1)
        group_units += tl.sum(tl.where(mine, units[None, :], 0), 1)
        group_units_before += tl.sum(tl.where(before, (tiles * units)[None, :], 0), 1)
        group_tiles_before += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        total += tl.sum(tiles * units, 0)
        tiles_all += tl.sum(tiles, 0)
    slot_units_before = tl.zeros([BLOCK], tl.int32) + total
    slot_tiles_before = tl.zeros([BLOCK], tl.int32) + tiles_all
    for z in range(0, S, BLOCK_Z):
        # [BLOCK_Z]
        s = z + tl.arange(0, BLOCK_Z)
        first = tl.load(slot_start_ptr + s, mask=s < S, other=0)
        nodes = tl.load(slot_nodes_ptr + s, mask=s < S, other=0)
        units = tl.cdiv(tl.load(slot_len_ptr + s, mask=s < S, other=0), PAGE) + 1
        tiles = tl.cdiv(nodes, ROWS)
        # [BLOCK, BLOCK_Z]
        before = first[None, :] < slot_first[:, None]
        slot_units_before += tl.sum(tl.where(before, (tiles * units)[None, :], 0), 1)
        slot_tiles_before += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        total += tl.sum(tiles * units, 0)
    share = tl.maximum(tl.cdiv(total, programs), 1)

    if tl.program_id(0) == 0:
        for i in range(0, programs, BLOCK_P):
            p = i + tl.arange(0, BLOCK_P)
            idle = (p < programs) & (p * share >= total)
            tl.store(program_ptr + p * 2, 0 * p, mask=idle)
            tl.store(program_ptr + p * 2 + 1, 0 * p, mask=idle)

    _put_tiles(
        row=row,
        valid=live & (group_units > 0),
        first=group_first,
        last=group_last,
        source=group,
        units=group_units,
        units_before=group_units_before,
        tiles_before=group_tiles_before,
        share=share,
        total=total,
        part=0,
        M=M,
        segment_ptr=segment_ptr,
        program_ptr=program_ptr,
        merge_ptr=merge_ptr,
        EACH=EACH,
        ROWS=ROWS,
        BLOCK_P=BLOCK_P,
    )
    _put_tiles(
        row=row,
        valid=live,
        first=slot_first,
        last=slot_last,
        source=G + slot,
        units=slot_units,
        units_before=slot_units_before,
        tiles_before=slot_tiles_before,
        share=share,
        total=total,
        part=1,
        M=M,
        segment_ptr=segment_ptr,
        program_ptr=program_ptr,
        merge_ptr=merge_ptr,
        EACH=EACH,
        ROWS=ROWS,
        BLOCK_P=BLOCK_P,
    )


def plan_attention_triton(
    prompt_len: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
    heads: int,
    kv_heads: int,
    programs: int,
    out: Work | None = None,
) -> Work:
    """One launch. Entries that nobody reads keep what `out` held."""
    M, S, G = slot.shape[0], slot_len.shape[0], prompt_len.shape[0]
    work = out or empty_work(M, S, G, heads, kv_heads, programs, slot.device)
    _plan_attention_kernel[(triton.cdiv(M, BLOCK),)](
        prompt_len_ptr=prompt_len,
        slot_len_ptr=slot_len,
        slot_ptr=slot,
        slot_start_ptr=slot_start,
        slot_nodes_ptr=slot_nodes,
        group_start_ptr=group_start,
        segment_ptr=work.segment,
        program_ptr=work.program,
        merge_ptr=work.merge,
        M=M,
        S=S,
        G=G,
        programs=programs,
        EACH=heads // kv_heads,
        ROWS=tile_rows(heads, kv_heads),
        PAGE=PAGE,
        BLOCK=BLOCK,
        BLOCK_Z=64,
        BLOCK_P=16,
        num_warps=4,
    )
    return work


@torch.library.custom_op("csd::plan_attention", mutates_args=(), device_types="cpu")
def _plan_attention(
    prompt_len: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
    heads: int,
    kv_heads: int,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    args = (prompt_len, slot_len, slot, slot_start, slot_nodes, group_start)
    return tuple(plan_attention_ref(*args, heads, kv_heads, programs))


@_plan_attention.register_kernel("cuda")
def _(prompt_len, slot_len, slot, slot_start, slot_nodes, group_start, heads, kv_heads, programs):
    args = (prompt_len, slot_len, slot, slot_start, slot_nodes, group_start)
    return tuple(plan_attention_triton(*args, heads, kv_heads, programs))


@_plan_attention.register_fake
def _(prompt_len, slot_len, slot, slot_start, slot_nodes, group_start, heads, kv_heads, programs):
    sizes = slot.shape[0], slot_len.shape[0], prompt_len.shape[0]
    return tuple(empty_work(*sizes, heads, kv_heads, programs, slot.device))


def plan_attention(
    prompt_len: torch.Tensor,  # [G] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
    heads: int,
    kv_heads: int,
    programs: int | None = None,
) -> Work:
    """The work list for a model of H = heads and K = kv_heads; programs: those of one KV head."""
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > TILE:
        raise ValueError(f"heads must be 1 to {TILE} times kv_heads, got {heads} and {kv_heads}")
    G = prompt_len.shape[0]
    if group_start.shape != (G + 1,):
        raise ValueError(f"group_start must have shape {(G + 1,)}, got {tuple(group_start.shape)}")
    for name, x in (("slot_start", slot_start), ("slot_nodes", slot_nodes)):
        if x.shape != slot_len.shape:
            raise ValueError(
                f"{name} must have shape {tuple(slot_len.shape)}, got {tuple(x.shape)}"
            )
    tensors = (prompt_len, slot_len, slot, slot_start, slot_nodes, group_start)
    for x in tensors:
        if x.dtype != torch.int32:
            raise ValueError(f"lengths, slots and starts must be torch.int32, got {x.dtype}")
    programs = programs or max(1, programs_of(slot.device) // kv_heads)
    return Work(*_plan_attention(*tensors, heads, kv_heads, programs))


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    pointers = ("prompt_len", "slot_len", "slot", "slot_start", "slot_nodes", "group_start")
    tables = ("segment", "program", "merge")
    return [
        Job(
            name="plan_attention",
            kernel=_plan_attention_kernel,
            args={
                **{f"{name}_ptr": "*i32:16" for name in (*pointers, *tables)},
                **{name: "i32" for name in ("M", "S", "G", "programs")},
                "EACH": shape.heads // shape.kv_heads,
                "ROWS": tile_rows(shape.heads, shape.kv_heads),
                "PAGE": PAGE,
                "BLOCK": BLOCK,
                "BLOCK_Z": 64,
                "BLOCK_P": 16,
            },
        )
    ]
