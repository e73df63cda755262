"""Refusal of models that no decoder of csd runs, naming the property that rules them out.

A config is checked before weights are read, and a module before a pass is run: among others, its
weights must be complete and local, not sharded, on several devices or not loaded.
`csd.models.module.probe` and `csd.models.module.admit` test the other properties.
"""

import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

from csd.models.lora import base_of, tuner_layers
from csd.models.redirect import CONVOLUTION, CORES, functions_of, is_convolution
from csd.models.text_model import advice


def refuse_sharded(model: Any) -> None:
    """Raises TypeError for a model in FSDP, which shards it."""
    kinds = {c.__name__ for m in [model, *model.modules()] for c in type(m).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise TypeError(
            "an FSDP model has sharded weights; gather them into a plain model "
            "(FullyShardedDataParallel.summon_full_params, or a full state dict)"
        )


def refuse_absent(name: str, param: nn.Parameter) -> None:
    """Raises TypeError for a weight without plain local data."""
    if param.is_meta:
        raise TypeError(
            f"{name} has no data here (offloaded or not loaded); load the whole model on one device"
        )
    if hasattr(param, "ds_id"):
        raise TypeError(f"{name} is a shard of DeepSpeed ZeRO-3; use ZeRO-2 or less, or DDP")
    if type(param.data).__name__ == "DTensor":
        raise TypeError(f"{name} is a DTensor; pass a model with plain local weights")


# kinds of layers with a state in place of keys and values, and fields of their configs. They are
# run if their family computes them with functions that csd has along trees (`redirect.py`)
RECURRENT = ("mamba", "mamba2", "m", "linear_attention", "recurrent", "hybrid", "hybrid_mamba")
CONVOLVED = "conv"
SERVED = "gated delta rules, Mamba-2 and short convolutions of transformers' own modules"
FIELDS = (
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_n_heads",
    "mamba_d_ssm",
    "state_size",
    "ssm_state_size",
    "lru_width",
    "linear_conv_kernel_dim",
    "attention_hidden_size",
    "time_step_rank",
)
BY_LENGTH = "which depends on the longest sequence of a batch, so samples would depend on others"
OTHER_INPUTS = ("vision_config", "audio_config", "speech_config")


def refuse_config(config: Any) -> None:
    """Raises ValueError for a `transformers` config with a property that csd does not run."""
    family = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{family!r} is an encoder-decoder; csd runs decoders")
    for name in OTHER_INPUTS:
        if getattr(config, name, None) is not None:
            raise ValueError(
                f"{family!r} has a {name}, but csd samples text only; {advice(config)}"
            )
    _refuse_states(family, config)
    _refuse_rope(family, config)
    _refuse_file(family, config)


def refuse_module(model: Any) -> None:
    """Raises TypeError or ValueError for a module, or a PeftModel, that csd does not run."""
    refuse_sharded(model)
    refuse_prompt_learning(model)
    model = base_of(model)
    if not hasattr(model, "config"):
        raise TypeError(f"{type(model).__name__} is not a transformers model: it has no config")
    refuse_config(model.config)
    for name, param in model.named_parameters():
        refuse_absent(name, param)
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise TypeError(
            f"the weights are on more than one device: {', '.join(devices)}; load the model on one"
        )
    for name, module in model.named_modules():
        has_state = isinstance(module, nn.RNNBase | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if has_state and not (isinstance(module, nn.Conv1d) and is_convolution(model, name)):
            raise ValueError(
                f"{name} is a {type(module).__name__}, a layer with its own state, which csd "
                "would need for each node of a draft tree and does not support"
            )
    forward = inspect.signature(inspect.unwrap(type(model).forward))
    if "position_ids" not in forward.parameters:
        raise ValueError(
            f"the forward of {type(model).__name__} takes no position_ids, which csd needs to "
            "place the tokens of several samples in one row"
        )


def _refuse_states(family: str, config: Any) -> None:
    text = config.get_text_config()
    for field in ("layer_types", "layers_block_type"):
        kinds = getattr(text, field, None)
        if not isinstance(kinds, Iterable) or isinstance(kinds, str):
            continue
        for i, kind in enumerate(kinds):
            name = str(kind).removesuffix("_sliding")
            if name in (*RECURRENT, CONVOLVED) and not _has_functions(config, name == CONVOLVED):
                what = "a convolution's" if name == CONVOLVED else "a recurrent"
                raise ValueError(
                    f"{family!r} has layers with a state: layer {i} is {kind!r} ({field}), with "
                    f"{what} state that a tree of drafts would need for each node; csd has that of "
                    f"{SERVED}"
                )
        return
    for field in FIELDS:
        if getattr(text, field, None) is not None and not _has_functions(config, False):
            raise ValueError(
                f"{family!r} has layers with a state ({field}={getattr(text, field)!r}), which a "
                f"tree of drafts would need for each node; csd has that of {SERVED}"
            )


def class_of(config: Any) -> Any:
    """Class that AutoModelForCausalLM makes of a config; None if transformers maps none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return made[0] if isinstance(made, tuple) else made


def _has_functions(config: Any, convolution: bool) -> bool:
    """True if the family's file computes states with functions that csd has along trees."""
    made = class_of(config.get_text_config())
    functions = set() if made is None else functions_of(made.__module__)
    return CONVOLUTION in functions and (convolution or bool(functions & set(CORES)))


def _refuse_rope(family: str, config: Any) -> None:
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        return
    # one for all layers, or one per kind of layer
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for rope in ropes:
        kind = rope.get("rope_type")
        if kind == "dynamic":
            raise ValueError(f"{family!r} rotates by rope type 'dynamic', {BY_LENGTH}")
        old = rope.get("original_max_position_embeddings")
        old = old or getattr(text, "original_max_position_embeddings", None)
        if kind == "longrope" and not (old and text.max_position_embeddings <= old):
            raise ValueError(
                f"{family!r} rotates by rope type 'longrope', {BY_LENGTH}; set "
                f"config.max_position_embeddings to {old} before the model is made, and "
                "rope_parameters['factor'] to the ratio of the two, if prompts and samples stay "
                "below that"
            )


def _refuse_file(family: str, config: Any) -> None:
    """Raises ValueError if the family's file does not take its attention from the interface.

    A class that transformers does not map to a family is not checked here.
    """
    made = class_of(config)
    if made is None:
        return
    if not _has_attention(made.__module__):
        raise ValueError(
            f"{family!r} has no attention: csd runs decoders with attention, and hybrids of "
            "attention and recurrent layers, but not purely recurrent models"
        )
    if not _uses_interface(made.__module__):
        raise ValueError(
            f"{family!r} does not get its attention from transformers' AttentionInterface, so csd "
            "cannot replace it"
        )


@cache
def _has_attention(module: str) -> bool:
    return bool(re.search(r"^class \w*Attention", inspect.getsource(sys.modules[module]), re.M))


@cache
def _uses_interface(module: str) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[module])


def refuse_prompt_learning(model: Any) -> None:
    """Raises ValueError for adapters whose result for a row depends on more than the row."""
    configs = dict(getattr(model, "peft_config", None) or {})
    for layer in tuner_layers(model.modules()):
        configs |= getattr(layer, "peft_config", None) or {}
    for name, config in configs.items():
        kind = str(getattr(getattr(config, "peft_type", None), "value", None))
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {name!r} ({kind}) adds keys, values or embeddings to a prompt "
                "(prompt learning), which csd does not support: use LoRA or another adapter of "
                "weights"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"the adapter {name!r} is an aLoRA, which is active only after certain tokens; "
                "csd does not support it"
            )
