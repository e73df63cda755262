"""Tiny GGUF files of a `transformers` model, named and ordered as llama.cpp's converter does."""

from typing import Any

import numpy as np
import pytest
import torch

# of the tests' own tokenizer: what each token is when nothing else is given
NORMAL, CONTROL = 1, 3


def model_keys(model) -> dict[str, Any]:
    """Keys as the converter writes them for the model's family."""
    c = model.config
    arch = architecture(model)
    keys = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "attention.key_length": head_dim(model),
        "attention.value_length": head_dim(model),
        "rope.dimension_count": head_dim(model),
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }
    # a file without a vocabulary, which has token ids only
    return {f"{arch}.{k}": v for k, v in keys.items()} | {"tokenizer.ggml.model": "no_vocab"}


def architecture(model) -> str:
    family = model.config.model_type
    return "llama" if family == "mistral" else family


def head_dim(model) -> int:
    c = model.config
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Weights by their names in the file; a Llama's queries and keys pair neighbours there."""
    gguf = pytest.importorskip("gguf")
    arch, found = architecture(model), {}
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for name, w in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = w.view(-1, 2, head_dim(model) // 2, *w.shape[1:])
            w = halves.transpose(1, 2).reshape(w.shape)
        place, _, end = name.rpartition(".")
        found[f"{names.get_name(place)}.{end}"] = w.float()
    return found


def write(model, path, keys=None, tensors=None, drop=()) -> str:
    """The model's file with more `keys` and `tensors`, and without those named in `drop`."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, (keys or {}).get("general.architecture", architecture(model)))
    for key, value in (model_keys(model) | (keys or {})).items():
        if key not in drop and key != "general.architecture":
            _add(writer, key, value)
    for name, w in (tensors_of(model) | (tensors or {})).items():
        if name not in drop:
            writer.add_tensor(name, np.ascontiguousarray(w.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _add(writer, key: str, value: Any) -> None:
    from gguf import GGUFValueType as Kind

    types = {bool: Kind.BOOL, int: Kind.INT32, float: Kind.FLOAT32, str: Kind.STRING}
    if isinstance(value, list):
        writer.add_key_value(key, value, Kind.ARRAY, sub_type=types[type(value[0])])
    elif type(value) is int and value >= 0:
        writer.add_key_value(key, value, Kind.UINT32)
    else:
        writer.add_key_value(key, value, types[type(value)])


def rope_factors(parameters: dict, D: int) -> torch.Tensor:
    """Factors that llama.cpp's converter writes as `rope_freqs.weight` for a Llama 3.1."""
    p, factors = parameters, []
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    for i in range(0, D, 2):
        turns = p["original_max_position_embeddings"] / (2 * np.pi * p["rope_theta"] ** (i / D))
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - blend) / p["factor"] + blend))
    return torch.tensor(factors, dtype=torch.float32)
