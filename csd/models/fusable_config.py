"""Sizes of a `transformers` model for the fused decoder, and checks that rule a model out."""

from typing import Any

import torch
from torch import nn

from csd.models.adapters import base_of, tuner_layers
from csd.models.config import ModelConfig
from csd.models.lora import base_linear, is_lora, refuse_lora, without_adapters
from csd.models.refuse_patched import refuse_patched
from csd.models.refuse_sharded import refuse_absent, refuse_sharded
from csd.models.refuse_unsupported import refuse_prompt_learning

# suffixes of the names of layers that are parts of a fused product
_PRODUCTS = ("_proj", "lm_head", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def checked_config(model: nn.Module) -> ModelConfig:
    """The sizes of a model. Raises TypeError or ValueError if the fused decoder does not run it."""
    _refuse_wrapped(model)
    model = base_of(model)
    if not hasattr(model, "config"):
        raise TypeError(f"{type(model).__name__} is not a transformers model: it has no config")
    config = ModelConfig.from_transformers(model.config)
    if not hasattr(model, "lm_head"):
        raise TypeError(
            f"{type(model).__name__} has no lm_head; load the model with AutoModelForCausalLM"
        )
    _refuse_weights(model, config)
    _refuse_sizes(model, config)
    refuse_patched(model, config)
    if config.experts and model.device.type == "cuda" and model.dtype != torch.bfloat16:
        raise ValueError(
            f"experts in {model.dtype} on a GPU: their grouped product supports only bfloat16 there"
        )
    return config


def _refuse_wrapped(model: nn.Module) -> None:
    refuse_sharded(model)
    refuse_prompt_learning(model)
    for name, module in base_of(model).named_modules():
        if is_lora(module):
            refuse_lora(name, module)
        elif tuner_layers([module]):
            raise TypeError(
                f"{name} is a {type(module).__name__} of peft; csd's fused decoder supports only "
                "the LoRA of a Linear"
            )


def _refuse_sizes(model: Any, config: ModelConfig) -> None:
    """Raises ValueError if the embedding or head has another shape than the config's."""
    # the embedding first, since that is the one that users resize
    wanted = {
        "model.embed_tokens": (config.vocab, config.hidden),
        "lm_head": (config.vocab, config.hidden),
    }
    for name, shape in wanted.items():
        found = tuple(base_linear(model.get_submodule(name)).weight.shape)
        if found != shape:
            raise ValueError(
                f"{name}.weight must have the shape {shape} of the config's vocab_size and "
                f"hidden_size, got {found}"
            )


def _refuse_weights(model: nn.Module, config: ModelConfig) -> None:
    for name, module in without_adapters(model):
        if not name.endswith(_PRODUCTS):
            continue
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{name} is a {type(module).__name__}, not a plain Linear: quantised or wrapped "
                "weights are not supported; load the model in bfloat16, float16 or float32"
            )
    biased = ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()
    for name, module in without_adapters(model):
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
    plain = [p for _, m in without_adapters(model) for p in m.parameters(recurse=False)]
    for what in ("device", "dtype"):
        found = sorted({str(getattr(p, what)) for p in plain})
        if len(found) > 1:
            raise TypeError(
                f"the weights have more than one {what}: {', '.join(found)}; load the model on one "
                "device and in one dtype"
            )
