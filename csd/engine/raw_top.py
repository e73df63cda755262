"""The model's own likeliest tokens at what a step committed, at temperature 1.

    log p(t) = x_t - x_sample + log p(sample)

with x the row's logits and log p(sample) as verification computed it.
"""

import torch

from csd.state.verdict import Verdict


def raw_top(
    logits: torch.Tensor, verdict: Verdict, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each slot's accepted path, [S, A, count]: token ids, likeliest first, and log p of each;
    -1 and 0 behind the path.

    On a GPU shapes are fixed and nothing reads the device.
    """
    kept = verdict.accept_row >= 0
    if logits.is_cuda:
        rows = torch.arange(logits.shape[0], device=logits.device)
        at = verdict.accept_row.clamp(min=0).long()
    else:
        # each row costs what it reads
        rows = verdict.accept_row[kept].long()
        at = (kept.flatten().cumsum(0) - 1).clamp(min=0).view_as(kept)
    if not rows.shape[0]:
        shape = (*kept.shape, count)
        return kept.new_full(shape, -1, dtype=torch.int32), verdict.logprob.new_zeros(shape)
    x, wide = logits[rows], verdict.raw_logprob.dtype
    best = x.topk(count, dim=-1)
    of_sample = x.gather(1, verdict.sample[rows].clamp(min=0).long()[:, None]).to(wide)
    logprob = best.values.to(wide) - of_sample + verdict.raw_logprob[rows, None]
    kept = kept[..., None]
    return (
        torch.where(kept, best.indices[at], -1).int(),
        torch.where(kept, logprob[at], 0),
    )
