"""Tiny random checkpoints of every family, written to disk as `transformers` writes real ones."""

from functools import partial
from pathlib import Path

import torch
import transformers

VOCAB = 97
CONTEXT = 512
STOP = (1, 2)

# sizes differ on purpose: heads that share keys by 2, 3 or 4, head_dim not always hidden / heads
FAMILIES = {
    "llama": dict(
        model_type="llama",
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
    "llama3": dict(
        model_type="llama",
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        # wavelengths above, within and below the band that is blended
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "mistral": dict(
        model_type="mistral",
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=None,
    ),
    "qwen2": dict(
        model_type="qwen2",
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    "qwen3": dict(
        model_type="qwen3",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
}


def config(family: str, *, tied: bool = False, **changes) -> transformers.PreTrainedConfig:
    options = FAMILIES[family] | dict(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=list(STOP),
        pad_token_id=None,
    )
    options |= changes
    return transformers.AutoConfig.for_model(**options)


def build(
    family: str,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    generation: dict | None = None,
    **changes,
) -> transformers.PreTrainedModel:
    """A model with random weights, biases and norms. The same weights in every dtype."""
    model = transformers.AutoModelForCausalLM.from_config(
        config(family, tied=tied, **changes), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            # far wider than a real model's start, so that logits differ by several units
            scale, shift = (0.2, 1.0) if "norm" in name else (0.35, 0.0)
            param.copy_(normal(param.shape) * scale + shift)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(STOP), pad_token_id=0, **(generation or {})
    )
    # not model.to(dtype), which would round the rotary frequencies too
    for param in model.parameters():
        param.data = param.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def make(
    family: str,
    folder,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    generation: dict | None = None,
    **changes,
) -> str:
    """Write a checkpoint into `folder`, which is made when missing. Returns its path.

    family: one of `FAMILIES`. generation: more of the generation config. changes: of the config.
    """
    model = build(family, tied=tied, dtype=dtype, seed=seed, generation=generation, **changes)
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return str(folder)


class Cache:
    """Checkpoints of one test run, each written once."""

    def __init__(self, root):
        self.root = Path(root)

    def __call__(self, family: str, *, tied: bool = False, dtype=torch.float32) -> str:
        folder = self.root / f"{family}-{'tied' if tied else 'untied'}-{str(dtype)[6:]}"
        if not folder.exists():
            make(family, folder, tied=tied, dtype=dtype)
        return str(folder)
