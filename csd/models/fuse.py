"""A loaded `transformers` model as a decoder, sharing its memory.

Query, key and value weights become one matrix, and so do gate and up. The module's parameters are
rebound to views of the fused tensors through `param.data`, so each Parameter object stays the same
and there is one copy of the weights: an optimiser made earlier moves both.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from csd.models.config import ModelConfig
from csd.models.decoder import Decoder, Layer
from csd.models.scattered import refuse_absent, refuse_scattered
from csd.models.unchanged import refuse_changed

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def fuse(model: Any) -> Decoder:
    """Fuse `model` in place, layer by layer, and return the decoder over its weights.

    A model that is fused already keeps its memory. Raises ValueError or TypeError for what csd does
    not run and for weights that are not plain local tensors.
    """
    config = checked_config(model)
    inner: Any = model.model
    layers = [_fuse_layer(config, layer) for layer in inner.layers]
    head = model.lm_head.weight.data
    embedding = inner.embed_tokens.weight.data
    # the module's own: model.to(bfloat16) rounds them, and its logits with them
    w = inner.rotary_emb.inv_freq
    return Decoder(config, embedding, layers, inner.norm.weight.data, head, w)


def checked_config(model: nn.Module) -> ModelConfig:
    """The sizes of a model; raises as `fuse` does for what csd does not run."""
    _refuse_wrapped(model)
    if not hasattr(model, "config"):
        raise TypeError(f"{type(model).__name__} is not a transformers model: it has no config")
    config = ModelConfig.from_transformers(model.config)
    if not hasattr(model, "lm_head"):
        raise TypeError(
            f"{type(model).__name__} has no lm_head; load the model with AutoModelForCausalLM"
        )
    _refuse_weights(model, config)
    _refuse_sizes(model, config)
    refuse_changed(model, config)
    return config


def is_fused(model: Any, decoder: Decoder) -> bool:
    """Whether the module's weights, sizes and rotary frequencies still are the decoder's.

    Weights are compared by address, which `model.to()` or a load that replaces tensors changes.
    """
    inner: Any = model.model
    if len(inner.layers) != len(decoder.layers) or checked_config(model) != decoder.config:
        return False
    if not _same_values(inner.rotary_emb.inv_freq, decoder.frequencies):
        return False
    pairs: list[tuple] = [
        (inner.embed_tokens.weight, decoder.embedding),
        (inner.norm.weight, decoder.norm),
        (model.lm_head.weight, decoder.head),
    ]
    for module, layer in zip(inner.layers, decoder.layers, strict=True):
        attention, mlp = module.self_attn, module.mlp
        pairs += [
            (module.input_layernorm.weight, layer.input_norm),
            (module.post_attention_layernorm.weight, layer.post_norm),
            (attention.o_proj.weight, layer.out),
            (mlp.down_proj.weight, layer.down),
        ]
        pairs += _parts((mlp.gate_proj, mlp.up_proj), "weight", layer.gate_up)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        pairs += _parts(projections, "weight", layer.qkv)
        if layer.qkv_bias is not None:
            pairs += _parts(projections, "bias", layer.qkv_bias)
        if layer.q_norm is not None:
            pairs += [
                (attention.q_norm.weight, layer.q_norm),
                (attention.k_norm.weight, layer.k_norm),
            ]
    return all(
        p.data_ptr() == t.data_ptr()
        and p.dtype == t.dtype
        and p.device == t.device
        and p.stride() == t.stride()
        for p, t in pairs
    )


def _same_values(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    return y is not None and x.device == y.device and x.dtype == y.dtype and torch.equal(x, y)


def _parts(modules: Iterable[nn.Module], name: str, fused: torch.Tensor) -> list[tuple]:
    params = [getattr(m, name) for m in modules]
    return list(zip(params, fused.split([p.shape[0] for p in params]), strict=True))


def _fuse_layer(config: ModelConfig, layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_join(projections, "weight"),
        qkv_bias=_join(projections, "bias") if config.qkv_bias else None,
        q_norm=attention.q_norm.weight.data if config.qk_norm else None,
        k_norm=attention.k_norm.weight.data if config.qk_norm else None,
        out=attention.o_proj.weight.data,
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_join((mlp.gate_proj, mlp.up_proj), "weight"),
        down=mlp.down_proj.weight.data,
    )


@torch.no_grad()
def _join(modules: Iterable[nn.Module], name: str) -> torch.Tensor:
    """One tensor of the modules' parameters, which become views of it."""
    params = [getattr(m, name) for m in modules]
    rows = [p.shape[0] for p in params]
    whole = _joined(params, sum(rows))
    if whole is not None:
        return whole
    fused = torch.cat([p.data for p in params])
    for param, view in zip(params, fused.split(rows), strict=True):
        param.data = view
    return fused


def _joined(params: list[nn.Parameter], rows: int) -> torch.Tensor | None:
    """The one tensor that the parameters are consecutive views of, if an earlier call made it so:
    two engines on one model share its memory."""
    first, end = params[0].data, params[0].data_ptr()
    for p in params:
        same = p.data.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not p.is_contiguous() or p.data_ptr() != end:
            return None
        end += p.numel() * p.element_size()
    shape = (rows, *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _refuse_wrapped(model: nn.Module) -> None:
    kinds = {c.__name__ for m in [model, *model.modules()] for c in type(m).__mro__}
    if hasattr(model, "peft_config") or "PeftModel" in kinds or "BaseTunerLayer" in kinds:
        raise TypeError(
            "a PEFT model cannot be fused; pass model.merge_and_unload(), or a merged copy"
        )
    refuse_scattered(model)


def _refuse_sizes(model: Any, config: ModelConfig) -> None:
    """Raises ValueError where a weight has another shape than the config says."""
    # the embedding first: it is what users resize
    wanted = {
        "model.embed_tokens": (config.vocab, config.hidden),
        "lm_head": (config.vocab, config.hidden),
    }
    for name, shape in wanted.items():
        found = tuple(model.get_submodule(name).weight.shape)
        if found != shape:
            raise ValueError(
                f"{name}.weight must have the shape {shape} of the config's vocab_size and "
                f"hidden_size, got {found}"
            )


def _refuse_weights(model: nn.Module, config: ModelConfig) -> None:
    for name, module in model.named_modules():
        if not name.endswith(("_proj", "lm_head")):
            continue
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{name} is a {type(module).__name__}, not a plain Linear: quantised or wrapped "
                "weights are not supported; load the model in bfloat16, float16 or float32"
            )
    biased = ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()
    for name, module in model.named_modules():
        if getattr(module, "bias", None) is not None and not name.endswith(biased):
            raise TypeError(f"{name} has a bias, which is not supported for {config.family}")
    for name, param in model.named_parameters():
        refuse_absent(name, param)
        if type(param.data) is not torch.Tensor:
            raise TypeError(
                f"{name} is a {type(param.data).__name__}; pass a model with plain local weights"
            )
        if param.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {param.dtype}: quantised weights are not supported")
    for what in ("device", "dtype"):
        found = sorted({str(getattr(p, what)) for p in model.parameters()})
        if len(found) > 1:
            raise TypeError(
                f"the weights have more than one {what}: {', '.join(found)}; load the model on one "
                "device and in one dtype"
            )
