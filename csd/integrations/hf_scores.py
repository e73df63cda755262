"""The `scores` and `logits` of `generate`, from one forward over finished sequences."""

from typing import Any

import torch


@torch.no_grad()
def scores_of(
    model: torch.nn.Module,
    sequences: torch.Tensor,
    mask: torch.Tensor | None,
    width: int,
    processors: Any,
    config: Any,
) -> dict:
    """Returns the requested ones of "scores" and "logits": [batch, vocab] float32 per new token.

    sequences: [batch, width + new]; mask: [batch, width] or None. csd keeps no logits of a step, so
    the model reads prompts and samples once more; processors then get each prefix in turn, as in
    `generate`. Rows that have ended continue over padding, also as in `generate`.
    """
    if not (config.output_scores or config.output_logits):
        return {}
    read = sequences[:, :-1]
    new = sequences.shape[1] - width
    if mask is None:
        mask = torch.ones_like(sequences[:, :width])
    grown = torch.nn.functional.pad(mask, (0, new - 1), value=1)
    position = (grown.long().cumsum(-1) - 1).masked_fill(grown == 0, 0)
    logits = model(
        input_ids=read,
        attention_mask=grown,
        position_ids=position,
        logits_to_keep=new,
        use_cache=False,
    ).logits.float()
    found = {}
    if config.output_logits:
        found["logits"] = tuple(logits.unbind(1))
    if config.output_scores:
        found["scores"] = tuple(
            processors(sequences[:, : width + i], logits[:, i].clone()) for i in range(new)
        )
    return found
