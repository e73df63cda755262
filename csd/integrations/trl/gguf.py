"""A GGUF file as a trainer's model."""

import copy
from typing import Any

import torch

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.models.load import gguf_module, tokenizer_of


def packed_weights(model: torch.nn.Module) -> list[str]:
    """Names of the weights that stay in the blocks of a GGUF file."""
    return [n for n, p in model.named_parameters() if isinstance(p, Quantized | QuantizedStack)]


def with_module(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of TRL's trainer with the module of a GGUF file for its path, and its tokenizer.

    The dtype of `model_init_kwargs` unpacks the weights; without one they stay packed where csd
    multiplies them. Raises ValueError if nothing would be trained, and for other fields of
    `model_init_kwargs`.
    """
    model, args = given["model"], given.get("args")
    if isinstance(model, str) and model.endswith(".gguf"):
        options = dict(getattr(args, "model_init_kwargs", None) or {})
        dtype: Any = options.pop("dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if options:
            raise ValueError(
                f"model_init_kwargs may have a dtype alone for a GGUF file, got {sorted(options)}"
            )
        if given.get("processing_class") is None:
            tokenizer = given["processing_class"] = tokenizer_of(model)
            if tokenizer is None:
                raise ValueError(f"processing_class must be given: {model} has no tokenizer")
            tokenizer.padding_side = tokenizer.truncation_side = "left"
        device = None if args is None else args.device
        given["model"] = model = gguf_module(model, dtype=dtype, device=device)
        if args is not None:
            # TRL reports them as ignored
            given["args"] = copy.copy(args)
            given["args"].model_init_kwargs = None
    if (
        given.get("peft_config") is None
        and isinstance(model, torch.nn.Module)
        and packed_weights(model)
        and not any(p.requires_grad for p in model.parameters())
    ):
        raise ValueError(
            "peft_config must be given for a GGUF file whose weights stay packed, since they have "
            "no gradient, got None; model_init_kwargs=dict(dtype='bfloat16') unpacks them and "
            "trains them all"
        )
    return given
