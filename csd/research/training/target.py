"""Target model over whole texts: hidden states in one pass over their tokens, and logits."""

from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.backends import choose
from csd.models.fused.config import ModelConfig, scale_of
from csd.models.fused.decoder import Decoder
from csd.research.training.texts import Text


class Target:
    """Decoder that reads batches of texts and keeps no state between them."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.config = decoder, decoder.config
        self.embedding, self.head = decoder.embedding.detach(), decoder.head.detach()
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.ops = choose(None, self.device, self.dtype)
        self.scale = scale_of(self.config)
        # weight of the last norm, as a factor of rows
        self.norm = decoder.norm.detach() + self.config.plus_one

    @torch.no_grad()
    def states(self, batch: list[Text]) -> torch.Tensor:
        """Hidden states [tokens of the batch, hidden] after the last norm."""
        c, lengths = self.config, [len(text.tokens) for text in batch]
        token = torch.tensor([t for text in batch for t in text.tokens], dtype=torch.int32)
        position = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
        # all layers share one buffer, so only one layer's keys and values are in memory
        one = torch.empty(
            (2, 1, len(token), c.kv_heads, c.head_dim), dtype=self.dtype, device=self.device
        )
        k, v = one.expand(2, c.layers, *one.shape[2:])

        def attend(layer: int, q: torch.Tensor, **_windows: Any) -> torch.Tensor:
            # `refuse_attention` ensures that no text is longer than a window
            return causal(q, k[layer], v[layer], lengths, self.scale)

        return self.decoder.forward(
            token.to(self.device), position.to(self.device), attend, k, v, self.ops
        )

    def states_and_taps(self, batch: list[Text]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states as from `states`, and joined inputs [tokens, taps * hidden] of the taps."""
        states, tapped = self.states(batch), self.decoder.tapped
        joined = torch.cat([tapped[layer] for layer in self.decoder.taps], -1)
        tapped.clear()
        return states, joined

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden states [R, hidden]."""
        z = F.linear(hidden.to(self.dtype), self.head)
        return z if self.config.logit_divisor == 1 else z / self.config.logit_divisor

    def logits_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Backward of `logits`: gradient [R, hidden] for a gradient [R, V] of the logits."""
        return gradient.to(self.dtype) @ self.head / self.config.logit_divisor


def refuse_attention(config: ModelConfig, longest: int) -> None:
    """Raises ValueError for a model with a feature that `causal` or `logits` does not support.

    longest: largest number of tokens of a text.
    """
    if config.delta is not None:
        raise ValueError(
            "model must have no layers with a state: training a head is not supported for them"
        )
    for name, cap in (("scores", config.softcap), ("logits", config.final_cap)):
        if cap is not None:
            raise ValueError(
                f"model must have no cap on {name}, got {cap}: training a head is not supported "
                "for it"
            )
    window = config.window if config.local and any(config.local) else None
    if window is not None and window < longest:
        raise ValueError(
            f"batch must be at most {window}, the window of the model's attention, for texts "
            f"longer than that, got a text of {longest} tokens"
        )


def causal(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    v: torch.Tensor,  # [M, K, D]
    lengths: list[int],  # lengths of the concatenated texts; they sum to M
    scale: float,
) -> torch.Tensor:
    """Causal attention softmax(scale q k^T) v [M, H, D] of each row within its own text."""
    out = []
    for text in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        own, keys, values = (x.transpose(0, 1)[None] for x in text)
        attended = F.scaled_dot_product_attention(
            own, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)
