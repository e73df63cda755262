"""The tokens of an EAGLE-3 head's own vocabulary, and their published maps."""

from collections import Counter

import torch

from csd.training.texts import Text

# of a larger vocabulary so many tokens are drafted, as by published heads
MOST = 32_000


def draft_tokens(
    texts: list[Text], vocab: int, size: int | None, device: torch.device
) -> torch.Tensor | None:
    """The `size` tokens that the texts' samples have most often, ascending; None for all tokens.

    size: None takes the whole vocabulary up to `MOST` tokens, or the first `MOST`. Of tokens that
    are as frequent the lower ones are taken. Raises ValueError where size is above the vocabulary.
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
    """d2t [Vd] int64, by which the target's token is above the head's, and t2d [V] bool, the
    tokens that the head has."""
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[token] = True
    return {"d2t": token - torch.arange(len(token)), "t2d": inside}
