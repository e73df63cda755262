"""A fused decoder whose operations are the engine's and whose gradients reach the module.

The decoder is a copy of the engine's: the same weights, with the module's own parameters in their
place for autograd. `Decoder.layer` runs unchanged over differentiable operations.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from csd.gradient.attention import RowsAttention
from csd.gradient.operations import (
    GradientOps,
    Laid,
    LayerBuffer,
    Stacked,
    Whole,
    WithoutRow,
    add_lora,
    joined,
    linear,
)
from csd.gradient.rows import Rows
from csd.kernels.attention.reference import Properties
from csd.kernels.ops import Ops
from csd.models.fused.decoder import Decoder, Layer
from csd.models.fused.experts import Experts
from csd.models.fused.layer_parts import experts_of, norms_of, products_of
from csd.models.fused.lora import FusedAdapters, Stack
from csd.models.lora import base_linear, base_of


class FusedPass:
    """One differentiable pass over `Rows`.

    decoder: of the module, exact where the values are to have the sampler's bits.
    """

    def __init__(self, module: nn.Module, decoder: Decoder, ops: Ops, chunk: int):
        self.decoder, self.ops, self.chunk = decoder, ops, chunk
        base: Any = base_of(module)
        self._decoder = run = copy.copy(decoder)
        embedding = base.model.embed_tokens
        run.embedding, run.norm = embedding.weight, base.model.norm.weight
        if embedding.padding_idx is not None:
            run.embedding = WithoutRow.apply(embedding.weight, embedding.padding_idx)
        run.linear, run.parts, run.gated = linear(decoder.linear), None, None
        run.add_lora = _add_lora(decoder)
        stacks = _stacks(decoder.adapters)
        run.layers = [
            _with_parameters(decoder, layer, part, stacks)
            for layer, part in zip(decoder.layers, base.model.layers, strict=True)
        ]
        self.head = base_linear(base.lm_head).weight
        self.head_stacks = [x for stack in decoder.head_lora for x in stacks[id(stack)]]

    def hidden(self, rows: Rows, recompute: bool) -> torch.Tensor:
        """Hidden states [R, hidden] after the last norm.

        recompute: whether the backward computes each layer again in place of keeping its tensors.
        """
        decoder, ops = self._decoder, cast(Any, GradientOps(self.ops))
        attention = RowsAttention(rows, self.ops, decoder.config, self.chunk)
        x, residual = decoder.embedded(rows.token), None
        for i in range(len(decoder.layers)):
            run = _layer(decoder, i, rows, attention, ops)
            if recompute and torch.is_grad_enabled():
                x, residual = checkpoint(run, x, residual, use_reentrant=False)
            else:
                x, residual = run(x, residual)
        return decoder.rms_norm(ops, x, decoder.norm, residual)[0]


def _layer(decoder: Decoder, i: int, rows: Rows, attention: RowsAttention, ops: Any) -> Callable:
    def run(x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        keys, values = LayerBuffer(), LayerBuffer()

        def attend(
            layer: int, q: torch.Tensor, properties: Properties | None = None
        ) -> torch.Tensor:
            return attention(layer, q, keys.take(), values.take(), properties)

        call: Any = partial(decoder.layer, i, x, residual)
        return call(rows.token, rows.position, attend, keys, values, ops)

    return run


def _with_parameters(decoder: Decoder, layer: Layer, module: Any, stacks: dict) -> Layer:
    """The layer with the module's parameters, or tensors that hand gradients on to them."""
    products: dict[str, Any] = {}
    for name, parts in products_of(decoder.config, module).items():
        if parts:
            weights = [base_linear(part).weight for part in parts]
            products[name] = joined(getattr(layer, name), weights)
        if name == "qkv" and layer.qkv_bias is not None:
            products["qkv_bias"] = joined(layer.qkv_bias, [base_linear(p).bias for p in parts])
    norms = {name: norm.weight for name, norm in norms_of(decoder.config, module).items()}
    experts: Any = layer.experts
    if experts is not None:
        own = experts_of(module)
        # one gradient of each matrix, not one of the whole tensor for each expert
        matrices = {n: w if n == "router" else w.unbind(0) for n, w in own.items()}
        experts = Experts(**matrices, per_token=experts.per_token, sum_to_one=experts.sum_to_one)
    lora = {name: [Stack(*pair) for pair in _laid(own, stacks)] for name, own in layer.lora.items()}
    return replace(layer, **products, **norms, experts=experts, lora=lora)


def _stacks(adapters: FusedAdapters | None) -> dict[int, tuple]:
    """Differentiable plain matrices of each stack, by the stack's identity."""
    if adapters is None:
        return {}
    matrices = {}
    for stack, a, b, pieces in adapters.pieces():
        parts_a = [weight for weight, _, _, _ in pieces]
        parts_b = [weight for _, weight, _, _ in pieces]
        places_a = [(rows, slice(None), 1.0) for _, _, (rows, _), _ in pieces]
        places_b = [(out, rows, scale) for _, _, (rows, out), scale in pieces]
        matrices[id(stack)] = (
            # copies, since the next call's adapters are written to the same memory
            Stacked.apply(Whole(a.clone()), places_a, *parts_a),
            Stacked.apply(Whole(b.clone()), places_b, *parts_b),
        )
    return matrices


def _laid(own: list[Stack], stacks: dict[int, tuple]) -> list[tuple]:
    return [
        tuple(Laid(laid, plain) for laid, plain in zip(stack, stacks[id(stack)], strict=True))
        for stack in own
    ]


def _add_lora(decoder: Decoder) -> Callable:
    """`decoder.add_lora`, differentiable, with the decoder's own product."""

    def call(_: Any, x: torch.Tensor, y: torch.Tensor, stacks: list) -> torch.Tensor:
        laid = [Stack(stack.a.laid, stack.b.laid) for stack in stacks]
        return add_lora(partial(decoder.add_lora, decoder.linear, stacks=laid), x, y, stacks)

    return call
