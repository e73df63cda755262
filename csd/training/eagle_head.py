"""EAGLE-1 and 2 head with gradients; parameters have their published names.

For token t[i] and the target's state f[i-1] before it, with E the target's embedding:

    x = fc [E t[i], f[i-1]],   x = x + attention(x),   f'[i] = x + mlp(norm(x))

`csd.graph.model.eagle.EagleHead` computes the same, one level at a time.
"""

from typing import Any

import torch
from torch import nn

from csd.models.fused.config import ModelConfig
from csd.training.head_parts import DraftHead, Layer
from csd.training.target import causal


class TrainedHead(DraftHead):
    """Head that reads the target's last states; its logits come from the target's own head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int):
        super().__init__(config, dtype, device)
        c = config
        self.fc = nn.Linear(2 * c.hidden, c.hidden, bias=False, **self.kept)
        self.layers = nn.ModuleList([Layer(c, self.intermediate, c.hidden, **self.kept)])
        self._begin(seed)

    @torch.no_grad()
    def _begin(self, seed: int) -> None:
        super()._begin(seed)
        # initially the guess f' = fc [E t, f] is the state before, f, plus a random projection of
        # the embedding
        hidden = self.config.hidden
        self.fc.weight[:, hidden:] = torch.eye(hidden)

    def forward(
        self,
        embedded: torch.Tensor,  # [M, hidden], embeddings of tokens
        before: torch.Tensor,  # [M, hidden], the target's states before them
        lengths: list[int],  # lengths of the concatenated texts; they sum to M
    ) -> torch.Tensor:
        """Guessed states [M, hidden] of the tokens. A text's first pair has position 0."""
        layer: Any = self.layers[0]
        attention = layer.self_attn
        x = self._times(self.fc, torch.cat([embedded, before], -1).to(self.dtype))
        place = torch.cat([torch.arange(n, device=x.device) for n in lengths])
        q, k = (self._heads(y, x, place) for y in (attention.q_proj, attention.k_proj))
        v = self._heads(attention.v_proj, x)
        return self._after(layer, x, causal(q, k, v, lengths, self.scale))
