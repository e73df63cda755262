"""Launch of the snapshot's kernel."""

from typing import Any

import torch
import triton

from csd.kernels.snapshot.kernel import _snapshot_kernel
from csd.kernels.snapshot.layout import empty_snapshot
from csd.state.pool import Pool
from csd.state.verdict import TOP, Verdict

# rows of the pool that one program copies
BLOCK_R = 64


def snapshot_triton(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    S, A = verdict.accept_row.shape
    out = empty_snapshot(pool, verdict, top, trees)
    _snapshot_kernel[snapshot_grid(pool, S)](
        sample_ptr=verdict.sample,
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        bad_ptr=verdict.bad,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        depth_ptr=pool.depth,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        **snapshot_arguments(pool, verdict, out, top, trees),
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        num_warps=1,
    )
    return out


def snapshot_grid(pool: Pool, S: int) -> tuple[int]:
    return (max(S, triton.cdiv(pool.token.shape[0], BLOCK_R)),)


def snapshot_arguments(
    pool: Pool,
    verdict: Verdict,
    out: tuple[torch.Tensor, torch.Tensor],
    top: bool,
    trees: bool,
) -> dict[str, Any]:
    """Arguments of `snapshot_rows` and `snapshot_slot` that the verification's kernel lacks."""
    return dict(
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        top_token_ptr=verdict.top_token,
        top_prob_ptr=verdict.top_prob,
        ints_ptr=out[0],
        floats_ptr=out[1],
        S=verdict.accept_row.shape[0],
        M=pool.token.shape[0],
        TOP=TOP,
        HAS_TOP=top,
        HAS_TREES=trees,
        BLOCK_R=BLOCK_R,
    )
