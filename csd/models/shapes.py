"""Models of well-known shapes with random weights: for benchmarks where checkpoints cannot be had.

    std of a matrix = 1 / sqrt(columns),    std of the head = logit_std / sqrt(hidden)

Every layer then passes on values of about the size it was given, attention depends on the prefix,
and the logits of a hidden state, whose mean square the last norm makes 1, have standard deviation
logit_std. At 6 the likeliest of 49,152 tokens has a probability of 0.6 on average; SmolLM2 gives
its likeliest token 0.5 on plain text.
"""

from dataclasses import replace

import torch

from csd.models.config import ModelConfig
from csd.models.decoder import Decoder, Layer

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
    """A decoder with random weights, made on the device. The same seed gives the same weights.

    The head is a tensor of its own even where the shape's is tied: as the embedding it would favour
    the token just read.
    """
    c = name_or_config
    if isinstance(c, str):
        if c not in SHAPES:
            raise ValueError(f"name must be one of {', '.join(map(repr, SHAPES))}, got {c!r}")
        c = SHAPES[c]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        w = torch.empty(shape, dtype=dtype, device=device)
        return w.normal_(std=std, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    q_width, qkv_width = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
    layers = [
        Layer(
            input_norm=ones(c.hidden),
            qkv=normal(qkv_width, c.hidden, std=c.hidden**-0.5),
            qkv_bias=normal(qkv_width, std=0.1) if c.qkv_bias else None,
            q_norm=ones(c.head_dim) if c.qk_norm else None,
            k_norm=ones(c.head_dim) if c.qk_norm else None,
            out=normal(c.hidden, q_width, std=q_width**-0.5),
            post_norm=ones(c.hidden),
            gate_up=normal(2 * c.intermediate, c.hidden, std=c.hidden**-0.5),
            down=normal(c.hidden, c.intermediate, std=c.intermediate**-0.5),
        )
        for _ in range(c.layers)
    ]
    embedding = normal(c.vocab, c.hidden, std=1.0)
    head = normal(c.vocab, c.hidden, std=logit_std * c.hidden**-0.5)
    return Decoder(replace(c, tied=False), embedding, layers, ones(c.hidden), head)
