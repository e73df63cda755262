"""A decoder with random weights, for checks and timings that need no checkpoint.

    std of a matrix = 1 / sqrt(columns),    std of the head = logit_std / sqrt(hidden)

The output of every layer then is about as large as its input, attention depends on the prefix, and
the logits of a hidden state, which the last norm scales to mean square 1, have standard deviation
logit_std. At 6 the likeliest of 49,152 tokens has a probability of 0.6 on average; SmolLM2 gives
its likeliest token 0.5 on plain text.
"""

from dataclasses import replace

import torch

from csd.models.config import ModelConfig
from csd.models.decoder import Decoder
from csd.models.layer import Layer


def random_decoder(
    config: ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    logit_std: float = 6.0,
    seed: int = 0,
) -> Decoder:
    """A decoder with random weights, made on the device. The same seed gives the same weights.

    The head is a separate tensor even if the config's is tied: a tied head would favour the token
    just read.
    """
    if not config.is_llamas:
        raise ValueError(
            "random weights are supported for models with Llama's layers only, got "
            f"{config.family!r}"
        )
    c = config
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
