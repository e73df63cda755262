"""A step's result for the host, gathered into two tensors that take one copy each.

Fields of the accepted path of slot s, rows a_0 .. a_{n-1} (the root first), in order:

    tokens, logprobs, raw_logprobs [S, A]   of row a_i; -1, 0 and 0 after the path
    sources [S, A]                          of row a_{i+1}, which drafted token i; 0 for the last
    cost [M]                                of drafted rows, -1 of roots and padding

and counts, rows, finish and bad of every slot [S]; with `top` also the target's top 8 [S, A, 8] at
the path's rows, -1 and 0 after them; with `trees` also the pool's trees and all accepted rows.
`layout.py` gives the place of each in the two tensors.

One launch. A fused verification (`triton/descend.py`) calls the kernel's two parts instead.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.operator import RecordOperator, launcher
from csd.kernels.verify.layout import empty_snapshot
from csd.kernels.verify.views import TREES, VERDICT
from csd.state.pool import Pool
from csd.state.verdict import Verdict


@launcher
def snapshot_triton() -> Callable:
    from csd.kernels.verify.triton.slots import snapshot_triton

    return snapshot_triton


def snapshot_ref(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the int32 tensor, and the float tensor in the dtype of the log-probabilities."""
    row = verdict.accept_row.clamp(min=0).long()
    valid = verdict.accept_row >= 0
    # token i of the path was drafted as row i + 1; the last one was sampled off the tree
    following = torch.nn.functional.pad(row[:, 1:], (0, 1))
    index = torch.arange(row.shape[1], device=row.device)
    drafted = index + 1 < verdict.accept_count[:, None]
    ints = [
        verdict.accept_count,
        pool.slot_nodes,
        verdict.finish,
        verdict.bad,
        torch.where(valid, verdict.sample[row], -1),
        torch.where(drafted, pool.source[following], 0),
        torch.where(pool.depth > 0, pool.cost, -1),
    ]
    floats = [torch.where(valid, x[row], 0) for x in (verdict.logprob, verdict.raw_logprob)]
    if top:
        ints.append(torch.where(valid[..., None], verdict.top_token[row], -1))
        top_prob = verdict.top_prob[row].to(verdict.logprob.dtype)
        floats.append(torch.where(valid[..., None], top_prob, 0))
    if trees:
        ints += [
            pool.slot_start,
            pool.token,
            pool.parent,
            pool.cost,
            pool.source,
            verdict.accept_row,
        ]
    return (
        torch.cat([x.reshape(-1).int() for x in ints]),
        torch.cat([x.reshape(-1) for x in floats]),
    )


_snapshot = RecordOperator(
    "snapshot",
    (TREES, VERDICT, "bool top", "bool trees"),
    snapshot_ref,
    snapshot_triton,
    returns="(Tensor, Tensor)",
    fake=empty_snapshot,
)


def snapshot(
    pool: Pool, verdict: Verdict, top: bool = False, trees: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a step's result as int32 and as floats; `layout.py` gives the place of each field.

    top: include the top 8 at the path's rows. trees: include the drafted trees.
    """
    _snapshot.check({"M": pool.token.shape[-1]}, verdict.sample.device, pool, verdict)
    return _snapshot(pool, verdict, top, trees)
