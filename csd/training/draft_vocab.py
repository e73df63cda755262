"""Tokens of an EAGLE-3 head's own vocabulary, and their maps in the published format."""

from collections import Counter

import torch

from csd.training.texts import Text

# largest default size of a draft vocabulary, as in published heads
MOST = 32_000


def draft_tokens(
    texts: list[Text], vocab: int, size: int | None, device: torch.device
) -> torch.Tensor | None:
    """The `size` most frequent tokens of the texts' samples, ascending; None for all tokens.

    size: None means the whole vocabulary, or `MOST` tokens of a larger one. Equally frequent tokens
    rank by id, the lower first. Raises ValueError if size exceeds the vocabulary.
    """
    if size is not None and size > vocab:
        raise ValueError(
            f"draft_vocab must be at most the model's vocabulary of {vocab}, got {size}"
        )
    size = min(vocab, MOST) if size is None else size
    if size == vocab:
        return None
    counts = Counter(t for text in texts for t in text.tokens[text.start :])
    chosen = sorted(range(vocab), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(chosen), device=device)


def maps(token: torch.Tensor, vocab: int) -> dict[str, torch.Tensor]:
    """d2t [Vd] int64, the target's token id minus the head's, and t2d [V] bool, True for tokens
    in the head's vocabulary."""
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[token] = True
    return {"d2t": token - torch.arange(len(token)), "t2d": inside}
