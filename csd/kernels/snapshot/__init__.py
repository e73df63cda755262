"""A step's result for the host, gathered into two tensors that take one copy each.

Fields of the accepted path of slot s, rows a_0 .. a_{n-1} (the root first), in order:

    tokens, logprobs, raw_logprobs [S, A]   of row a_i; -1, 0 and 0 after the path
    sources [S, A]                          of row a_{i+1}, which drafted token i; 0 for the last
    cost [M]                                of drafted rows, -1 of roots and padding

and counts, rows, finish and bad of every slot [S]; with `top` also the target's top 8 [S, A, 8] at
the path's rows, -1 and 0 after them; with `trees` also the pool's trees and all accepted rows.
`layout` (`layout.py`) gives the place of each.
"""

import torch

from csd.kernels.snapshot.launch import snapshot_triton
from csd.kernels.snapshot.layout import empty_snapshot, layout
from csd.kernels.snapshot.reference import snapshot_ref
from csd.kernels.torch_operators import Fields, RecordOperator
from csd.state.pool import Pool
from csd.state.verdict import Verdict

__all__ = ["layout", "snapshot", "snapshot_ref", "snapshot_triton"]

_POOL = ("slot_start", "slot_nodes", "depth", "cost", "source", "token", "parent")
_VERDICT = (
    "sample", "logprob", "raw_logprob", "top_token", "top_prob", "accept_row", "accept_count",
    "finish", "bad",
)  # fmt: skip
_snapshot = RecordOperator(
    "snapshot",
    (Fields("pool", _POOL), Fields("verdict", _VERDICT), "bool top", "bool trees"),
    snapshot_ref,
    snapshot_triton,
    returns="(Tensor, Tensor)",
    fake=empty_snapshot,
)


def snapshot(
    pool: Pool, verdict: Verdict, top: bool = False, trees: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a step's result as int32 and as floats; `layout` gives the place of each field.

    top: include the top 8 at the path's rows. trees: include the drafted trees.
    """
    _snapshot.check({"M": pool.token.shape[-1]}, verdict.sample.device, pool, verdict)
    return _snapshot(pool, verdict, top, trees)
