"""Tiny GGUF files of a `transformers` model, named and ordered as llama.cpp's converter does."""

from typing import Any

import numpy as np
import pytest
import torch

# of the tests' own tokenizer: what each token is when nothing else is given
NORMAL, CONTROL = 1, 3


# tiny models of the architectures that checkpoints.FAMILIES does not have
WIDTHS = dict(hidden_size=64, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2)
KINDS = {
    "qwen3moe": dict(
        model_type="qwen3_moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "phi3": dict(
        model_type="phi3",
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=None,
        rope_parameters=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.75),
    ),
    "gemma2": dict(
        model_type="gemma2",
        num_hidden_layers=3,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=64,
        attn_logit_softcapping=2.5,
        final_logit_softcapping=7.0,
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        num_hidden_layers=7,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=64,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
}


def build(architecture: str, **changes):
    """A tiny model of a family that is written as this architecture."""
    from helpers.models import checkpoints

    if architecture in checkpoints.FAMILIES:
        return checkpoints.build(architecture, **changes)
    return checkpoints.build("llama", **WIDTHS | KINDS[architecture] | changes)


def model_keys(model) -> dict[str, Any]:
    """Keys as the converter writes them for the model's family."""
    c = model.config
    arch = architecture(model)
    full = c.rope_parameters.get("full_attention", c.rope_parameters)
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
        "rope.dimension_count": int(head_dim(model) * (full.get("partial_rotary_factor") or 1)),
        "rope.freq_base": float(full["rope_theta"]),
    }
    if arch == "qwen3moe":
        keys |= {
            "expert_count": c.num_experts,
            "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
        }
    if arch in ("gemma2", "gemma3", "phi3"):
        keys["attention.sliding_window"] = c.sliding_window or 0
    if arch == "gemma2":
        keys["attn_logit_softcapping"] = c.attn_logit_softcapping
        keys["final_logit_softcapping"] = c.final_logit_softcapping
    if full["rope_type"] == "linear" and arch == "gemma3":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    if full["rope_type"] == "longrope":
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = full["attention_factor"]
    # a file without a vocabulary, which has token ids only
    return {f"{arch}.{k}": v for k, v in keys.items()} | {"tokenizer.ggml.model": "no_vocab"}


ARCHITECTURES = {"mistral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def architecture(model) -> str:
    family = model.config.model_type
    return ARCHITECTURES.get(family, family)


def head_dim(model) -> int:
    c = model.config
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Weights by their names in the file.

    A Llama's queries and keys pair neighbours there, and norms of Gemma have 1 added.
    """
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
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            w = w + 1
        place, _, end = name.rpartition(".")
        if "mlp.experts." in name:
            layer = name.split(".")[2]
            parts = w.chunk(2, 1) if "gate_up" in name else (w,)
            ends = ("gate", "up") if "gate_up" in name else ("down",)
            for part, what in zip(parts, ends, strict=True):
                found[f"blk.{layer}.ffn_{what}_exps.weight"] = part.float().contiguous()
            continue
        found[f"{names.get_name(place)}.{end}"] = w.float()
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for size in ("short", "long"):
            found[f"rope_factors_{size}.weight"] = torch.tensor(rope[f"{size}_factor"])
    return found


def write(model, path, keys=None, tensors=None, drop=(), types=None) -> str:
    """The model's file with more `keys` and `tensors`, and without those named in `drop`.

    types: of tensors in blocks, by name.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, (keys or {}).get("general.architecture", architecture(model)))
    for key, value in (model_keys(model) | (keys or {})).items():
        if key not in drop and key != "general.architecture":
            _add(writer, key, value)
    for name, w in (tensors_of(model) | (tensors or {})).items():
        if name not in drop:
            data = w if isinstance(w, np.ndarray) else w.numpy()
            kind = (types or {}).get(name)
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# widths of whole blocks of quantised types
WHOLE_BLOCKS = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
)


def quantised(path, kinds=None, kind="Q8_0", architecture="qwen2", **more) -> str:
    """A tiny model's file, whose matrices have a type, or another one by a part of their names."""
    gguf = pytest.importorskip("gguf")
    experts = dict(moe_intermediate_size=32) if architecture == "qwen3moe" else {}
    model = build(architecture, **WHOLE_BLOCKS | experts)
    tensors, types = tensors_of(model), {}
    for name, w in tensors.items():
        if w.ndim > 1:
            known = (k for part, k in (kinds or {}).items() if part in name)
            types[name] = gguf.GGMLQuantizationType[next(known, kind)]
    rounded = {n: gguf.quants.quantize(tensors[n].numpy(), t) for n, t in types.items()}
    return write(model, path / "tiny.gguf", tensors=rounded, types=types, **more)


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
