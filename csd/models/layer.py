"""Weights of a layer of the fused decoder."""

from dataclasses import dataclass, field

import torch

from csd.models.delta_net import DeltaNet
from csd.models.experts import Experts
from csd.models.lora_stacks import Stack

# fused products of a layer, each made of one or more of a module's
PRODUCTS = "qkv", "out", "gate_up", "down"


@dataclass(slots=True)
class Layer:
    """Weights of one layer; F is the width of the feed-forward part, which experts replace."""

    input_norm: torch.Tensor | None  # [hidden]
    qkv: torch.Tensor  # [(H + 2 K) D, hidden]; other rows in a gated layer
    qkv_bias: torch.Tensor | None  # [(H + 2 K) D]
    q_norm: torch.Tensor | None  # [D], or [H D] for all heads at once
    k_norm: torch.Tensor | None  # [D], or [K D]
    out: torch.Tensor  # [hidden, H D]
    post_norm: torch.Tensor | None  # [hidden]
    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor  # [hidden, F]
    # norms of the outputs of attention and feed-forward
    attention_norm: torch.Tensor | None = None  # [hidden]
    mlp_norm: torch.Tensor | None = None  # [hidden]
    experts: Experts | None = None
    # in place of attention; q_norm and k_norm are None then
    delta: DeltaNet | None = None
    # LoRA added to each of the four products, by name
    lora: dict[str, list[Stack]] = field(default_factory=dict)
