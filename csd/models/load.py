"""Get a decoder, its tokenizer and its generation config from whatever the user calls a model."""

import os
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from csd.models import gguf_file, gguf_model
from csd.models.config import SUPPORTED, ModelConfig
from csd.models.decoder import Decoder, DecoderLike
from csd.models.fuse import DTYPES, fuse, is_fused
from csd.models.linear import multiplies_bfloat16
from csd.models.pack import pack


@dataclass
class Loaded:
    """A model ready to decode."""

    decoder: DecoderLike
    config: ModelConfig
    tokenizer: Any
    generation_config: Any
    device: torch.device
    dtype: torch.dtype
    # the user's module, held weakly: csd must not keep a model alive
    module: weakref.ref | None = field(default=None, repr=False)

    def refresh(self) -> bool:
        """Fuse again if the user's module no longer shares the decoder's weights.

        Returns whether addresses changed. Weights changed in place need nothing.
        """
        model = self.module() if self.module is not None else None
        if model is None:
            return False
        if isinstance(self.decoder, Decoder) and is_fused(model, self.decoder):
            return False
        self.decoder = decoder = fuse(model)
        self.config = decoder.config
        self.device, self.dtype = decoder.embedding.device, decoder.embedding.dtype
        return True

    def current_generation_config(self) -> Any:
        model = self.module() if self.module is not None else None
        return self.generation_config if model is None else model.generation_config


def load(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    tokenizer: Any = None,
) -> Loaded:
    """model: a transformers model, a local folder, a hub name, a GGUF file, a `Decoder`.

    dtype: when not given, the checkpoint's where the device multiplies bfloat16 in hardware; on
    such a CPU a GGUF file runs in bfloat16 and float16 becomes float32. Elsewhere float32.
    """
    if isinstance(model, Loaded):
        return model
    if isinstance(model, str | os.PathLike):
        return _from_path(os.fspath(model), dtype, device, revision, tokenizer)
    if not isinstance(model, nn.Module | Decoder):
        raise TypeError(
            "model must be a transformers model, a local folder, a hub name, a GGUF file or a "
            f"csd.Engine, got {type(model).__name__}"
        )
    for name, value in (("dtype", dtype), ("device", device), ("revision", revision)):
        if value is not None:
            raise ValueError(f"{name} belongs to the model that is passed, got {value!r}")
    if isinstance(model, Decoder):
        return _loaded(model, tokenizer)
    decoder = fuse(model)
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    return _loaded(decoder, tokenizer, model.generation_config, weakref.ref(model))


def _loaded(
    decoder: Decoder,
    tokenizer: Any,
    generation_config: Any = None,
    module: weakref.ref | None = None,
) -> Loaded:
    weights = decoder.embedding
    return Loaded(
        decoder,
        decoder.config,
        tokenizer,
        generation_config,
        weights.device,
        weights.dtype,
        module,
    )


def _tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer where the model came from: its folder, or the hub's files on this machine."""
    place = getattr(model.config, "_name_or_path", None)
    return _tokenizer(place, {"local_files_only": True}) if place else None


def _from_path(
    name: str,
    dtype: torch.dtype | str | None,
    device: str | torch.device | None,
    revision: str | None,
    tokenizer: Any,
) -> Loaded:
    device = _device(device)
    if dtype is None:
        dtype = _default_dtype(device, name.endswith(".gguf"))
    elif dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    place, options = name, {}
    if name.endswith(".gguf"):
        place, options["gguf_file"] = gguf_file.folder_and_file(name)
    elif os.path.isdir(name):
        _check_folder(name)
    elif os.path.exists(name):
        raise ValueError(f"{name} is a file, but not a GGUF file or a model's folder")
    else:
        options["revision"] = revision or "main"
    if revision is not None and "revision" not in options:
        raise ValueError(f"revision is for hub names, and {name} is a local path")
    with gguf_file.read_once() if "gguf_file" in options else nullcontext():
        read = _read_gguf if "gguf_file" in options else _read
        model = read(name, place, dtype, options)
        if tokenizer is None:
            tokenizer = _tokenizer(place, options)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        # few CPUs multiply it, and float32 holds its numbers
        model = model.float()
    decoder, generation_config = fuse(model.to(device)), model.generation_config
    # a plain matrix is freed when its packed one is made
    del model
    pack(decoder)
    return _loaded(decoder, tokenizer, generation_config)


def _default_dtype(device: torch.device, is_gguf: bool) -> torch.dtype | str:
    if device.type == "cuda":
        return "auto"
    if device.type != "cpu" or not multiplies_bfloat16():
        return torch.float32
    return torch.bfloat16 if is_gguf else "auto"


def _read(name: str, place: str, dtype: torch.dtype | str, options: dict) -> Any:
    """The transformers model. What csd cannot run is refused before gigabytes are read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(place, **options)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be loaded; {SUPPORTED}: {error}") from error
    except OSError as error:
        raise ValueError(_no_model(name, error)) from error
    except ImportError:
        raise
    # a file may make its readers raise anything
    except Exception as error:
        raise ValueError(f"{name!r} has a config.json that is not one: {_brief(error)}") from error
    try:
        ModelConfig.from_transformers(config)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{name!r} has a config.json that is not one: {_brief(error)}") from error
    try:
        model, seen = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except ImportError:
        raise
    except MemoryError as error:
        raise MemoryError(f"{name!r} does not fit into memory: {_brief(error)}") from error
    except Exception as error:
        raise ValueError(_no_model(name, error)) from error
    # transformers would go on with random weights
    if seen["missing_keys"]:
        raise ValueError(
            f"{name!r} lacks the weights {', '.join(sorted(seen['missing_keys'])[:3])}"
        )
    # nor say more than a word about layers that the config does not count
    beyond = sorted(key for key in seen["unexpected_keys"] if ".layers." in key)
    if beyond:
        raise ValueError(
            f"{name!r} has weights beyond the {config.num_hidden_layers} layers of its config: "
            f"{', '.join(beyond[:3])}"
        )
    return model


def _read_gguf(name: str, place: str, dtype: torch.dtype | str, options: dict) -> Any:
    """The transformers model of a GGUF file. "auto" is float32: the file has no dtype of its own."""
    try:
        return gguf_model.read(
            os.path.join(place, options["gguf_file"]),
            torch.float32 if isinstance(dtype, str) else dtype,
        )
    except MemoryError as error:
        raise MemoryError(f"{name!r} does not fit into memory: {_brief(error)}") from error
    # a file may make its reader raise anything
    except Exception as error:
        raise ValueError(f"{name!r} cannot be loaded; {SUPPORTED}: {_brief(error)}") from error


def _no_model(name: str, error: Exception) -> str:
    if os.path.exists(name):
        return f"{name!r} cannot be loaded: {_brief(error)}"
    return (
        f"{name!r} is neither a local model folder nor a model that could be had from the hub: "
        f"{_brief(error)}"
    )


def _brief(error: Exception) -> str:
    """What an error means to the model's owner, without advice that is not for them."""
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that runs code, or a torn one; save them as *.safetensors"
    text = str(error)
    if "ignore_mismatched_sizes" in text:
        return "its weights have other shapes than its config.json says; the list above has them"
    if not isinstance(error, OSError | ValueError | RuntimeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 600 else text[:599] + "…"


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    # torch raises what its back ends raise
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {error}") from error
    return found


def _check_folder(name: str) -> None:
    have = os.listdir(name)
    if "config.json" not in have:
        raise ValueError(f"{name} is not a model's folder: it has no config.json")
    if not any(f.endswith((".safetensors", ".bin")) for f in have):
        raise ValueError(f"{name} is not a model's folder: it has no weights (*.safetensors)")


_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
}


def _tokenizer(place: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    # transformers makes an empty tokenizer for some families where there is none
    local = os.path.isdir(place) and "gguf_file" not in options
    if local and not _TOKENIZER_FILES.intersection(os.listdir(place)):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError):
        # a checkpoint without a tokenizer serves token ids
        return None
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"the tokenizer of {place!r} cannot be read: {_brief(error)}") from error
    if "gguf_file" in options:
        from csd.models import gguf_tokenizer

        path = os.path.join(place, options["gguf_file"])
        try:
            gguf_tokenizer.complete(tokenizer, path)
        except Exception as error:
            raise ValueError(f"the tokenizer of {path!r} cannot be read: {_brief(error)}") from error
    return tokenizer
