"""Models with the same bits on every x86 CPU with AVX2 and FMA.

A sum has a fixed number of lanes, a product is added in the order of k, and functions are csd's own
(`csd/kernels/numba/math.py`, `csd/models/fused/rope.py`). That is so in the loops of float32 and of
packed weights, for layers as Llama's. `first_other` names the first operation of a model that is
computed by another library, or in lanes of the CPU's vectors.
"""

import platform

import torch

from csd.kernels.common.cpu import compiles
from csd.kernels.layers.quantized import Quantized
from csd.kernels.ops import Ops
from csd.models.fused.decoder import Decoder, DecoderLike
from csd.models.fused.linear import in_loops

# `exact_on` of an engine for whose model `first_other` finds nothing
PORTABLE = "every x86 CPU"
# columns that a loop takes at once with the widest vectors; other weights are a library's there
WIDEST = 32


def first_other(decoder: DecoderLike, dtype: torch.dtype, ops: Ops) -> str | None:
    """The first operation whose bits may depend on the kind of x86 CPU; None if none does.

    ops: the backend that runs beside the decoder's products.
    """
    if not ops.portable or not compiles():
        return f"the operations of kernels={ops.name!r}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the products of a CPU of kind {platform.machine()}"
    if type(decoder) is not Decoder:
        made = type(decoder).__name__
        return "the layers with a state" if made == "HybridDecoder" else f"the layers of a {made}"
    if dtype != torch.float32:
        return f"the products in {str(dtype).removeprefix('torch.')}"
    c = decoder.config
    for differs, operation in (
        (c.experts, "the experts"),
        (not c.is_plain, "the attention with a window or a cap"),
        (c.final_cap, "the cap of logits"),
        (not c.is_llamas, "a layer that differs from Llama's"),
        (c.rope.kind != "default", f"the rotary embedding of type {c.rope.kind!r}"),
        (decoder.adapters is not None, "the adapters"),
        (decoder.taps, "the layers whose inputs a drafter reads"),
    ):
        if differs:
            return operation
    for i, layer in enumerate(decoder.layers):
        for name in ("qkv", "out", "gate_up", "down"):
            if not _is_fixed(getattr(layer, name)):
                return f"the product {name} of layer {i} {_described(getattr(layer, name))}"
    if not _is_fixed(decoder.head):
        return f"the product of the head {_described(decoder.head)}"
    return None


def _is_fixed(weight: torch.Tensor) -> bool:
    """True if a loop multiplies a weight in the order of k, whatever the vectors' width is."""
    if isinstance(weight, Quantized):
        return in_loops(weight)
    # blocks of columns, each [K, columns]
    return weight.dim() == 3 and weight.shape[0] * weight.shape[2] % WIDEST == 0


def _described(weight: torch.Tensor) -> str:
    if isinstance(weight, Quantized) or weight.dim() != 2:
        return f"with {tuple(weight.shape)} numbers"
    return f"with a plain weight {tuple(weight.shape)}, as a module's own"
