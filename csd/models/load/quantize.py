"""Rounding of a loaded module's matrices to a type of GGUF files, by the gguf package."""

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from csd.kernels.layers.quantized import Quantized, QuantizedStack, has_loop
from csd.kernels.layers.quantized.formats import FORMATS
from csd.models.fused.fusable import checked_config
from csd.models.fused.layer_parts import products_of
from csd.models.lora import base_of
from csd.utils.lazy import check_installed

LOG = logging.getLogger("csd")
# types that the gguf package rounds to and csd multiplies
TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def check_quantization(kind: str, name: str, dtype: Any, device: torch.device, wanted: str) -> None:
    """Raises ValueError or ImportError if a model by this name is not rounded to `kind`."""
    check_installed("gguf", "gguf", "quantization=")
    if name.endswith(".gguf"):
        raise ValueError(
            f"quantization must be None for a GGUF file, whose weights are rounded already, got "
            f"{kind!r}: leave it out, or pass the folder of the original model"
        )
    if dtype is not None:
        raise ValueError(f"dtype must be None with quantization={kind!r}, got {dtype}")
    if wanted == "module":
        raise ValueError(f"quantization must be None with decoder='module', got {kind!r}")
    if device.type != "cpu" or not has_loop():
        raise ValueError(
            f"quantization must be None on {device} here, got {kind!r}: csd multiplies rounded "
            "matrices on x86 CPUs with AVX2 and numba only"
        )


def quantize(model: Any, kind: str) -> None:
    """Round the matrices of a module in place, one at a time; all else becomes float32."""
    config, base = checked_config(model), base_of(model)
    parts = [
        (module, "weight")
        for layer in base.model.layers
        for modules in products_of(config, layer).values()
        for module in modules
    ]
    if config.experts:
        of_experts = [layer.mlp.experts for layer in base.model.layers]
        parts += [(e, name) for e in of_experts for name in ("gate_up_proj", "down_proj")]
    tied = base.lm_head.weight is base.model.embed_tokens.weight
    parts += [(base.model.embed_tokens, "weight")] + [(base.lm_head, "weight")] * (not tied)
    left = 0
    for module, name in parts:
        weight = getattr(module, name)
        if FORMATS[kind.upper()].serves(weight.shape[-1]):
            made = nn.Parameter(rounded(weight.detach(), kind), requires_grad=False)
            setattr(module, name, made)
        else:
            left += 1
    if tied:
        base.lm_head.weight = base.model.embed_tokens.weight
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:
            parameter.data = parameter.data.float()
    if left:
        LOG.warning(
            "%d matrices have a number of columns that is no multiple of 32, and are float32 in "
            "place of %s",
            left,
            kind,
        )


def rounded(weight: torch.Tensor, kind: str) -> Quantized | QuantizedStack:
    """The matrix [N, K], or matrices [E, N, K], rounded to a name in TYPES."""
    format = FORMATS[kind.upper()]
    if weight.dim() > 2:
        return QuantizedStack([Quantized.of_file(_Rows(w, kind), format) for w in weight])
    return Quantized.of_file(_Rows(weight, kind), format)


class _Rows:
    """Rows of a matrix as a file of this type has them, rounded when they are read."""

    def __init__(self, weight: torch.Tensor, kind: str):
        import gguf

        type_of = gguf.GGMLQuantizationType[kind.upper()]
        numbers, size = gguf.GGML_QUANT_SIZES[type_of]
        self.weight, self.round = weight, partial(gguf.quants.quantize, qtype=type_of)
        self.shape = weight.shape[0], weight.shape[1] // numbers * size

    def __getitem__(self, part: slice) -> np.ndarray:
        return self.round(self.weight[part].float().numpy())
