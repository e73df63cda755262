"""Training of EAGLE-3 heads: unrolls chains of a head's own states and compares tokens."""

from typing import Any

import torch
import torch.nn.functional as F

from csd.graph.model.eagle import FEWEST, read_layers
from csd.training.chain_losses import ChainLosses, chain_losses
from csd.training.draft_vocab import draft_tokens
from csd.training.eagle3_head import Eagle3Head
from csd.training.pairs import Pairs
from csd.training.recipe import Recipe
from csd.training.target import Target
from csd.training.texts import Text


class ByChains:
    """Training of a head that reads three of the target's layers, then its own states.

    Raises ValueError, naming the argument, for a model with too few layers or tokens.
    """

    def __init__(self, target: Target, recipe: Recipe, learnt: list[Text], dtype: torch.dtype):
        assert recipe.depth is not None and recipe.decay is not None
        self.depth, self.decay, self.target = recipe.depth, recipe.decay, target
        config = target.config
        if config.layers < FEWEST:
            raise ValueError(
                f"model must have at least {FEWEST} layers for eagle=3, got {config.layers}"
            )
        token = draft_tokens(learnt, config.vocab, recipe.draft_vocab, target.device)
        target.decoder.taps = read_layers(config.layers)
        self.head = Eagle3Head(target, token, dtype, recipe.seed)

    def none(self) -> ChainLosses:
        return ChainLosses.none(self.depth)

    def losses(self, texts: list[Text], step: int | None = None) -> ChainLosses:
        states, joined = self.target.states_and_taps(texts)
        pairs = Pairs(texts, self.target.device)
        embedded = F.embedding(pairs.token[pairs.at], self.target.embedding)
        guesses = self.head(embedded, joined[pairs.at - 1], pairs, self.depth)
        decay = None if step is None else self.decay
        return chain_losses(
            self.target, self.head, guesses, states[pairs.place], pairs, self.depth, decay
        )

    def mean(self, found: ChainLosses) -> float:
        return found.mean(self.decay)

    def acceptance(self, found: ChainLosses) -> dict[str, Any]:
        """The first step's acceptance, and `by_step`, those of all steps, None without places."""
        by_step = found.acceptance
        return {"acceptance": by_step[0], "by_step": by_step if found.places[0] else None}
