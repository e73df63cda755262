"""Parts of all EAGLE heads: the products of a Llama layer, with gradients."""

import json
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn

from csd.models.fused.config import ModelConfig
from csd.models.fused.rope import Rope, rope_tables


def products(sizes: dict[str, tuple[int, int]], **factory: Any) -> nn.Module:
    """Module of products without biases. sizes: by name, widths of the rows read and written."""
    made = nn.Module()
    for name, (read, written) in sizes.items():
        made.add_module(name, nn.Linear(read, written, bias=False, **factory))
    return made


class HeadLayer(nn.Module):
    """Llama layer without its first norm, with intermediate width `wide`; its attention reads rows
    of width `read`."""

    def __init__(self, c: ModelConfig, wide: int, read: int, **factory: Any):
        super().__init__()
        q, kv, hidden = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden
        attention = dict(q_proj=(read, q), k_proj=(read, kv), v_proj=(read, kv), o_proj=(q, hidden))
        self.self_attn = products(attention, **factory)
        mlp = dict(gate_proj=(hidden, wide), up_proj=(hidden, wide), down_proj=(wide, hidden))
        self.mlp = products(mlp, **factory)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps, **factory)


class DraftHead(nn.Module):
    """One decoder layer of the target's sizes; its attention is scaled by head_dim^-0.5.

    Weights are stored in `dtype`, or in float32 for bfloat16; products and files are in `dtype`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        c, self.config, self.dtype = config, config, dtype
        stored = torch.promote_types(dtype, torch.float32)
        self.factory: dict[str, Any] = dict(dtype=stored, device=device)  # for parameters
        # for a mixture of experts, as wide as all experts of a token together
        self.intermediate = c.intermediate * max(c.experts_per_token, 1)
        self.scale = c.head_dim**-0.5
        # the default rotary embedding for the target's theta
        rope = Rope(c.rope_theta, scaling=None, kind="default", attention=1.0)
        self.cos, self.sin = rope_tables(rope, c.head_dim, c.context, dtype, device)

    @torch.no_grad()
    def _begin(self, seed: int) -> None:
        """Initialise weights randomly; products that are added to a residual are 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                drawn = torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
                weight.copy_(drawn * (not name.endswith(("o_proj.weight", "down_proj.weight"))))

    def _times(self, product: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, product.weight.to(self.dtype))

    def _normed(self, norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x.to(norm.weight.dtype), norm.normalized_shape, norm.weight, norm.eps)
        return y.to(self.dtype)

    def _heads(
        self, product: nn.Linear, x: torch.Tensor, position: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Products [M, heads, head_dim] of x [M, read]; with positions [M], RoPE is applied."""
        y = self._times(product, x).unflatten(-1, (-1, self.config.head_dim))
        if position is None:
            return y
        a, b = y.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
        return y * self.cos[position][:, None] + turned * self.sin[position][:, None]

    def _after(self, layer: Any, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Layer output [M, hidden] for its residual and attention result [M, heads, head_dim]."""
        x = residual + self._times(layer.self_attn.o_proj, mixed.flatten(1))
        y, mlp = self._normed(layer.post_attention_layernorm, x), layer.mlp
        y = F.silu(self._times(mlp.gate_proj, y)) * self._times(mlp.up_proj, y)
        return x + self._times(mlp.down_proj, y)

    def published(self) -> tuple[bytes, bytes]:
        """Contents of config.json and model.safetensors, without the target's embedding."""
        weights = {k: x.detach().to("cpu", self.dtype) for k, x in self.named_parameters()}
        config = json.dumps(self._settings(), indent=1).encode() + b"\n"
        return config, save(weights | self._maps())

    def _settings(self) -> dict[str, Any]:
        c = self.config
        return dict(
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            bias=False,
            hidden_size=c.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=1,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.norm_eps,
            rope_theta=c.rope_theta,
            hidden_act="silu",
            max_position_embeddings=c.context,
            vocab_size=c.vocab,
            tie_word_embeddings=c.tied,
            torch_dtype=str(self.dtype).removeprefix("torch."),
        )

    def _maps(self) -> dict[str, torch.Tensor]:
        """Tensors of the file that are not weights."""
        return {}
