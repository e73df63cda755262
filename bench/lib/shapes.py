"""Well-known shapes with random weights, for benchmarks without access to checkpoints."""

from collections.abc import Callable

import torch

from csd.doctor.compare import mapped
from csd.models.demo import random_decoder
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder

SHAPES = {
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab=128256,
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        context=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=(8.0, 1.0, 4.0, 8192),
    ),
    "qwen2.5-7b": ModelConfig(
        family="qwen2",
        vocab=152064,
        hidden=3584,
        intermediate=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        context=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qkv_bias=True,
    ),
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2",
        vocab=151936,
        hidden=896,
        intermediate=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        context=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qkv_bias=True,
    ),
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab=49152,
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        context=8192,
        norm_eps=1e-5,
        rope_theta=100000.0,
        tied=True,
    ),
    "tiny": ModelConfig(
        family="qwen3",
        vocab=499,
        hidden=64,
        intermediate=160,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context=1024,
        norm_eps=1e-6,
        rope_theta=10000.0,
        qk_norm=True,
    ),
}


def random_model(
    name_or_config: str | ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    logit_std: float = 6.0,
    seed: int = 0,
) -> Decoder:
    """Returns `random_decoder` of a config, or of a shape by its name."""
    config = name_or_config
    if isinstance(config, str):
        if config not in SHAPES:
            raise ValueError(f"name must be one of {', '.join(map(repr, SHAPES))}, got {config!r}")
        config = SHAPES[config]
    return random_decoder(config, device, dtype, logit_std, seed)


def converted(decoder: Decoder, change: Callable[[torch.Tensor], torch.Tensor]) -> Decoder:
    """Returns a decoder whose weights are `change` of those of `decoder`."""
    weights = decoder.embedding, decoder.layers, decoder.norm, decoder.head
    return Decoder(decoder.config, *mapped(weights, change))
