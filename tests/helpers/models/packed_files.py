"""GGUF files of tiny models whose matrices stay packed."""

import copy
import itertools

import pytest
from helpers.models import gguf_files
from helpers.targets import slow
from torch import nn

from csd.kernels.layers.quantized import Quantized, QuantizedStack

# by turns, so that a fused product has parts of several types
TYPES = ("Q4_0", "Q8_0", "Q5_1")
WIDE = dict(hidden_size=64, intermediate_size=96)
# architectures by what differs in their layers: biases, norms of heads, windows, caps, experts
MODELS = {
    "llama": WIDE,
    "qwen2": WIDE | dict(num_attention_heads=4, num_key_value_heads=2),
    "qwen3": WIDE | dict(tied=True),
    "phi3": WIDE,
    "gemma2": WIDE | dict(tied=True),
    "gemma3": WIDE | dict(tied=True),
    "qwen3moe": WIDE | dict(moe_intermediate_size=32, num_experts=32),
}

CASES = [x if x in ("llama", "gemma3", "qwen3moe") else pytest.param(x, marks=slow) for x in MODELS]


def write(name, folder, **changes):
    """The file of a model with random weights. Returns its path."""
    return write_model(gguf_files.build(name, **MODELS[name] | changes), folder / f"{name}.gguf")


def write_model(model, path, keys=None):
    """The file of a model with more `keys`; its matrices, but for routers, are rounded by gguf."""
    import gguf

    kinds, tensors, types = itertools.cycle(TYPES), {}, {}
    for name, weight in gguf_files.tensors_of(model).items():
        if weight.dim() > 1 and "ffn_gate_inp" not in name:
            types[name] = gguf.GGMLQuantizationType[next(kinds)]
            tensors[name] = gguf.quantize(weight.numpy(), types[name])
    return gguf_files.write(model, str(path), keys, tensors=tensors, types=types)


def dequantized(model):
    """A copy of a module with plain weights."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if isinstance(weight, Quantized | QuantizedStack):
                plain = nn.Parameter(weight.dequantize(), requires_grad=False)
                setattr(module, name, plain)
    return model
