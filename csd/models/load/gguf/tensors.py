"""Conversion of all tensors of a GGUF file to the weights of a `transformers` module."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Shape = tuple[int, ...]


def weights(tensors: Any, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Dequantised state dict in `dtype`, without `rope_freqs.weight` (`frequency_factors`).

    Raises ValueError, naming tensors, for one that is missing, left over, of another shape or of a
    type that cannot be dequantised.
    """
    places = dict(_places(config, tied=all(t.name != "output.weight" for t in tensors)))
    _check(tensors, places, config)
    state = {}
    for tensor in tensors:
        if tensor.name in places:
            rows = torch.from_numpy(_rows(tensor, config)).to(dtype)
            state[places[tensor.name][0]] = rows
    return state


def frequency_factors(tensors: Any) -> torch.Tensor | None:
    """Divisors [D / 2] of the rotary frequencies, in Llama 3.1 and later; None if absent."""
    for tensor in tensors:
        if tensor.name == "rope_freqs.weight":
            factors = torch.from_numpy(_dequantised(tensor)).float()
            if not (factors.isfinite() & (factors > 0)).all():
                raise ValueError("its rope_freqs.weight must be positive")
            return factors
    return None


def _places(config: Any, tied: bool) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Yield each weight's name in the file, name in the module and shape."""
    c, hidden, D = config, config.hidden_size, config.head_dim
    yield "token_embd.weight", ("model.embed_tokens.weight", (c.vocab_size, hidden))
    yield "output_norm.weight", ("model.norm.weight", (hidden,))
    if not tied:
        yield "output.weight", ("lm_head.weight", (c.vocab_size, hidden))
    q, kv = c.num_attention_heads * D, c.num_key_value_heads * D
    layer: dict[str, tuple[str, Shape]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (q, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (kv, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (kv, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (c.intermediate_size, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (c.intermediate_size, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, c.intermediate_size)),
    }
    if c.model_type == "qwen2":
        layer["attn_q.bias"] = ("self_attn.q_proj.bias", (q,))
        layer["attn_k.bias"] = ("self_attn.k_proj.bias", (kv,))
        layer["attn_v.bias"] = ("self_attn.v_proj.bias", (kv,))
    if c.model_type == "qwen3":
        layer["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (D,))
        layer["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (D,))
    for i in range(c.num_hidden_layers):
        for name, (name_of, shape) in layer.items():
            yield f"blk.{i}.{name}", (f"model.layers.{i}.{name_of}", shape)


def _check(tensors: Any, places: dict[str, tuple[str, Shape]], config: Any) -> None:
    want = {name: shape for name, (_, shape) in places.items()}
    if config.model_type == "llama" and any(t.name == "rope_freqs.weight" for t in tensors):
        want["rope_freqs.weight"] = (config.head_dim // 2,)
    # GGUF lists the innermost dimension first
    have = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in tensors}
    model = f"a {config.model_type} model of {config.num_hidden_layers} layers"
    if missing := sorted(want.keys() - have.keys()):
        raise ValueError(f"it lacks the tensors {_some(missing)} of {model}")
    if beyond := sorted(have.keys() - want.keys()):
        text = f"it has tensors that {model} does not use"
        raise ValueError(f"{text}: {_some(beyond)}")
    for name, shape in want.items():
        if have[name] != shape:
            raise ValueError(
                f"its {name} must have shape {shape} according to its keys, got {have[name]}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _rows(tensor: Any, config: Any) -> np.ndarray:
    rows = _dequantised(tensor)
    if config.model_type != "llama" or not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return rows
    # rotary embedding pairs neighbouring rows in the file, and two halves of a head in the module
    pairs = rows.reshape(-1, config.head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _dequantised(tensor: Any) -> np.ndarray:
    from gguf import dequantize

    try:
        # a copy in memory, since the file's own numbers are mapped read-only
        return np.array(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"its {tensor.name} is of type {kind}, which is not supported") from error
