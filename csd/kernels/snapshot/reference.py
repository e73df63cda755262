"""Reference in plain PyTorch of the snapshot described in `csd/kernels/snapshot/`."""

import torch

from csd.state.pool import Pool
from csd.state.verdict import Verdict


def snapshot_ref(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the int32 tensor, and the float tensor in the dtype of the log-probabilities."""
    row = verdict.accept_row.clamp(min=0).long()
    kept = verdict.accept_row >= 0
    # token i of the path was drafted as row i + 1; the last one was sampled off the tree
    following = torch.nn.functional.pad(row[:, 1:], (0, 1))
    place = torch.arange(row.shape[1], device=row.device)
    drafted = place + 1 < verdict.accept_count[:, None]
    ints = [
        verdict.accept_count, pool.slot_nodes, verdict.finish, verdict.bad,
        torch.where(kept, verdict.sample[row], -1),
        torch.where(drafted, pool.source[following], 0),
        torch.where(pool.depth > 0, pool.cost, -1),
    ]  # fmt: skip
    floats = [torch.where(kept, x[row], 0) for x in (verdict.logprob, verdict.raw_logprob)]
    if top:
        ints.append(torch.where(kept[..., None], verdict.top_token[row], -1))
        top_prob = verdict.top_prob[row].to(verdict.logprob.dtype)
        floats.append(torch.where(kept[..., None], top_prob, 0))
    if trees:
        ints += [
            pool.slot_start, pool.token, pool.parent, pool.cost, pool.source, verdict.accept_row,
        ]  # fmt: skip
    return (
        torch.cat([x.reshape(-1).int() for x in ints]),
        torch.cat([x.reshape(-1) for x in floats]),
    )
