"""Drafting network of a model, or of its first layers."""

import copy
from dataclasses import replace
from typing import Any

import torch

from csd.kernels.ops import Ops
from csd.models.fused.decoder import Decoder, DecoderLike
from csd.utils.check import shown


def first_layers(decoder: DecoderLike, layers: int) -> Decoder:
    """Make a decoder of the first layers, with the last norm and head; no weight is copied."""
    if not isinstance(decoder, Decoder):
        raise TypeError(f"layers needs a csd Decoder, got {type(decoder).__name__}")
    if not 1 <= layers <= len(decoder.layers):
        raise ValueError(f"layers must be from 1 to {len(decoder.layers)}, got {shown(layers)}")
    made = copy.copy(decoder)
    made.layers, made.taps, made.tapped = decoder.layers[:layers], (), {}
    made.config = replace(decoder.config, layers=layers)
    return made


class ModelNetwork:
    """A draft model as `csd.graph.model.cache.DraftNetwork`, without the target's hidden states."""

    wants_hidden = False
    state_width = 0

    def __init__(self, decoder: DecoderLike, dtype: torch.dtype):
        self.decoder, self.config, self.dtype = decoder, decoder.config, dtype
        if getattr(self.config, "states", None) is not None:
            family = self.config.family
            raise ValueError(f"a draft model must have no layers with a state, got a {family!r}")

    def forward(
        self, token: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor | None,
        attend: Any, node_k: torch.Tensor, node_v: torch.Tensor, ops: Ops,
    ) -> torch.Tensor:  # fmt: skip
        # clamp positions beyond the context, also those of nodes that no slot has room for
        position = position.clamp(max=self.config.context - 1)
        return self.decoder.forward(token, position, attend, node_k, node_v, ops)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)

    def attach(self, decoder: Any) -> None:
        pass

    def start_call(self) -> None:
        if isinstance(self.decoder, Decoder):
            self.decoder.begin_call()

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
