"""The head of EAGLE-1 and 2 with gradients, in the parameters' published names.

Of token t[i] and the target's state f[i-1] before it, with E the target's embedding:

    x = fc [E t[i], f[i-1]],   x = x + attention(x),   f'[i] = x + mlp(norm(x))

which is what `csd.graph.model.eagle.EagleHead` computes a level at a time.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn

from csd.models.config import ModelConfig
from csd.models.rope import rope_tables
from csd.models.rope_config import Rope
from csd.training.target import causal


class Attention(nn.Module):
    """Projections, without biases."""

    def __init__(self, c: ModelConfig, **kept: Any):
        super().__init__()
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden, q, bias=False, **kept)
        self.k_proj = nn.Linear(c.hidden, kv, bias=False, **kept)
        self.v_proj = nn.Linear(c.hidden, kv, bias=False, **kept)
        self.o_proj = nn.Linear(q, c.hidden, bias=False, **kept)


class FeedForward(nn.Module):
    """Projections of SwiGLU, `wide` in between."""

    def __init__(self, c: ModelConfig, wide: int, **kept: Any):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, wide, bias=False, **kept)
        self.up_proj = nn.Linear(c.hidden, wide, bias=False, **kept)
        self.down_proj = nn.Linear(wide, c.hidden, bias=False, **kept)


class Layer(nn.Module):
    """Llama's, without its first norm."""

    def __init__(self, c: ModelConfig, wide: int, **kept: Any):
        super().__init__()
        self.self_attn = Attention(c, **kept)
        self.mlp = FeedForward(c, wide, **kept)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps, **kept)


class TrainedHead(nn.Module):
    """One decoder layer of the target's sizes; its attention is scaled by head_dim^-0.5.

    Weights are kept in `dtype`, bfloat16 ones in float32; products and files are in `dtype`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int):
        super().__init__()
        c, self.config, self.dtype = config, config, dtype
        kept = dict(dtype=torch.promote_types(dtype, torch.float32), device=device)
        # a mixture of experts has as wide a feed-forward part as a token sees
        self.intermediate = c.intermediate * max(c.experts_per_token, 1)
        self.fc = nn.Linear(2 * c.hidden, c.hidden, bias=False, **kept)
        self.layers = nn.ModuleList([Layer(c, self.intermediate, **kept)])
        # the default rotary embedding of the target's theta
        rope = Rope(c.rope_theta, None, "default", 1.0)
        self.cos, self.sin = rope_tables(rope, c.head_dim, c.context, dtype, device)
        self._begin(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _begin(self, generator: torch.Generator) -> None:
        """Random weights, but the parts that add to a residual begin at 0: f' = fc [E t, f]."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                drawn = torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
                weight.copy_(drawn * (not name.endswith(("o_proj.weight", "down_proj.weight"))))
        hidden = self.config.hidden
        # the state before is the first guess of the next
        self.fc.weight[:, hidden:] = torch.eye(hidden)

    def forward(
        self,
        embedded: torch.Tensor,  # [M, hidden], of tokens
        before: torch.Tensor,  # [M, hidden], the target's states before them
        lengths: list[int],  # of texts, one behind the other; they sum to M
    ) -> torch.Tensor:
        """The states [M, hidden] that are guessed to follow. A text's first pair is its place 0."""
        c = self.config
        layer: Any = self.layers[0]
        x = self._times(self.fc, torch.cat([embedded, before], -1).to(self.dtype))
        place = torch.cat([torch.arange(n, device=x.device) for n in lengths])
        cos, sin = self.cos[place][:, None], self.sin[place][:, None]
        attention = layer.self_attn
        q, k, v = (
            self._times(product, x).unflatten(-1, (-1, c.head_dim))
            for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (y * cos + _halves_turned(y) * sin for y in (q, k))
        mixed = causal(q, k, v, lengths, c.head_dim**-0.5).flatten(1)
        x = x + self._times(attention.o_proj, mixed)
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        y = F.rms_norm(x.to(norm.weight.dtype), norm.normalized_shape, norm.weight, norm.eps)
        y = y.to(self.dtype)
        y = F.silu(self._times(mlp.gate_proj, y)) * self._times(mlp.up_proj, y)
        return x + self._times(mlp.down_proj, y)

    def _times(self, product: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, product.weight.to(self.dtype))

    def published(self) -> tuple[bytes, bytes]:
        """config.json and model.safetensors, without the target's embedding and head."""
        c = self.config
        config = dict(
            architectures=["LlamaForCausalLM"], model_type="llama", bias=False,
            hidden_size=c.hidden, intermediate_size=self.intermediate, num_hidden_layers=1,
            num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
            rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, hidden_act="silu",
            max_position_embeddings=c.context, vocab_size=c.vocab, tie_word_embeddings=c.tied,
            torch_dtype=str(self.dtype).removeprefix("torch."),
        )  # fmt: skip
        weights = {k: x.detach().to("cpu", self.dtype) for k, x in self.named_parameters()}
        return json.dumps(config, indent=1).encode() + b"\n", save(weights)


def _halves_turned(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
