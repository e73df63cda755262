"""The four launches of a verification, and the buffers between them."""

from typing import Any

import torch
import triton

from csd.kernels.verify.layout import empty_snapshot
from csd.kernels.verify.token_logprobs import TokenLogprobs, no_token
from csd.kernels.verify.triton.descend import FinishConstants, finish_kernel
from csd.kernels.verify.triton.rows import GROUP
from csd.kernels.verify.triton.sample import sample_kernel
from csd.kernels.verify.triton.scan import BINS, ScanParts, compact_kernel, scan_kernel
from csd.kernels.verify.triton.slots import BLOCK_R, snapshot_grid
from csd.kernels.verify.views import ADVANCED, POOL, SLOTS, TREES, VERDICT
from csd.state.pool import Pool
from csd.state.record import allocate
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, Verdict, empty_verdict

# chunks of a row, tokens read at once, tokens that a chunk and a row can list
SPLITS, BLOCK, CAP, LIST = 16, 1024, 512, 2048
# tokens that a program of the scan loads at once; groups that one of `compact` tests at once, and
# tokens of near groups that it loads at once
SCAN = 4096
COMPACT_TILE, COMPACT, COMPACT_WARPS = 128, 256, 1
SAMPLE_WARPS = 8


def verify_triton(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Four launches over logits [M, V], float32, float16 or bfloat16."""
    out = empty_verdict(pool.rows, slots.count, logits.device)
    rows = _scan_triton(logits, pool, slots)
    _sample(rows, out)
    finish_kernel[(slots.count,)](**_descent(rows, slots, out))
    return out


def decide_triton(
    logits: torch.Tensor, pool: Pool, slots: Slots, top: bool, trees: bool
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Runs `verify`, `advance_slots` and `snapshot` in four launches."""
    verdict = empty_verdict(pool.rows, slots.count, logits.device)
    rows = _scan_triton(logits, pool, slots)
    _sample(rows, verdict)
    snapshot, N = empty_snapshot(pool, verdict, top, trees), slots.context.shape[1]
    block_n = triton.next_power_of_2(N)
    more = dict(N=N, BLOCK_N=block_n, HAS_TOP=top, HAS_TREES=trees, BLOCK_R=BLOCK_R)
    finish_kernel[snapshot_grid(pool, slots.count)](
        **_descent(rows, slots, verdict, **more),
        advanced=ADVANCED(slots),
        trees=TREES(pool),
        out=snapshot,
        S=slots.count,
        M=pool.rows,
        tokens=slots.tokens.shape[1],
        words=slots.seen.shape[1],
    )
    return verdict, *snapshot


def token_logprobs_triton(
    logits: torch.Tensor,
    pool: Pool,
    slots: Slots,
    row: torch.Tensor,
    token: torch.Tensor,
) -> TokenLogprobs:
    """`token_logprobs_ref` by the sampling kernel, once per token of a row."""
    V = logits.shape[1]
    none = no_token(logits)
    rows = _scan_triton(logits.masked_fill(none[:, None], 0), pool, slots)
    out = empty_verdict(pool.rows, slots.count, logits.device)
    # each token of a row once, in the order of rows
    pairs, index = (row * V + token).unique(return_inverse=True)
    row, token = pairs // V, pairs % V
    rank = torch.arange(len(pairs), device=row.device) - torch.searchsorted(row, row)
    values = [torch.empty(len(pairs), device=row.device) for _ in range(2)]
    for i in range(int(rank.max()) + 1):
        now = (rank == i).nonzero()[:, 0]
        at = row[now]
        out.sample.zero_()
        out.sample[at] = token[now].int()
        _sample(rows, out, teacher_forced=True)
        for value, of_rows in zip(values, (out.logprob, out.raw_logprob), strict=True):
            value[now] = of_rows[at]
    logprob, raw = (value[index] for value in values)
    # for a row that allows no token
    empty = none[row[index]]
    return TokenLogprobs(
        logprob.masked_fill(empty, -torch.inf),
        raw.masked_fill(empty, torch.nan),
        rows["parts"].bad_row > 0,
    )


def _sample(rows: dict[str, Any], out: Verdict, teacher_forced: bool = False) -> None:
    """Samples every row, or takes `out.sample`, and writes log-probabilities of the tokens."""
    sample_kernel[(out.sample.shape[0],)](
        **rows, verdict=VERDICT(out), teacher_forced=int(teacher_forced)
    )


def _scan_triton(logits: torch.Tensor, pool: Pool, slots: Slots) -> dict[str, Any]:
    """The first two launches, which read the logits; returns arguments of the third one."""
    (M, V), device = logits.shape, logits.device
    groups = triton.cdiv(V, GROUP.value)
    room = SPLITS * CAP + LIST
    sizes = {"M": M, "splits": SPLITS, "groups": groups, "room": room, "bins": BINS.value}
    row: dict[str, Any] = dict(
        logits_ptr=logits,
        pool=POOL(pool),
        slots=SLOTS(slots),
        parts=ScanParts(**allocate(ScanParts, sizes, device)),
        vocab=V,
        words=slots.seen.shape[1],
        # whole blocks, so that a group of tokens lies in one chunk
        chunk=triton.cdiv(triton.cdiv(V, SPLITS), SCAN) * SCAN,
        STOPS=slots.ban_ids.shape[1],
        SPLITS=SPLITS,
    )
    scan_kernel[(M, SPLITS)](**row, groups=groups, BLOCK=SCAN, BLOCK_X=BLOCK, num_warps=4)
    compact_kernel[(M, SPLITS)](
        **row,
        groups=groups,
        CAP=CAP,
        ROOM=room,
        BLOCK=COMPACT,
        TILE=COMPACT_TILE,
        BLOCK_G=triton.next_power_of_2(groups),
        num_warps=COMPACT_WARPS,
    )
    return row | dict(CAP=CAP, LIST=LIST, BLOCK=BLOCK, num_warps=SAMPLE_WARPS)


def _descent(rows: dict[str, Any], slots: Slots, out: Verdict, **more: Any) -> dict[str, Any]:
    """Arguments of the last launch; more: constants of the advance and the snapshot."""
    block_a, stops = triton.next_power_of_2(ACCEPT), slots.stop_ids.shape[1]
    return dict(
        pool=rows["pool"],
        slots=rows["slots"],
        bad_row_ptr=rows["parts"].bad_row,
        verdict=VERDICT(out),
        C=FinishConstants(A=ACCEPT, BLOCK_A=block_a, STOPS=stops, **more),
        num_warps=4,
    )
