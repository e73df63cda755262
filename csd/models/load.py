"""Get a decoder, its tokenizer and its generation config from whatever the user calls a model."""

import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from csd.models.config import ModelConfig
from csd.models.decoder import Decoder
from csd.models.fuse import fuse, is_fused


@dataclass
class Loaded:
    """A model ready to decode."""

    decoder: object
    config: object
    tokenizer: object | None
    generation_config: object | None
    device: torch.device
    dtype: torch.dtype
    # the user's module, held weakly: csd must not keep a model alive
    module: weakref.ref | None = field(default=None, repr=False)

    def refresh(self) -> bool:
        """Fuse again if the user's module no longer shares the decoder's weights.

        Returns whether addresses changed. Weights changed in place need nothing.
        """
        model = self.module() if self.module is not None else None
        if model is None or is_fused(model, self.decoder):
            return False
        self.decoder = fuse(model)
        self.config = self.decoder.config
        self.device, self.dtype = self.decoder.embedding.device, self.decoder.embedding.dtype
        return True

    def current_generation_config(self):
        model = self.module() if self.module is not None else None
        return self.generation_config if model is None else model.generation_config


def load(model, *, dtype=None, device=None, revision=None, tokenizer=None) -> Loaded:
    """model: a transformers model, a local folder, a hub name, a GGUF file, a `Decoder`.

    dtype: the checkpoint's on a GPU and float32 on CPU when not given.
    """
    if isinstance(model, Loaded):
        return model
    if isinstance(model, Decoder):
        weights = model.embedding
        return Loaded(model, model.config, tokenizer, None, weights.device, weights.dtype)
    if isinstance(model, nn.Module):
        return _from_module(model, dtype, device, tokenizer)
    if isinstance(model, str | os.PathLike):
        return _from_path(os.fspath(model), dtype, device, revision, tokenizer)
    raise TypeError(
        "model must be a transformers model, a local folder, a hub name, a GGUF file or a "
        f"csd.Engine, got {type(model).__name__}"
    )


def _from_module(model, dtype, device, tokenizer) -> Loaded:
    if not hasattr(model, "config"):
        raise TypeError(f"{type(model).__name__} is not a transformers model: it has no config")
    if dtype is not None or device is not None:
        raise ValueError("dtype and device belong to the model: convert it with model.to() first")
    decoder = fuse(model)
    weights = decoder.embedding
    return Loaded(
        decoder,
        decoder.config,
        tokenizer if tokenizer is not None else _tokenizer_of(model),
        model.generation_config,
        weights.device,
        weights.dtype,
        weakref.ref(model),
    )


def _tokenizer_of(model):
    """The tokenizer in the folder the model was loaded from, if it came from one."""
    folder = getattr(model.config, "_name_or_path", None)
    return _tokenizer(folder, {}) if folder and os.path.isdir(folder) else None


def _from_path(name: str, dtype, device, revision, tokenizer) -> Loaded:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    place, options = name, {}
    if name.endswith(".gguf"):
        place, options["gguf_file"] = _gguf(name)
    elif os.path.isdir(name):
        _check_folder(name)
    elif os.path.exists(name):
        raise ValueError(f"{name} is a file, but not a GGUF file or a model's folder")
    else:
        options["revision"] = revision or "main"
    if dtype is None:
        dtype = "auto" if device.type == "cuda" else torch.float32
    try:
        config = AutoConfig.from_pretrained(place, **options)
        # refuse before gigabytes are read
        ModelConfig.from_transformers(config)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    except OSError as error:
        raise ValueError(
            f"{name!r} is neither a local model folder nor a model that could be had from the "
            f"hub: {error}"
        ) from error
    decoder = fuse(model.to(device))
    if tokenizer is None:
        tokenizer = _tokenizer(place, options)
    weights = decoder.embedding
    return Loaded(
        decoder, decoder.config, tokenizer, model.generation_config, weights.device, weights.dtype
    )


def _gguf(name: str) -> tuple[str, str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no file {name}")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("GGUF files need two more packages: pip install csd[gguf]") from error
    return str(path.parent), path.name


def _check_folder(name: str) -> None:
    have = os.listdir(name)
    if "config.json" not in have:
        raise ValueError(f"{name} is not a model's folder: it has no config.json")
    if not any(f.endswith((".safetensors", ".bin")) for f in have):
        raise ValueError(f"{name} is not a model's folder: it has no weights (*.safetensors)")


def _tokenizer(place, options):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError):
        # a checkpoint without a tokenizer serves token ids
        return None
