"""Fusion of a loaded `transformers` model into a decoder, which shares its memory or packs its own.

`fuse`: query, key and value weights become one matrix, and so do gate and up. The module's
parameters are rebound to views of the fused tensors through `param.data`, so each Parameter object
stays the same and there is one copy of the weights: an optimiser made earlier updates both.

`pack` converts a decoder's matrices to the layout that the CPU's library multiplies; otherwise the
library would do so in every product. A packed matrix replaces the plain one, so only a decoder that
does not share its weights is packed.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from csd.kernels.layers.quantized import Quantized
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import PRODUCTS, Decoder, HybridDecoder, Layer
from csd.models.fused.delta_net import DeltaNet, delta_parameters
from csd.models.fused.experts import Experts
from csd.models.fused.fusable import checked_config
from csd.models.fused.layer_parts import (
    embedding_scale_of,
    experts_of,
    frequencies_of,
    is_delta,
    norms_of,
    products_of,
)
from csd.models.fused.linear import packed
from csd.models.fused.lora import FusedAdapters, key_of
from csd.models.lora import base_linear, base_of, is_lora
from csd.utils.device import free_bytes


def fuse(model: Any) -> Decoder:
    """Fuse `model` in place, layer by layer, and return the decoder over its weights.

    A model that is already fused keeps its memory. Raises ValueError or TypeError for a model that
    csd does not run and for weights that are not plain local tensors.
    """
    config, base = checked_config(model), base_of(model)
    inner: Any = base.model
    layers = [_fuse_layer(config, layer) for layer in inner.layers]
    head = base_linear(base.lm_head).weight.data
    embedding = inner.embed_tokens.weight.data
    # the module's own frequencies: model.to(bfloat16) rounds them, which changes its logits
    w = frequencies_of(inner.rotary_emb)
    kind = Decoder if config.delta is None else HybridDecoder
    decoder = kind(config, embedding, layers, inner.norm.weight.data, head, *w)
    decoder.embedding_scale = embedding_scale_of(inner.embed_tokens)
    products = _products(config, base)
    if any(is_lora(part) for parts in products for part in parts):
        decoder.add_adapters(FusedAdapters(products))
    return decoder


def of_tensors(
    config: ModelConfig, tensors: dict[str, torch.Tensor], frequencies: torch.Tensor | None
) -> Decoder:
    """A decoder of tensors by the names that they have in a module of the family.

    frequencies: as in `Decoder`. It needs no module, whose code takes longer to import than a small
    model to read.
    """
    base = SimpleNamespace()
    for name, tensor in tensors.items():
        at, (*path, last) = base, name.split(".")
        for part in path:
            vars(at).setdefault(part, SimpleNamespace())
            at = getattr(at, part)
        setattr(at, last, tensor)
    inner = base.model
    layers = [_fuse_layer(config, getattr(inner.layers, str(i))) for i in range(config.layers)]
    embedding = inner.embed_tokens.weight
    head = base.lm_head.weight if hasattr(base, "lm_head") else embedding
    return Decoder(config, embedding, layers, inner.norm.weight, head, frequencies)


def is_fused(model: Any, decoder: Decoder) -> bool:
    """True if the module's weights, sizes and rotary frequencies still are the decoder's.

    Weights are compared by address, which `model.to()` or a load that replaces tensors changes, and
    adapters by their layers, ranks and dtypes.
    """
    base = base_of(model)
    inner: Any = base.model
    if len(inner.layers) != len(decoder.layers) or checked_config(model) != decoder.config:
        return False
    known = decoder.frequencies, decoder.local_frequencies
    now = frequencies_of(inner.rotary_emb)
    if not all(_same_values(x, y) for x, y in zip(now, known, strict=False)):
        return False
    if embedding_scale_of(inner.embed_tokens) != decoder.embedding_scale:
        return False
    if not _same_adapters(_products(decoder.config, base), decoder.adapters):
        return False
    pairs: list[tuple] = [
        (inner.embed_tokens.weight, decoder.embedding),
        (inner.norm.weight, decoder.norm),
        (base_linear(base.lm_head).weight, decoder.head),
    ]
    for module, layer in zip(inner.layers, decoder.layers, strict=True):
        for name, params in _parameters(decoder.config, module).items():
            if params:
                parts = getattr(layer, name).split([p.shape[0] for p in params])
                pairs += zip(params, parts, strict=True)
        if layer.experts is not None:
            experts = experts_of(module)
            pairs += [(weight, getattr(layer.experts, name)) for name, weight in experts.items()]
        if layer.delta is not None:
            delta = delta_parameters(module.linear_attn)
            pairs += zip(delta, layer.delta.tensors(), strict=True)
    return all(
        p.data_ptr() == t.data_ptr()
        and p.dtype == t.dtype
        and p.device == t.device
        and p.stride() == t.stride()
        for p, t in pairs
    )


def _products(config: ModelConfig, base: Any) -> list[list[Any]]:
    """Modules that make up each fused product: four products per layer, and the head's."""
    products = [
        parts for layer in base.model.layers for parts in products_of(config, layer).values()
    ]
    return [*products, [base.lm_head]]


def _same_adapters(products: list[list[Any]], adapters: FusedAdapters | None) -> bool:
    loras = [part for parts in products for part in parts if is_lora(part)]
    if adapters is None:
        return not loras
    before = [part for parts in adapters.products for part in parts if is_lora(part)]
    same = len(loras) == len(before) and all(a is b for a, b in zip(loras, before, strict=True))
    return same and key_of(products) == adapters.key


def _same_values(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    return y is not None and x.device == y.device and x.dtype == y.dtype and torch.equal(x, y)


def _parameters(config: ModelConfig, layer: Any) -> dict[str, list[Any]]:
    """Parameters that each tensor of a decoder's `Layer` consists of, by its name."""
    products = products_of(config, layer)
    biased = products["qkv"] if config.qkv_bias else ()
    return {
        **{name: [base_linear(m).weight for m in parts] for name, parts in products.items()},
        "qkv_bias": [base_linear(m).bias for m in biased],
        **{name: [norm.weight] for name, norm in norms_of(config, layer).items()},
    }


def _fuse_layer(config: ModelConfig, layer: Any) -> Layer:
    absent: dict[str, Any] = dict.fromkeys(("input_norm", "q_norm", "k_norm", "post_norm"))
    joined = {
        name: _join(params) if params else None
        for name, params in _parameters(config, layer).items()
    }
    experts = None
    if config.experts:
        weights = {name: weight.data for name, weight in experts_of(layer).items()}
        experts = Experts(
            **weights, per_token=config.experts_per_token, sum_to_one=config.experts_sum_to_one
        )
    delta = None
    if config.delta and is_delta(layer):
        conv, decay, dt_bias, norm = delta_parameters(layer.linear_attn)
        delta = DeltaNet(config.delta.state, conv, decay, dt_bias, norm, config.norm_eps)
    return Layer(**absent | joined, experts=experts, delta=delta)


@torch.no_grad()
def _join(params: list[Any]) -> torch.Tensor:
    """Concatenation of parameters, which become views of it in place."""
    if all(isinstance(p, Quantized) for p in params):
        return Quantized.cat(params)
    rows = [p.shape[0] for p in params]
    whole = _joined(params, sum(rows))
    if whole is not None:
        return whole
    # parameters of inference mode can be views only of a tensor of that mode
    with torch.inference_mode(params[0].is_inference()):
        fused = torch.cat([p.data for p in params])
        for param, view in zip(params, fused.split(rows), strict=True):
            param.data = view
    return fused


def _joined(params: list[nn.Parameter], rows: int) -> torch.Tensor | None:
    """The tensor whose consecutive views the parameters already are; None if they are not.

    An earlier call made them views: two engines on one model share its memory.
    """
    first, end = params[0].data, params[0].data_ptr()
    for p in params:
        same = p.data.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not p.is_contiguous() or p.data_ptr() != end:
            return None
        end += p.numel() * p.element_size()
    shape = (rows, *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


# a tied head is packed in addition to the embedding if free memory is this many times its size
SPARE = 16


def pack(decoder: Decoder) -> None:
    """Pack the decoder's matrices in place, one at a time.

    The embedding is read by rows and stays plain. Does nothing on a GPU and for dtypes that oneDNN
    does not multiply here.
    """
    if decoder.embedding.device.type != "cpu":
        return
    for layer in decoder.layers:
        for name in PRODUCTS:
            if getattr(layer, name) is not None:
                setattr(layer, name, packed(getattr(layer, name)))
    head = decoder.head
    tied = head.data_ptr() == decoder.embedding.data_ptr()
    if not tied or free_bytes(head.device) >= SPARE * head.numel() * head.element_size():
        decoder.head = packed(head)
