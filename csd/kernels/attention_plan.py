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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from csd.cache import PAGE
from csd.kernels.aot import Job, Shape, programs_of
from csd.kernels.attention_plan_kernel import _plan_attention_kernel
from csd.kernels.checks import check_tensor

# what says which rows are whose
PLACES = ("prompt_len", "slot_len", "slot", "slot_start", "slot_nodes", "group_start")
TILE = 64
BLOCK = 32


class Work(NamedTuple):
    segment: torch.Tensor  # [W, 6] int32
    program: torch.Tensor  # [programs, 2] int32
    merge: torch.Tensor  # [M, 4] int32


def tile_rows(heads: int, kv_heads: int) -> int:
    """Pool rows of a tile: what fits into TILE rows with the query heads of a key-value head."""
    return TILE // (heads // kv_heads)


def programs_for(device: torch.device, kv_heads: int) -> int:
    """Programs for each of the KV heads, so that all of them fill the device."""
    return max(1, programs_of(device) // kv_heads)


def empty_work(
    rows: int,
    slots: int,
    groups: int,
    heads: int,
    kv_heads: int,
    programs: int,
    device: torch.device,
) -> Work:
    """Room for any work list of a pool of `rows` rows."""
    full = rows // tile_rows(heads, kv_heads)
    tiles = min(rows, full + groups) + min(rows, full + slots)

    def empty(*shape: int) -> torch.Tensor:
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
    programs: int | None = None,
    out: Work | None = None,
) -> Work:
    """Plain Python. Entries that nobody reads are -1."""
    M, S, G = slot.shape[0], slot_len.shape[0], prompt_len.shape[0]
    programs = programs or programs_for(slot.device, kv_heads)
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


def plan_attention_triton(
    prompt_len: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
    heads: int,
    kv_heads: int,
    programs: int | None = None,
    out: Work | None = None,
) -> Work:
    """One launch. Entries that nobody reads keep what `out` held."""
    M, S, G = slot.shape[0], slot_len.shape[0], prompt_len.shape[0]
    programs = programs or programs_for(slot.device, kv_heads)
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
    segment, program, merge = plan_attention_ref(*args, heads, kv_heads, programs)
    return segment, program, merge


@_plan_attention.register_kernel("cuda")
def _(prompt_len: torch.Tensor, *args: Any) -> Any:
    plan: Any = plan_attention_triton
    with torch.cuda.device_of(prompt_len):
        return tuple(plan(prompt_len, *args))


@_plan_attention.register_fake
def _(prompt_len: torch.Tensor, slot_len: torch.Tensor, slot: torch.Tensor, *args: Any) -> Any:
    *_places, heads, kv_heads, programs = args
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
    if programs is not None and programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")
    tensors = (prompt_len, slot_len, slot, slot_start, slot_nodes, group_start)
    check_places(tensors, slot.device)
    programs = programs or programs_for(slot.device, kv_heads)
    return Work(*_plan_attention(*tensors, heads, kv_heads, programs))


def check_places(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises ValueError unless these are the first of `plan_attention`'s, which rows are whose."""
    for name, x in zip(PLACES[:3], tensors, strict=False):
        check_tensor(name, x, (None,), torch.int32, device)
    G, S = tensors[0].shape[0], tensors[1].shape[0]
    for name, x, size in zip(PLACES[3:], tensors[3:], (S, S, G + 1), strict=True):
        check_tensor(name, x, (size,), torch.int32, device)


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    tables = ("segment", "program", "merge")
    return [
        Job(
            name="plan_attention",
            kernel=_plan_attention_kernel,
            args={
                **{f"{name}_ptr": "*i32:16" for name in (*PLACES, *tables)},
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
