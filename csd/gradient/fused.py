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
    add_lora,
    joined,
    linear,
    made_of,
    without_row,
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
        self.ops, self.chunk = ops, chunk
        base: Any = base_of(module)
        self._decoder = run = copy.copy(decoder)
        embedding = base.model.embed_tokens
        run.embedding, run.norm = embedding.weight, base.model.norm.weight
        if embedding.padding_idx is not None:
            run.embedding = without_row(embedding.weight, embedding.padding_idx)
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

        def run(i: int, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
            keys: Any = LayerBuffer()
            values: Any = LayerBuffer()

            def attend(
                layer: int, q: torch.Tensor, properties: Properties | None = None
            ) -> torch.Tensor:
                return attention(layer, q, keys.take(), values.take(), properties)

            step = rows.token, rows.position, attend, keys, values
            return decoder.layer(i, x, residual, *step, ops)

        x, residual = decoder.embedded(rows.token), None
        for i in range(len(decoder.layers)):
            if recompute and torch.is_grad_enabled():
                x, residual = checkpoint(run, i, x, residual, use_reentrant=False)
            else:
                x, residual = run(i, x, residual)
        return decoder.rms_norm(ops, x, decoder.norm, residual)[0]


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
    lora = {
        name: [Stack(*cast(Any, map(Laid, stack, stacks[id(stack)]))) for stack in own]
        for name, own in layer.lora.items()
    }
    return replace(layer, **products, **norms, experts=experts, lora=lora)


def _stacks(adapters: FusedAdapters | None) -> dict[int, tuple]:
    """Differentiable plain matrices of each stack, by the stack's identity."""
    if adapters is None:
        return {}
    return {id(stack): _plain(a, b, pieces) for stack, a, b, pieces in adapters.pieces()}


def _plain(a: torch.Tensor, b: torch.Tensor, pieces: list[tuple]) -> tuple[torch.Tensor, ...]:
    parts_a, parts_b, places, scales = zip(*pieces, strict=True)
    # copies, since the next call's adapters are written to the same memory
    return (
        made_of(parts_a, a.clone(), lambda grad: [grad[ranks] for ranks, _ in places]),
        made_of(
            parts_b,
            b.clone(),
            lambda grad: [
                grad[out, ranks] * scale for (ranks, out), scale in zip(places, scales, strict=True)
            ],
        ),
    )


def _add_lora(decoder: Decoder) -> Callable:
    """`decoder.add_lora`, differentiable, with the decoder's own product."""

    def call(_: Any, x: torch.Tensor, y: torch.Tensor, stacks: list) -> torch.Tensor:
        laid = [Stack(stack.a.laid, stack.b.laid) for stack in stacks]
        return add_lora(partial(decoder.add_lora, decoder.linear, stacks=laid), x, y, stacks)

    return call
