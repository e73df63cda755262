"""The four launches of a verification, and the buffers between them."""

from typing import Any, NamedTuple

import torch
import triton

from csd.kernels.verify.layout import empty_snapshot
from csd.kernels.verify.token_logprobs import TokenLogprobs, no_token
from csd.kernels.verify.triton.descend import _finish_kernel
from csd.kernels.verify.triton.rows import GROUP
from csd.kernels.verify.triton.sample import _sample_kernel
from csd.kernels.verify.triton.scan import _compact_kernel, _scan_kernel
from csd.kernels.verify.triton.slots import slot_arguments, snapshot_arguments, snapshot_grid
from csd.state.filters import CUTS
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, Verdict, empty_verdict

# chunks of a row, tokens read at once, tokens that a chunk and a row can list
SPLITS, BLOCK, CAP, LIST = 16, 1024, 512, 2048
# tokens that a program of the scan loads at once; groups that one of `compact` tests at once, and
# tokens of near groups that it loads at once
SCAN = 4096
COMPACT_TILE, COMPACT, COMPACT_WARPS = 128, 256, 1
SAMPLE_WARPS = 8


def verify_triton(
    logits: torch.Tensor, pool: Pool, slots: Slots, out: Verdict | None = None
) -> Verdict:
    """Four launches over logits [M, V], float32, float16 or bfloat16; writes to `out` if given."""
    out = out or empty_verdict(pool.rows, slots.count, logits.device)
    bad_rows = _sample_triton(logits, pool, slots, out)
    _finish_kernel[(slots.count,)](**_descent(pool, slots, out, bad_rows))
    return out


def decide_triton(
    logits: torch.Tensor, pool: Pool, slots: Slots, top: bool, trees: bool
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Runs `verify`, `advance_slots` and `snapshot` in four launches."""
    verdict = empty_verdict(pool.rows, slots.count, logits.device)
    bad_rows = _sample_triton(logits, pool, slots, verdict)
    snapshot = empty_snapshot(pool, verdict, top, trees)
    _finish_kernel[snapshot_grid(pool, slots.count)](
        **_descent(pool, slots, verdict, bad_rows)
        | slot_arguments(slots)
        | snapshot_arguments(pool, verdict, snapshot, top, trees)
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
        rows.sample(out, teacher_forced=True)
        for value, of_rows in zip(values, (out.logprob, out.raw_logprob), strict=True):
            value[now] = of_rows[at]
    logprob, raw = (value[index] for value in values)
    # of a row that allows no token
    empty = none[row[index]]
    return TokenLogprobs(
        logprob.masked_fill(empty, -torch.inf), raw.masked_fill(empty, torch.nan), rows.bad > 0
    )


class _Rows(NamedTuple):
    """Rows whose logits are read: arguments of the sampling kernel but its results."""

    arguments: dict[str, Any]
    bad: torch.Tensor  # [M] int32, out

    def sample(self, out: Verdict, teacher_forced: bool = False) -> None:
        """Sample every row, or take `out.sample`, with the log-probabilities of the tokens."""
        _sample_kernel[(self.bad.shape[0],)](
            **self.arguments,
            sample_ptr=out.sample,
            logprob_ptr=out.logprob,
            raw_logprob_ptr=out.raw_logprob,
            top_token_ptr=out.top_token,
            top_prob_ptr=out.top_prob,
            bad_row_ptr=self.bad,
            teacher_forced=int(teacher_forced),
        )


def _sample_triton(logits: torch.Tensor, pool: Pool, slots: Slots, out: Verdict) -> torch.Tensor:
    """The first three launches, which sample at every row. Returns the bad rows [M] int32."""
    rows = _scan_triton(logits, pool, slots)
    rows.sample(out)
    return rows.bad


def _scan_triton(logits: torch.Tensor, pool: Pool, slots: Slots) -> _Rows:
    """The first two launches, which read the logits."""
    (M, V), device = logits.shape, logits.device
    groups = triton.cdiv(V, GROUP.value)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tops, raw_tops, raw_sums = (scratch(M, SPLITS) for _ in range(3))
    group_tops, group_sums = scratch(M, groups), scratch(M, groups)
    head_tokens = scratch(M, SPLITS, CAP, dtype=torch.int32)
    head_distances = scratch(M, SPLITS, CAP)
    head_counts, rests = scratch(M, SPLITS, dtype=torch.int32), scratch(M, SPLITS)

    row = dict(
        logits_ptr=logits,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        generated_ptr=slots.generated,
        min_new_ptr=slots.min_new,
        temperature_ptr=slots.temperature,
        penalty_ptr=slots.repetition_penalty,
        seen_ptr=slots.seen,
        ban_ids_ptr=slots.ban_ids,
        top_ptr=tops,
        vocab=V,
        words=slots.seen.shape[1],
        # whole blocks, so that a group of tokens lies in one chunk
        chunk=triton.cdiv(triton.cdiv(V, SPLITS), SCAN) * SCAN,
        STOPS=slots.ban_ids.shape[1],
        SPLITS=SPLITS,
        num_warps=4,
    )
    raw = dict(raw_top_ptr=raw_tops, raw_sum_ptr=raw_sums)
    head = dict(
        head_token_ptr=head_tokens,
        head_distance_ptr=head_distances,
        head_count_ptr=head_counts,
        rest_ptr=rests,
        top_k_ptr=slots.top_k,
        top_p_ptr=slots.top_p,
        min_p_ptr=slots.min_p,
        CAP=CAP,
    )
    grouped = dict(group_top_ptr=group_tops, group_sum_ptr=group_sums, groups=groups)
    _scan_kernel[(M, SPLITS)](**row, **raw, **grouped, BLOCK=SCAN, BLOCK_X=BLOCK)
    _compact_kernel[(M, SPLITS)](
        **row | {"num_warps": COMPACT_WARPS},
        **head,
        **grouped,
        BLOCK=COMPACT,
        TILE=COMPACT_TILE,
        BLOCK_G=triton.next_power_of_2(groups),
    )
    arguments = dict(
        **row | {"num_warps": SAMPLE_WARPS},
        **raw,
        **head | {f"{name}_ptr": getattr(slots, name) for name in CUTS},
        key_ptr=slots.key,
        index_ptr=slots.sample,
        list_token_ptr=scratch(M, LIST, dtype=torch.int32),
        list_distance_ptr=scratch(M, LIST),
        LIST=LIST,
        BLOCK=BLOCK,
    )
    return _Rows(arguments, scratch(M, dtype=torch.int32))


def _descent(pool: Pool, slots: Slots, out: Verdict, bad_rows: torch.Tensor) -> dict[str, Any]:
    return dict(
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        depth_ptr=pool.depth,
        ancestors_ptr=pool.ancestors,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        generated_ptr=slots.generated,
        max_new_ptr=slots.max_new,
        temperature_ptr=slots.temperature,
        stop_ids_ptr=slots.stop_ids,
        sample_ptr=out.sample,
        bad_row_ptr=bad_rows,
        logprob_ptr=out.logprob,
        raw_logprob_ptr=out.raw_logprob,
        accept_row_ptr=out.accept_row,
        accept_count_ptr=out.accept_count,
        finish_ptr=out.finish,
        bad_ptr=out.bad,
        A=ACCEPT,
        BLOCK_A=triton.next_power_of_2(ACCEPT),
        STOPS=slots.stop_ids.shape[1],
        num_warps=4,
    )
