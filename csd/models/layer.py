"""Weights of a layer of the fused decoder."""

from dataclasses import dataclass, field

import torch

from csd.models.delta_net import DeltaNet
from csd.models.experts import Experts
from csd.models.lora_stacks import Stack

# of a layer, each of one or more of a module's
PRODUCTS = "qkv", "out", "gate_up", "down"


@dataclass(slots=True)
class Layer:
    """Weights of one layer; F is the width of the feed-forward part. Experts have none of it."""

    input_norm: torch.Tensor | None  # [hidden]
    qkv: torch.Tensor  # [(H + 2 K) D, hidden], or a gated layer's own
    qkv_bias: torch.Tensor | None  # [(H + 2 K) D]
    q_norm: torch.Tensor | None  # [D], or [H D] of whole rows
    k_norm: torch.Tensor | None  # [D], or [K D]
    out: torch.Tensor  # [hidden, H D]
    post_norm: torch.Tensor | None  # [hidden]
    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor  # [hidden, F]
    # norms of what attention and feed-forward give
    attention_norm: torch.Tensor | None = None  # [hidden]
    mlp_norm: torch.Tensor | None = None  # [hidden]
    experts: Experts | None = None
    # in the place of attention; q_norm and k_norm are None then
    delta: DeltaNet | None = None
    # LoRA beside each of the four products
    lora: dict[str, list[Stack]] = field(default_factory=dict)
